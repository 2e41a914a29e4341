"""Embeddings that are trained with an adapter: its own table of tokens, in place of the base's.

The base model's table stays as it is. All modules that share it (`shared` and `embed_tokens` of an
encoder-decoder) get one `Table` per adapter, and so does a language modelling head of the adapter's
name that is tied to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo import inject
from adapterzoo.anatomy import Site
from adapterzoo.checkpoint.digest import digest
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import CheckpointError, StateError, listing
from adapterzoo.inject.building import at_hand, device_of, layer_at
from adapterzoo.methods._table import Table

from .adapters import AdaptersMixin

Made = dict[str, tuple[Adapter, list[Placement]]]
LOCATION = "embeddings"


class TablesMixin(AdaptersMixin):
    """What has a table of tokens of its own, and what shares it."""

    _tied_weights_keys: dict[str, str] | None

    def _tables_of(self, name: str) -> tuple[str, ...]:
        """Paths of the embeddings for which an adapter has a table; they share one."""
        installed = self._adapter_state.records.get(name)
        places = {} if installed is None else installed.places
        return tuple(path for path, ps in places.items() if ps and ps[0].location == LOCATION)

    def _table_of(self, name: str) -> nn.Parameter | None:
        """The table of an adapter, None where it has none or there is no adapter of the name."""
        for path in self._tables_of(name):
            layer = cast("inject.Adapted", layer_at(self._backbone, path))
            return cast("nn.Parameter", cast("Table", layer.adapters[name]).table.weight)
        return None

    def _own_table(self) -> Tensor:
        """The base model's table as it was before adapters were merged into it."""
        path = self._embedding_paths("save_adapter()")[0]
        weight = cast("Tensor", layer_at(self._backbone, path)._parameters["weight"])
        return self._adapter_state.originals.get(path, {}).get("weight", weight)

    def _embedding_paths(self, call: str) -> tuple[str, ...]:
        """Paths of the modules that look tokens up in the table of the input embeddings.

        Raises:
            StateError: the model has no such table.
        """
        model = cast("Any", self)
        try:
            embedding = model.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            embedding = None
        if not isinstance(embedding, nn.Embedding):
            held = "none" if embedding is None else f"a {inject.plain_class(embedding).__name__}"
            raise StateError(
                f"{call}: trained embeddings are a table of tokens, and the input embeddings of "
                f"this {type(self).__name__} are not one ({held}). Leave train_embeddings out."
            )
        shared = embedding._parameters["weight"]
        return tuple(
            path
            for path, module in self._backbone.named_modules()
            if isinstance(module, nn.Embedding) and module._parameters["weight"] is shared
        )

    def _check_table(self, name: str, call: str) -> None:
        """Check that an adapter has a table, or can get one.

        Raises:
            StateError: it cannot.
        """
        paths = self._embedding_paths(call)
        if self._tables_of(name):
            return
        self._refuse_if_overridden(name, call)
        self._refuse_if_fused(name, call)
        there = self._adapter_state.records[name].places
        if taken := [path for path in paths if path in there]:
            raise StateError(
                f"{call}: the adapter {name!r} sits at {listing(taken)}, the embeddings that shall "
                f"be trained whole. Leave train_embeddings out, or add it with "
                f"exclude_modules={[path.rpartition('.')[2] for path in taken]!r}."
            )
        for path in paths:
            self._check_lookup(path, call)

    def _check_lookup(self, path: str, call: str) -> None:
        """Check that the layer looks rows up and does nothing else."""
        layer = cast("nn.Embedding", layer_at(self._backbone, path))
        with at_hand(layer), torch.no_grad():
            weight = layer._parameters["weight"]
            if weight is None or weight.is_meta:
                return
            base = inject.base_of(layer)
            ids = torch.arange(min(8, layer.num_embeddings), device=weight.device)
            table = Table(weight.shape[0], weight.shape[1], weight.device, weight.dtype)
            table.init_from_layer(base)
            if not torch.equal(table(ids, base), base(ids)):
                raise StateError(
                    f"{call}: the embedding at {path!r}, a {inject.plain_class(layer).__name__}, "
                    f"does more than look rows up, so that an adapter cannot have its own. Leave "
                    f"train_embeddings out."
                )

    def _make_tables(
        self, config: AdapterConfig, paths: tuple[str, ...], device: torch.device | None = None
    ) -> Made:
        """A fresh table for all paths.

        Args:
            config: of the adapter.
            paths: of the embeddings, which share one table.
            device: None: that of the first.
        """
        if not paths:
            return {}
        layer = cast("nn.Embedding", layer_at(self._backbone, paths[0]))
        rows, width = layer.num_embeddings, layer.embedding_dim
        made = Table(rows, width, device or device_of(layer), layer.weight.dtype)
        return {
            path: (made, [Placement(_site(path, rows, width), config, LOCATION)]) for path in paths
        }

    def _add_table(self, name: str, paths: tuple[str, ...] | None = None) -> None:
        """Give an adapter a table with the values of the base model, unless it has one.

        Args:
            name: of the adapter.
            paths: of the embeddings; None: those that share the table of the input embeddings,
                which a model that is being loaded cannot tell yet.
        """
        if self._tables_of(name):
            return
        paths = paths or self._embedding_paths("train_adapter()")
        installed, order = self._adapter_state.records[name], list(self._adapter_state.records)
        made: Made = {p: (m, list(installed.places[p])) for p, m in self.adapter_modules(name)}
        tables = self._make_tables(installed.config, paths)
        for path, (table, _) in list(tables.items())[:1]:
            layer = layer_at(self._backbone, path)
            with at_hand(layer), torch.no_grad():
                # a model that is being loaded has no values yet, and the file has the table
                if not any(p is not None and p.is_meta for p in layer._parameters.values()):
                    inject.init_from_layer(
                        layer, table, self._adapter_state.originals.get(path, {})
                    )
        self._bring_in(name, installed.config, {**made, **tables}, False, installed.meta)
        # it was taken out and put back
        for each in order:
            self._adapter_state.records[each] = self._adapter_state.records.pop(each)

    # --- what is shared ---

    def _settle_ties(self, name: str) -> None:
        listed = vars(self).get("all_tied_weights_keys") or {}
        gone = any(f".adapters.{name}." in f"{key} {other}" for key, other in listed.items())
        # most adapters have no table, and the fiftieth shall cost what the first did
        if gone or self._tables_of(name):
            self._list_tied()

    def _ties(self) -> dict[str, str]:
        """Keys in the state dict that are another one's parameter, to that one."""
        whole = self._backbone is cast("Any", self)
        start = "" if whole else f"{cast('Any', self).base_model_prefix}."
        found = {}
        for name in self._adapter_state.records:
            first, *rest = self._tables_of(name) or ("",)
            end = f"adapters.{name}.table.weight"
            found.update({f"{start}{p}.{end}": f"{start}{first}.{end}" for p in rest})
        return found

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """What shares its parameter with what: pairs of the base model, of heads and adapters."""
        pairs = cast("Any", super()).get_expanded_tied_weights_keys(all_submodels=all_submodels)
        # transformers asks for it in the constructor
        return {**pairs, **self._ties()} if "_adapter_state" in vars(self) else pairs

    def _list_tied(self) -> None:
        tied = self._ties()
        # transformers reads these as patterns
        own = type(cast("Any", self))._tied_weights_keys or {}
        listed = vars(self).get("all_tied_weights_keys")
        vars(self).pop("_tied_weights_keys", None)
        if tied:
            patterns = {re.escape(k): re.escape(v) for k, v in tied.items()}
            self._tied_weights_keys = {**own, **patterns}
        # absent until transformers has finished the constructor
        if listed is not None:
            for key in [k for k in listed if k.startswith("heads.") or ".adapters." in k]:
                del listed[key]
            listed.update(tied)

    # --- files ---

    def _compact(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        """What a file says of a table, and the tensors of an adapter with its changed rows only.

        Args:
            name: of the adapter.
            tensors: all of them, as `_tensors_of` names them.
        """
        paths = self._tables_of(name)
        if not paths:
            return None, dict(tensors)
        keys = [f"{path}/table.weight" for path in paths]
        kept = {key: tensor for key, tensor in tensors.items() if key not in keys}
        table, base = tensors[keys[0]].detach(), self._own_table().detach()
        said: dict[str, Any] = {"paths": list(paths)}
        rows = _changed_rows(table, base)
        if rows is None:
            return said, {**kept, keys[0]: table}
        kept |= {f"{paths[0]}/rows": rows, f"{paths[0]}/values": table[rows]}
        return {**said, "base": digest(base)}, kept

    def _expanded(
        self, call: str, said: object, tensors: Mapping[str, Tensor]
    ) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """The paths of a file's table, and its tensors with the whole of it.

        Args:
            call: what the user wrote, for messages.
            said: what the file says of a table; None where it has none.
            tensors: of the file.

        Raises:
            CheckpointError: it does not fit the embeddings of this model.
        """
        if said is None:
            return (), dict(tensors)
        listed = said.get("paths") if isinstance(said, Mapping) else None
        try:
            paths = self._embedding_paths(call)
        except StateError as error:
            raise CheckpointError(
                f"{call}: the checkpoint has trained embeddings, and this {type(self).__name__} "
                f"has no table of tokens. Load the model that it was trained on."
            ) from error
        if not isinstance(said, Mapping) or listed != list(paths):
            raise CheckpointError(
                f"{call}: the checkpoint has trained embeddings at {listed!r}, and those of this "
                f"{type(self).__name__} are at {list(paths)!r}. Load the model that it was "
                f"trained on."
            )
        kept = dict(tensors)
        rows, values = kept.pop(f"{paths[0]}/rows", None), kept.pop(f"{paths[0]}/values", None)
        if rows is not None and values is not None:
            base = self._own_table().detach()
            _check_rows(call, rows, values, base)
            if base.dtype is values.dtype and said.get("base") != digest(base):
                raise CheckpointError(
                    f"{call}: the checkpoint holds {len(rows)} trained rows of the embeddings, and "
                    f"the other rows of this model are not those that it was trained with. Load "
                    f"the base model that it was trained on, as large as it was then."
                )
            whole = base.to("cpu", values.dtype, copy=True)
            whole[rows] = values
            kept[f"{paths[0]}/table.weight"] = whole
        if f"{paths[0]}/table.weight" in kept:
            kept |= {f"{path}/table.weight": kept[f"{paths[0]}/table.weight"] for path in paths}
        return paths, kept


def _site(path: str, rows: int, width: int) -> Site:
    return Site(path, "embedding", -1, "", "embedding", rows, width)


def _changed_rows(table: Tensor, base: Tensor) -> Tensor | None:
    """Numbers of the rows whose bits differ; None where they are many or cannot be compared."""
    plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_meta for t in (table, base))
    if not plain or table.dtype is not base.dtype or table.shape != base.shape:
        return None
    # -0 and NaN have bits too
    pairs = [t.cpu().contiguous().view(torch.uint8) for t in (table, base)]
    rows = (pairs[0] != pairs[1]).any(dim=1).nonzero().flatten()
    return rows if 2 * len(rows) < len(table) else None


def _check_rows(call: str, rows: Tensor, values: Tensor, base: Tensor) -> None:
    shaped = rows.dim() == 1 and values.shape == (len(rows), base.shape[1])
    inside = shaped and bool(((rows >= 0) & (rows < len(base))).all())
    if not inside or rows.dtype is not torch.int64:
        raise CheckpointError(
            f"{call}: the checkpoint has trained rows of the embeddings, {list(values.shape)} for "
            f"numbers {list(rows.shape)}, that do not lie in those of this model, "
            f"{list(base.shape)}. Load the model that it was trained on."
        )
