"""Named embeddings: tables of tokens that take the place of the model's own, one at a time.

The active table is the weight of the modules that embed tokens and of every output layer that is
tied to them, so that a language model answers in the vocabulary that it reads. The others wait in
`other_embeddings`, each with the biases that the output layers have beside it. "default" is the
model's own table.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor, nn

from adapterzoo import inject
from adapterzoo.anatomy import without_wrappers
from adapterzoo.config import Placement
from adapterzoo.errors import DuplicateNameError, StateError, listing, unknown_name
from adapterzoo.inject.building import layer_at
from adapterzoo.inject.quantized import packing_of
from adapterzoo.model.hf.hosts import refuse_while_batching
from adapterzoo.model.hf.task_classes import text_config
from adapterzoo.model.sharding import refuse_if_sharded
from adapterzoo.model.state import DEFAULT_EMBEDDINGS as DEFAULT
from adapterzoo.model.state import AdaptedModel, token_table
from adapterzoo.names import check_name

_LOG = logging.getLogger(__name__)
_STORE = "other_embeddings"
# of BART and its relatives: a buffer that is added to the logits
ADDED = "final_logits_bias"


class InactiveTable(nn.Module):
    """Embeddings that are not active.

    Attributes:
        weight: the table `[vocab_size, d]`; biases of output layers lie beside it, under their
            paths with slashes.
        padding_idx: the token whose row gets no gradient; None for none.
    """

    def __init__(self, weight: Tensor, padding_idx: int | None) -> None:
        """Keep a table.

        Args:
            weight: `[vocab_size, d]`.
            padding_idx: token whose row gets no gradient.
        """
        super().__init__()
        self.weight = cast("nn.Parameter", weight)
        self.padding_idx = padding_idx

    def keep(self, key: str, bias: Tensor) -> None:
        """Keep what an output layer adds to the logits, `[*, vocab_size]`."""
        kept = self._parameters if isinstance(bias, nn.Parameter) else self._buffers
        cast("dict[str, Tensor]", kept)[key] = bias

    def biases(self) -> dict[str, Tensor]:
        """Return what output layers add to the logits, by key."""
        own = {**self._parameters, **self._buffers}
        return {key: t for key, t in own.items() if key != "weight" and t is not None}

    def drop(self, start: str) -> None:
        """Forget the biases whose keys begin so."""
        for kept in (self._parameters, self._buffers):
            for key in [key for key in kept if key.startswith(start)]:
                del kept[key]


# --- look ---


def names(model: AdaptedModel) -> tuple[str, ...]:
    """Return the names of all embeddings, "default" first."""
    known = {DEFAULT: None, model._adapter_state.embeddings: None}
    return tuple({**known, **dict.fromkeys(inactive_of(model))})


def loaded(model: AdaptedModel) -> Mapping[str, nn.Embedding]:
    """Return all embeddings by name, as modules on the model's own parameters.

    Raises:
        StateError: the model has no table of tokens.
    """
    active = layer_of(model)
    found: dict[str, Any] = dict.fromkeys(names(model))
    found[model._adapter_state.embeddings] = active
    found.update(inactive_of(model))
    return MappingProxyType({name: _view(of.weight, of.padding_idx) for name, of in found.items()})


def find(model: AdaptedModel, name: str) -> nn.Embedding:
    """Return the embeddings of this name.

    Raises:
        UnknownNameError: there are none.
    """
    found = loaded(model)
    if name not in found:
        raise unknown_name("", "embedding", name, found)
    return found[name]


def inactive_parameters(model: AdaptedModel) -> Iterator[nn.Parameter]:
    """Yield the parameters of the embeddings that are not active."""
    for inactive in inactive_of(model).values():
        yield from inactive.parameters()


def tensors(model: AdaptedModel) -> dict[str, Tensor]:
    """Return the tables by name, where there are others than the model's own."""
    if not inactive_of(model):
        return {}
    return {name: module.weight for name, module in loaded(model).items()}


def default_table(model: AdaptedModel) -> Tensor | None:
    """Return the model's own table where it is not active."""
    inactive = inactive_of(model).get(DEFAULT)
    return None if inactive is None else inactive.weight


def biases_of(model: AdaptedModel, name: str) -> dict[str, Tensor]:
    """Return what tied output layers add to the logits beside these embeddings, by key."""
    if name == model._adapter_state.embeddings:
        return {key: tensor for key, tensor, _ in _biases(model)}
    return inactive_of(model)[name].biases()


def inactive_of(model: AdaptedModel) -> dict[str, InactiveTable]:
    """Return the embeddings that are not active, by name."""
    store = cast("nn.Module", model)._modules.get(_STORE)
    return cast("dict[str, InactiveTable]", {} if store is None else store._modules)


def layer_of(model: AdaptedModel) -> nn.Embedding:
    """Return the module that embeds tokens.

    Raises:
        StateError: the model has no table of tokens.
    """
    layer = token_table(model)
    if layer is None:
        raise StateError(
            f"the input embeddings of this {type(model).__name__} are not a table of tokens, so "
            f"that no other can take its place."
        )
    return layer


def _view(weight: Tensor, padding_idx: int | None) -> nn.Embedding:
    # no memory is allocated for the values that are replaced at once
    rows, width = weight.shape
    made = nn.Embedding(rows, width, padding_idx=padding_idx, device="meta")
    made.weight = cast("nn.Parameter", weight)
    return made


# --- add and delete ---


def free_place(model: AdaptedModel, name: str) -> nn.Embedding:
    """Return the module that embeds tokens, if embeddings of a new name may become active there.

    Raises:
        DuplicateNameError: the name is taken.
        StateError: they cannot become active.
    """
    check_name(name)
    if name in names(model):
        raise DuplicateNameError(
            f"there are embeddings {name!r}. Write another name, or delete_embeddings({name!r})."
        )
    _refuse_change(model)
    return layer_of(model)


def enter(model: AdaptedModel, name: str, made: InactiveTable) -> None:
    """Add embeddings that `free_place` allows, and activate them."""
    store_of(model)[name] = made
    _exchange(model, name)


def store_of(model: AdaptedModel) -> inject.AdapterDict:
    """Return the container of the embeddings that are not active, made when missing."""
    modules = cast("nn.Module", model)._modules
    if _STORE not in modules:
        modules[_STORE] = inject.AdapterDict()
    return cast("inject.AdapterDict", modules[_STORE])


def delete(model: AdaptedModel, name: str) -> None:
    """Delete embeddings; if they are active, the model's own become active.

    Raises:
        StateError: they are the model's own, or no others can become active.
        UnknownNameError: there are none of this name.
    """
    find(model, name)
    if name == DEFAULT:
        raise StateError(
            f"{DEFAULT!r} is the model's own table and cannot be deleted. Known embeddings: "
            f"{listing(names(model))}."
        )
    if name == model._adapter_state.embeddings:
        activate(model, DEFAULT)
        _LOG.warning("The active embeddings %r are deleted; %r is active now.", name, DEFAULT)
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    del store_of(model)._modules[name]
    if not inactive_of(model):
        del cast("nn.Module", model)._modules[_STORE]


def drop_biases(model: AdaptedModel, head: str) -> None:
    """Forget the biases that a named head, which goes, had with embeddings that are not active."""
    for inactive in inactive_of(model).values():
        inactive.drop(f"heads/{head}/")


# --- activate ---


def activate(model: AdaptedModel, name: str) -> None:
    """Let other embeddings take the place of the active ones.

    Raises:
        StateError: something that acts has the size of the active ones, or the model is sharded.
        UnknownNameError: there are none of this name.
    """
    find(model, name)
    if name == model._adapter_state.embeddings:
        return
    _refuse_change(model)
    _exchange(model, name)


def _exchange(model: AdaptedModel, name: str) -> None:
    """Replace the active table and the biases beside it, wherever they are."""
    state, store, layer = model._adapter_state, store_of(model), layer_of(model)
    incoming = cast("InactiveTable", store._modules.pop(name))
    old, rows = layer.weight, len(incoming.weight)
    outgoing = InactiveTable(old, layer.padding_idx)
    biases = incoming.biases()
    for key, bias, holders in _biases(model):
        outgoing.keep(key, bias)
        fresh = biases.get(key)
        if fresh is None:
            # the head came later: no token is more likely than another
            fresh = bias.new_zeros(*bias.shape[:-1], rows)
            if isinstance(bias, nn.Parameter):
                fresh = nn.Parameter(fresh, bias.requires_grad)
        for held, field in holders:
            held[field] = fresh
    for module in cast("nn.Module", model).modules():
        if module._parameters.get("weight") is not old:
            continue
        module._parameters["weight"] = incoming.weight
        if isinstance(module, nn.Embedding):
            module.num_embeddings, module.padding_idx = rows, incoming.padding_idx
        elif "out_features" in vars(module):
            cast("Any", module).out_features = rows
    store[state.embeddings] = outgoing
    state.embeddings, state.anatomy = name, None
    if _follows(model, incoming.weight):
        text_config(model.config).vocab_size = rows
        for part in {id(m): m for m in (model, model._backbone)}.values():
            if "vocab_size" in vars(part):
                cast("Any", part).vocab_size = rows


def _biases(model: AdaptedModel) -> list[tuple[str, Tensor, list[tuple[dict[str, Any], str]]]]:
    """Return what tied output layers add to the logits: a key, the tensor, and who holds it."""
    whole, table = cast("nn.Module", model), layer_of(model).weight
    tied = {
        path: module
        for path, module in whole.named_modules()
        if module._parameters.get("weight") is table and not isinstance(module, nn.Embedding)
    }
    biases = {id(m._parameters.get("bias")) for m in tied.values()} - {id(None)}
    found: dict[int, tuple[str, Tensor, list[tuple[dict[str, Any], str]]]] = {}
    for path, module in whole.named_modules():
        for field, tensor in (*module._parameters.items(), *module._buffers.items()):
            start = f"{path}." if path else ""
            beside = field == ADDED and any(each.startswith(start) for each in tied)
            if tensor is None or not (beside or id(tensor) in biases):
                continue
            holder: Any = module._parameters if field in module._parameters else module._buffers
            # a name of a parameter has no dots
            key = without_wrappers(f"{start}{field}").replace(".", "/")
            found.setdefault(id(tensor), (key, tensor, []))[2].append((holder, field))
    return list(found.values())


def _follows(model: AdaptedModel, table: Tensor) -> bool:
    """Return whether the config has the number of the embedded tokens, not of an untied output."""
    output = None if model._has_named_heads else model.get_output_embeddings()
    return output is None or output.weight is table


# --- whole models ---


def activate_saved(model: AdaptedModel) -> None:
    """Activate the embeddings that a saved model had, whose values are there now."""
    name, model._adapter_state.coming_embeddings = model._adapter_state.coming_embeddings, None
    if name is not None:
        activate(model, name)


@contextlib.contextmanager
def own_in_place(model: AdaptedModel) -> Iterator[bool]:
    """Let a model be saved with its own table; yield whether another was active."""
    name = model._adapter_state.embeddings
    if name == DEFAULT:
        yield False
        return
    activate(model, DEFAULT)
    model._adapter_state.coming_embeddings = name
    try:
        yield True
    finally:
        activate_saved(model)


def check_plain(model: AdaptedModel) -> None:
    """Check that a plain model can have the active embeddings.

    Raises:
        StateError: its output layer is not tied, and its config has one number of tokens.
    """
    active = model._adapter_state.embeddings
    table = layer_of(model).weight if active != DEFAULT else None
    if table is not None and not _follows(model, table):
        raise StateError(
            f"the embeddings {active!r} are active, and the output layer of the model is not tied "
            f"to them. Write set_active_embeddings({DEFAULT!r}) first."
        )


def keep_active(model: AdaptedModel) -> None:
    """Forget all embeddings but the active ones, of a model that becomes a plain one."""
    cast("nn.Module", model)._modules.pop(_STORE, None)
    model._adapter_state.embeddings = DEFAULT


# --- what does not fit ---


def _refuse_change(model: AdaptedModel) -> None:
    """Refuse to replace a table on whose size or values something else depends.

    Raises:
        StateError: something does.
    """
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    refuse_while_batching(model)
    layer, active = layer_of(model), model._active
    if packing_of(layer.weight) is not None or layer.weight.is_meta:
        how = "offloaded" if layer.weight.is_meta else "quantized"
        raise StateError(
            f"the table of tokens is {how}, and no other can take its place. Load the model "
            f"without that."
        )
    setups = [plan.setup for plan in (active.default.plan, *active.overrides) if plan.setup]
    acting = dict.fromkeys(name for setup in setups for name in setup.flatten())
    state = model._adapter_state
    for name in (*acting, *state.merged):
        if name in state.records and _table_paths(model, state.records[name].places):
            raise StateError(
                f"the adapter {name!r} adapts the table of tokens and has its size. Write "
                f"set_active_adapters(None), or reset_adapter() if it is merged."
            )


def refuse_own_size(
    model: AdaptedModel, name: str, places: Mapping[str, Sequence[Placement]]
) -> None:
    """Refuse an adapter of the model's own table where other embeddings are active.

    Raises:
        StateError: it adapts the table.
    """
    active = model._adapter_state.embeddings
    if active != DEFAULT and (found := _table_paths(model, places)):
        raise StateError(
            f"{name} adapts {listing(found)} and has the size of the model's own table, and the "
            f"embeddings {active!r} are active. Write set_active_embeddings({DEFAULT!r}) first."
        )


def _table_paths(model: AdaptedModel, places: Mapping[str, Sequence[Placement]]) -> list[str]:
    """Return the paths at which an adapter has the size of the active table."""
    table = layer_of(model).weight
    paths = [path for path, ps in places.items() if any(p.site.kind == "embedding" for p in ps)]
    layers = ((path, layer_at(model._backbone, path)) for path in paths)
    return [path for path, layer in layers if layer._parameters.get("weight") is table]
