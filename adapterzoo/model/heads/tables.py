"""Embeddings trained with an adapter: its own table of tokens, instead of the base model's.

The base model's table stays as it is. All modules that share it (`shared` and `embed_tokens` of an
encoder-decoder) get one `Table` per adapter, and so does a language modeling head of the adapter's
name that is tied to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo import inject
from adapterzoo.anatomy import Site, input_embeddings_of, without_wrappers
from adapterzoo.config import Placement
from adapterzoo.errors import CheckpointError, StateError, listing
from adapterzoo.formats.fit import digest
from adapterzoo.inject.building import at_hand, device_of, layer_at
from adapterzoo.methods.copies.table import Table
from adapterzoo.model.activation import check_setup, refuse_used, replan
from adapterzoo.model.adapters import init_values, install, uninstall
from adapterzoo.model.state import (
    DEFAULT_EMBEDDINGS,
    AdaptedModel,
    AdapterRecord,
    modules_of,
    token_table,
)

from .copies import LOCATION, tables_of
from .embeddings import default_table


def _base_table(model: AdaptedModel) -> Tensor:
    """Return the base model's table as it was before adapters were merged into it."""
    if (waiting := default_table(model)) is not None:
        return waiting
    path = _embedding_paths(model)[0]
    weight = cast("Tensor", layer_at(model._backbone, path)._parameters["weight"])
    return model._adapter_state.originals.get(path, {}).get("weight", weight)


def _embedding_paths(model: AdaptedModel) -> tuple[str, ...]:
    """Return the paths of the modules that look tokens up in the table of the input embeddings.

    Raises:
        StateError: the model has no such table.
    """
    embedding = input_embeddings_of(model)
    if not isinstance(embedding, nn.Embedding):
        held = "none" if embedding is None else f"a {inject.plain_class(embedding).__name__}"
        raise StateError(
            f"trained embeddings are a table of tokens, and the input embeddings of this "
            f"{type(model).__name__} are not one ({held}). Leave train_embeddings out."
        )
    shared = embedding._parameters["weight"]
    return tuple(
        without_wrappers(path)
        for path, module in model._backbone.named_modules()
        if isinstance(module, nn.Embedding) and module._parameters["weight"] is shared
    )


def check_table(model: AdaptedModel, name: str) -> None:
    """Check that an adapter has a table, or can get one.

    Raises:
        StateError: it cannot.
    """
    paths = _embedding_paths(model)
    if tables_of(model, name):
        return
    refuse_used(model, name)
    record = model._adapter_state.records[name]
    if taken := [path for path in paths if path in record.places]:
        hint = f"train the embeddings with another adapter, in a Stack with {name!r}"
        if all("exclude_modules" in [*config] for config in record.config.members):
            hint = f"add it with exclude_modules={[path.rpartition('.')[2] for path in taken]!r}"
        raise StateError(
            f"the adapter {name!r} already adapts {listing(taken)}, the embeddings to be trained "
            f"in full. Leave train_embeddings out, or {hint}."
        )
    for path in paths:
        _check_lookup(model, path)


def _check_lookup(model: AdaptedModel, path: str) -> None:
    """Check that the layer looks rows up and does nothing else."""
    layer = cast("nn.Embedding", layer_at(model._backbone, path))
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
                f"the embedding at {path!r}, a {inject.plain_class(layer).__name__}, does more "
                f"than look rows up, so that an adapter cannot have its own. Leave "
                f"train_embeddings out."
            )


def with_table(
    model: AdaptedModel,
    record: AdapterRecord,
    paths: tuple[str, ...],
    device: torch.device | None = None,
) -> AdapterRecord:
    """Return an adapter that is not in the model with a fresh table.

    Args:
        model: with adapters.
        record: of the adapter, with its modules.
        paths: of the embeddings, which share one table.
        device: None: that of the first.
    """
    if not paths:
        return record
    layer = cast("nn.Embedding", layer_at(model._backbone, paths[0]))
    rows, width = layer.num_embeddings, layer.embedding_dim
    table = Table(rows, width, device or device_of(layer), layer.weight.dtype)
    sites = [Site(path, "embedding", -1, "", "embedding", rows, width) for path in paths]
    places = {site.path: (Placement(site, record.config, LOCATION),) for site in sites}
    return dataclasses.replace(
        record,
        places={**record.places, **places},
        coming={**record.coming, **dict.fromkeys(paths, table)},
    )


def add_table(model: AdaptedModel, name: str, paths: tuple[str, ...] | None = None) -> None:
    """Give an adapter a table with the values of the base model, unless it has one.

    Args:
        model: with adapters.
        name: of the adapter.
        paths: of the embeddings; None: those that share the table of the input embeddings, which
            a model that is being loaded cannot tell yet.
    """
    if tables_of(model, name):
        return
    records = model._adapter_state.records
    paths = paths or _embedding_paths(model)
    there = dataclasses.replace(records[name], coming=dict(modules_of(model, name)))
    record = with_table(model, there, paths)
    init_values(model, paths[0], record.coming[paths[0]])
    plan, order = model._active.default.plan, list(records)
    check_setup(model, plan.setup, plan.skip_layers, records={name: record})
    # its head and the parameters that it shares stay
    uninstall(model, name)
    install(model, name, record)
    for each in order:
        records[each] = records.pop(each)
    replan(model)


# --- files ---


def compact(
    model: AdaptedModel, name: str, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return the file's entry for a table, and an adapter's tensors with only its changed rows.

    Args:
        model: with adapters.
        name: of the adapter.
        tensors: all of them, as checkpoints name them.
    """
    paths = tables_of(model, name)
    if not paths:
        return None, dict(tensors)
    keys = [f"{path}/table.weight" for path in paths]
    kept = {key: tensor for key, tensor in tensors.items() if key not in keys}
    table, base = tensors[keys[0]].detach(), _base_table(model).detach()
    entry: dict[str, Any] = {"paths": list(paths)}
    rows = _changed_rows(table, base)
    if rows is None:
        return entry, {**kept, keys[0]: table}
    kept |= {f"{paths[0]}/rows": rows, f"{paths[0]}/values": table[rows]}
    return {**entry, "base": digest(base)}, kept


def expand(
    model: AdaptedModel, entry: object, tensors: Mapping[str, Tensor]
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Return the paths of a file's table, and the file's tensors with the whole of it.

    Args:
        model: with adapters.
        entry: the file's entry for a table; None without one.
        tensors: of the file.

    Raises:
        CheckpointError: it does not fit the embeddings of this model.
    """
    if entry is None:
        return (), dict(tensors)
    if (active := model._adapter_state.embeddings) != DEFAULT_EMBEDDINGS:
        raise CheckpointError(
            f"the checkpoint has trained embeddings, which change the model's own, and the "
            f"embeddings {active!r} are active. Write set_active_embeddings("
            f"{DEFAULT_EMBEDDINGS!r}) first."
        )
    listed = entry.get("paths") if isinstance(entry, Mapping) else None
    paths = () if token_table(model) is None else _embedding_paths(model)
    if not isinstance(entry, Mapping) or listed != list(paths):
        raise CheckpointError(
            f"the checkpoint has trained embeddings at {listed!r}, and those of this "
            f"{type(model).__name__} are at {list(paths)!r}. Load the model that it was trained on."
        )
    kept = dict(tensors)
    rows, values = kept.pop(f"{paths[0]}/rows", None), kept.pop(f"{paths[0]}/values", None)
    key = f"{paths[0]}/table.weight"
    if rows is not None and values is not None:
        base = _base_table(model).detach()
        _check_rows(rows, values, base)
        if base.dtype is values.dtype and entry.get("base") != digest(base):
            raise CheckpointError(
                f"the checkpoint holds {len(rows)} trained rows of the embeddings, and the other "
                f"rows of this model are not those that it was trained with. Load the base model "
                f"that it was trained on, as large as it was then."
            )
        whole = base.to("cpu", values.dtype, copy=True)
        whole[rows] = values
        kept[key] = whole
    if key in kept:
        kept |= {f"{path}/table.weight": kept[key] for path in paths}
    return paths, kept


def _changed_rows(table: Tensor, base: Tensor) -> Tensor | None:
    """Return the rows whose bits differ; None if they are many or cannot be compared."""
    plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_meta for t in (table, base))
    if not plain or table.dtype is not base.dtype or table.shape != base.shape:
        return None
    # -0 and NaN have bits too
    pairs = [t.cpu().contiguous().view(torch.uint8) for t in (table, base)]
    rows = (pairs[0] != pairs[1]).any(dim=1).nonzero().flatten()
    return rows if 2 * len(rows) < len(table) else None


def _check_rows(rows: Tensor, values: Tensor, base: Tensor) -> None:
    shaped = rows.dim() == 1 and values.shape == (len(rows), base.shape[1])
    inside = shaped and bool(((rows >= 0) & (rows < len(base))).all())
    if not inside or rows.dtype is not torch.int64:
        raise CheckpointError(
            f"the checkpoint has trained rows of the embeddings, {list(values.shape)} for numbers "
            f"{list(rows.shape)}, that do not lie in those of this model, {list(base.shape)}. "
            f"Load the model that it was trained on."
        )
