"""Token tables, named or trained with an adapter, and parameters that adapters share.

*Named embeddings* replace the model's own table, one at a time. The active table is the weight of
the modules that embed tokens and of every output layer that is tied to them, so a language model
answers in the vocabulary that it reads. The others are stored in `other_embeddings`, each with the
biases that output layers have for it. "default" is the model's own table.

*Embeddings trained with an adapter* are a table of its own; the base model's table does not change.
All modules that share that table (`shared` and `embed_tokens` of an encoder-decoder) use the
adapter's `Table`, and so does a head with the adapter's name that is tied to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import Site, without_wrappers
from adapterzoo.composition import Composition
from adapterzoo.config import MultiTaskConfig, Placement, architectures
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    DuplicateNameError,
    FieldError,
    StateError,
    listing,
    unknown_name,
)
from adapterzoo.formats.fit import digest
from adapterzoo.inject.adapted import AdapterDict
from adapterzoo.inject.building import blank_copy, device_of
from adapterzoo.inject.layers import packing_of
from adapterzoo.methods._copies import Table, TokenRows
from adapterzoo.model.activation import (
    check_setup,
    refuse_merged,
    refuse_overridden,
    refuse_used,
    replan,
)
from adapterzoo.model.adapters import init_values, install, uninstall
from adapterzoo.model.hf.guards import refuse_in_flight, refuse_while_batching
from adapterzoo.model.hf.task_classes import text_config
from adapterzoo.model.sharding import refuse_if_sharded
from adapterzoo.model.state import DEFAULT_EMBEDDINGS as DEFAULT
from adapterzoo.model.state import (
    AdaptedModel,
    AdapterRecord,
    layer_in,
    modules_of,
    output_embeddings_of,
    shareable_of,
    token_table,
)
from adapterzoo.names import check_name

from .copies import LOCATION, at_table, leave_groups, list_ties, rows_of, tables_of, update_rows

_LOG = logging.getLogger(__name__)
STORE = "other_embeddings"
# of BART and its relatives: a buffer that is added to the logits
ADDED = "final_logits_bias"


class InactiveTable(nn.Module):
    """Embeddings that are not active.

    Attributes:
        weight: the table `[vocab_size, d]`. Further parameters and buffers are biases of output
            layers; their names are the paths with slashes.
        padding_idx: the token whose row gets no gradient; None for none.
    """

    def __init__(self, weight: Tensor, padding_idx: int | None) -> None:
        """Store a table.

        Args:
            weight: the table `[vocab_size, d]`.
            padding_idx: the token whose row gets no gradient.
        """
        super().__init__()
        self.weight = cast("nn.Parameter", weight)
        self.padding_idx = padding_idx

    def keep(self, key: str, bias: Tensor) -> None:
        """Store the bias that an output layer adds to the logits, `[*, vocab_size]`."""
        kept = self._parameters if isinstance(bias, nn.Parameter) else self._buffers
        cast("dict[str, Tensor]", kept)[key] = bias

    def biases(self) -> dict[str, Tensor]:
        """Return the biases of output layers, by key."""
        own = {**self._parameters, **self._buffers}
        return {key: t for key, t in own.items() if key != "weight" and t is not None}


# --- look ---


def loaded(model: AdaptedModel) -> Mapping[str, nn.Embedding]:
    """Return all embeddings by name, as modules that share the model's parameters.

    Raises:
        StateError: the model has no token table.
    """
    inactive = inactive_of(model)
    own: Any = {model._adapter_state.embeddings: layer_of(model)}
    found = {DEFAULT: inactive.get(DEFAULT), **own, **inactive}
    views: dict[str, nn.Embedding] = {}
    for name, of in found.items():
        # no memory is allocated for the values that are replaced at once
        rows, width = of.weight.shape
        views[name] = nn.Embedding(rows, width, of.padding_idx, device="meta")
        views[name].weight = of.weight
    return MappingProxyType(views)


def find(model: AdaptedModel, name: str) -> nn.Embedding:
    """Return the embeddings with this name.

    Raises:
        UnknownNameError: there are none.
    """
    if name not in (found := loaded(model)):
        raise unknown_name("", "embedding", name, found)
    return found[name]


def biases_of(model: AdaptedModel, name: str) -> dict[str, Tensor]:
    """Return the biases that tied output layers have for these embeddings, by key."""
    if name == model._adapter_state.embeddings:
        return {key: tensor for key, tensor, _ in _biases(model)}
    return inactive_of(model)[name].biases()


def inactive_of(model: AdaptedModel) -> dict[str, InactiveTable]:
    """Return the embeddings that are not active, by name."""
    store = cast("nn.Module", model)._modules.get(STORE)
    return cast("dict[str, InactiveTable]", {} if store is None else store._modules)


def layer_of(model: AdaptedModel) -> nn.Embedding:
    """Return the module that embeds tokens.

    Raises:
        StateError: the model has no token table.
    """
    if (layer := token_table(model)) is None:
        raise StateError(
            f"the input embeddings of this {type(model).__name__} are not a table of tokens, which "
            f"embeddings and train_embeddings need."
        )
    return layer


# --- add and delete ---


def free_place(model: AdaptedModel, name: str) -> nn.Embedding:
    """Check that embeddings can be added and activated; return the module that embeds tokens.

    Raises:
        DuplicateNameError: the name is taken.
        StateError: they cannot become active.
    """
    check_name(name)
    if name in loaded(model):
        raise DuplicateNameError(
            f"there are embeddings {name!r}. Write another name, or delete_embeddings({name!r})."
        )
    _refuse_change(model)
    return layer_of(model)


def enter(model: AdaptedModel, name: str, made: InactiveTable) -> None:
    """Add embeddings, after `free_place` has checked them, and activate them."""
    store_of(model)[name] = made
    _exchange(model, name)


def store_of(model: AdaptedModel) -> AdapterDict:
    """Return the container of the embeddings that are not active; make it if it is missing."""
    modules = cast("nn.Module", model)._modules
    if STORE not in modules:
        modules[STORE] = AdapterDict()
    return cast("AdapterDict", modules[STORE])


def delete(model: AdaptedModel, name: str) -> None:
    """Delete embeddings; if they are active, the model's own become active.

    Raises:
        StateError: they are the model's own, or other embeddings cannot become active now.
        UnknownNameError: there are none with this name.
    """
    find(model, name)
    if name == DEFAULT:
        raise StateError(f"{DEFAULT!r} is the model's own table and cannot be deleted.")
    if name == model._adapter_state.embeddings:
        activate(model, DEFAULT)
        _LOG.warning("The active embeddings %r are deleted; %r is active now.", name, DEFAULT)
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    del store_of(model)._modules[name]
    if not inactive_of(model):
        del cast("nn.Module", model)._modules[STORE]


def drop_biases(model: AdaptedModel, head: str) -> None:
    """Delete the biases of a head that is being deleted from the embeddings that are not active."""
    for inactive in inactive_of(model).values():
        for key in inactive.biases():
            if key.startswith(f"heads/{head}/"):
                delattr(inactive, key)


# --- activate ---


def activate(model: AdaptedModel, name: str) -> None:
    """Replace the active embeddings by others.

    Raises:
        StateError: an active adapter depends on the size of the table, or the model is sharded.
        UnknownNameError: there are no embeddings with this name.
    """
    find(model, name)
    if name == model._adapter_state.embeddings:
        return
    _refuse_change(model)
    _exchange(model, name)


def _exchange(model: AdaptedModel, name: str) -> None:
    """Replace the active table and its biases in all modules that have them."""
    state, store, layer = model._adapter_state, store_of(model), layer_of(model)
    incoming = cast("InactiveTable", store._modules.pop(name))
    old, rows = layer.weight, len(incoming.weight)
    outgoing = InactiveTable(old, layer.padding_idx)
    biases = incoming.biases()
    for key, bias, holders in _biases(model):
        outgoing.keep(key, bias)
        # for a head that was added later: no token is more likely than another
        fresh = bias.new_zeros(*bias.shape[:-1], rows)
        if isinstance(bias, nn.Parameter):
            fresh = nn.Parameter(fresh, bias.requires_grad)
        for held, field in holders:
            held[field] = biases.get(key, fresh)
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
    """Return the biases of tied output layers: key, tensor, and (dict, name) of each holder."""
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
            # names of parameters have no dots
            key = without_wrappers(f"{start}{field}").replace(".", "/")
            found.setdefault(id(tensor), (key, tensor, []))[2].append((holder, field))
    return list(found.values())


def _follows(model: AdaptedModel, table: Tensor) -> bool:
    """Return whether `vocab_size` in the config is that of this table, not of an untied output."""
    output = None if model._has_named_heads else output_embeddings_of(model)
    return output is None or output.weight is table


# --- whole models ---


@contextlib.contextmanager
def own_in_place(model: AdaptedModel) -> Iterator[bool]:
    """Return a context in which the model's own table is active; yields whether another was."""
    name = model._adapter_state.embeddings
    if name == DEFAULT:
        yield False
        return
    activate(model, DEFAULT)
    # the saved config names them
    model._adapter_state.coming_embeddings = name
    try:
        yield True
    finally:
        model._adapter_state.coming_embeddings = None
        activate(model, name)


def check_plain(model: AdaptedModel) -> None:
    """Check that a plain model can have the active embeddings.

    Raises:
        StateError: its output layer is not tied to them, and the config has a single `vocab_size`.
    """
    active = model._adapter_state.embeddings
    if active != DEFAULT and not _follows(model, layer_of(model).weight):
        raise StateError(
            f"the embeddings {active!r} are active, and the output layer is not tied to them. "
            f"Write set_active_embeddings({DEFAULT!r}) first."
        )


# --- checks ---


def _refuse_change(model: AdaptedModel) -> None:
    """Refuse to replace the active table where its size or values are in use.

    Raises:
        StateError: they are.
    """
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    refuse_while_batching(model)
    layer, active = layer_of(model), model._active
    if packing_of(layer.weight) is not None or layer.weight.is_meta:
        how = "offloaded" if layer.weight.is_meta else "quantized"
        raise StateError(f"the table of tokens is {how}. Load the model without that.")
    setups = [plan.setup for plan in (active.default.plan, *active.overrides) if plan.setup]
    state = model._adapter_state
    for name in (*(name for setup in setups for name in setup.flatten()), *state.merged):
        if name in state.records and at_table(model, state.records[name].places):
            raise StateError(
                f"{name!r} adapts the table of tokens and has its size. Write "
                f"set_active_adapters(None), or reset_adapter() if it is merged."
            )


# --- embeddings that are trained with an adapter ---


def _base_table(model: AdaptedModel) -> Tensor:
    """Return the base model's table as it was before adapters were merged into it."""
    if (inactive := inactive_of(model).get(DEFAULT)) is not None:
        return inactive.weight
    path = _embedding_paths(model)[0]
    weight = cast("Tensor", layer_in(model, path)._parameters["weight"])
    return model._adapter_state.originals.get(path, {}).get("weight", weight)


def _embedding_paths(model: AdaptedModel) -> tuple[str, ...]:
    """Return the paths of the modules that look tokens up in the table of the input embeddings.

    Raises:
        StateError: the model has no such table.
    """
    shared = layer_of(model)._parameters["weight"]
    return tuple(
        without_wrappers(path)
        for path, module in model._backbone.named_modules()
        if isinstance(module, nn.Embedding) and module._parameters["weight"] is shared
    )


def check_table(model: AdaptedModel, name: str) -> None:
    """Check that an adapter has its own table, or can get one.

    Raises:
        StateError: it cannot get one.
    """
    paths = _embedding_paths(model)
    if tables_of(model, name):
        return
    refuse_used(model, name)
    refuse_in_flight(model, name)
    record = model._adapter_state.records[name]
    if taken := [path for path in paths if path in record.places]:
        raise StateError(
            f"{name!r} already adapts {listing(taken)}, the embeddings to be trained in full. "
            f"Leave train_embeddings out, or train them with an adapter in a Stack with {name!r}."
        )
    # raises if the embedding cannot have a copy
    blank_copy(layer_in(model, paths[0]), paths[0], torch.device("meta"))


def with_table(
    model: AdaptedModel,
    record: AdapterRecord,
    paths: tuple[str, ...],
    device: torch.device | None = None,
) -> AdapterRecord:
    """Return the record of an adapter that is not in the model yet, with a new table.

    Args:
        model: a model with adapters.
        record: the record of the adapter, with its modules.
        paths: paths of the embeddings, which share one table; without any, there is no table.
        device: the table's device; None: that of the first embedding.
    """
    if not paths:
        return record
    layer = cast("nn.Embedding", layer_in(model, paths[0]))
    rows, width = layer.num_embeddings, layer.embedding_dim
    table = Table(blank_copy(layer, paths[0], device or device_of(layer)))
    sites = [Site(path, "embedding", -1, "", "embedding", rows, width) for path in paths]
    places = {site.path: (Placement(site, record.config, LOCATION),) for site in sites}
    return dataclasses.replace(
        record,
        places={**record.places, **places},
        coming={**record.coming, **dict.fromkeys(paths, table)},
    )


def add_table(model: AdaptedModel, name: str, paths: tuple[str, ...] | None = None) -> None:
    """Give an adapter its own table with the base model's values, unless it has one.

    Args:
        model: a model with adapters.
        name: name of the adapter.
        paths: paths of the embeddings; None: those that share the table of the input embeddings,
            which are not known yet while a model is being loaded.
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
    # its head stays, and so do the parameters that it shares
    uninstall(model, name)
    install(model, name, record)
    for each in order:
        records[each] = records.pop(each)
    replan(model)


# --- files ---


def compact(
    model: AdaptedModel, name: str, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return the file's entry for a table, and the adapter's tensors with only the changed rows.

    Args:
        model: a model with adapters.
        name: name of the adapter.
        tensors: all tensors of the adapter, by their keys in checkpoints.
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
    """Return the paths of a file's table, and the file's tensors with the whole table.

    Args:
        model: a model with adapters.
        entry: the file's entry for a table; None without one.
        tensors: the tensors in the file.

    Raises:
        CheckpointError: the table does not fit the embeddings of this model.
    """
    if entry is None:
        return (), dict(tensors)
    if (active := model._adapter_state.embeddings) != DEFAULT:
        raise CheckpointError(
            f"the checkpoint has trained embeddings, and the embeddings {active!r} are active. "
            f"Write set_active_embeddings({DEFAULT!r}) first."
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
        shaped = rows.dtype is torch.int64 and values.shape == (*rows.shape, base.shape[1])
        fits = shaped and bool(((rows >= 0) & (rows < len(base))).all())
        if not fits or (base.dtype is values.dtype and entry.get("base") != digest(base)):
            raise CheckpointError(
                f"the checkpoint holds {len(rows)} trained rows of the embeddings, and the others "
                f"here are not those of its base model. Load that model, as large as it was then."
            )
        whole = base.to("cpu", values.dtype, copy=True)
        whole[rows] = values
        kept[key] = whole
    if key in kept:
        kept |= {f"{path}/table.weight": kept[key] for path in paths}
    return paths, kept


def _changed_rows(table: Tensor, base: Tensor) -> Tensor | None:
    """Return the numbers of the rows whose bits differ; None if too many do, or it is unknown."""
    plain = all(type(t) in (Tensor, nn.Parameter) and not t.is_meta for t in (table, base))
    if not plain or table.dtype is not base.dtype or table.shape != base.shape:
        return None
    # compare bits, since −0 equals 0 and NaN does not equal itself
    pairs = [t.cpu().contiguous().view(torch.uint8) for t in (table, base)]
    rows = (pairs[0] != pairs[1]).any(dim=1).nonzero().flatten()
    return rows if 2 * len(rows) < len(table) else None


# --- parameters that adapters share ---


def update_outputs(model: AdaptedModel) -> None:
    """Update the rows of adapters in output layers that are tied to a table, and list all ties."""
    if update_rows(model):
        replan(model)
    list_ties(model)


def after_loading(model: AdaptedModel) -> None:
    """Activate the saved embeddings and complete the rows of adapters, after all is loaded."""
    name, model._adapter_state.coming_embeddings = model._adapter_state.coming_embeddings, None
    if name is not None:
        activate(model, name)
    for name in model._adapter_state.records:
        own = dict(modules_of(model, name)) if (paths := rows_of(model, name)) else {}
        for path in paths:
            # on the meta device, where the model was built, the numbers of tokens have no values
            cast("TokenRows", own[path]).renumber()
    update_outputs(model)


def share(
    model: AdaptedModel,
    adapter_names: Composition | Sequence[str] | str,
    name: str | None = None,
    reference: str | None = None,
) -> None:
    """Make adapters share the parameters of one of them.

    Raises:
        FieldError: their method has no parameters to share.
        ConfigError: their configs or shapes differ, or the reference is not one of them.
    """
    names = _sharers(model, adapter_names)
    configs = {each: model._adapter_state.records[each].config for each in names}
    if wrong := [n for n, config in configs.items() if not isinstance(config, MultiTaskConfig)]:
        sharing = [name for name, c in architectures.items() if issubclass(c, MultiTaskConfig)]
        raise FieldError(
            f"the method of {wrong[0]!r} shares no parameters. Add adapters of {listing(sharing)}."
        )
    first = names[0] if reference is None else reference
    if first not in names:
        raise ConfigError(f"reference_adapter_name={reference!r} is not one of {listing(names)}.")
    shapes = [{k: p.shape for k, p in shareable_of(model, each).items()} for each in names]
    other = next((n for n, own in zip(names, shapes, strict=True) if own != shapes[0]), None)
    if other is not None or len(set(map(type, configs.values()))) > 1:
        raise ConfigError(
            f"{names[0]!r} and {other or names[-1]!r} differ in layers or shapes of parameters. "
            f"Add adapters of equal configs."
        )
    leave_groups(model, names)
    _replace(model, first, lambda _, p: nn.Parameter(p.detach().clone(), p.requires_grad))
    _join(model, names, first, name)


def _join(model: AdaptedModel, names: Sequence[str], first: str, group: str | None = None) -> None:
    """Give adapters the parameters of the first, and list the group."""
    own = shareable_of(model, first)
    for each in names:
        _replace(model, each, lambda place, _: own[place])
    model._adapter_state.sharing[group or _group_name(names)] = tuple(names)
    list_ties(model)


def unshare(
    model: AdaptedModel,
    adapter_names: Composition | Sequence[str] | str,
    name: str | None = None,
) -> None:
    """Give each of several adapters its own parameters again, with their present values.

    Raises:
        StateError: one shares no parameters.
    """
    names, sharing = _sharers(model, adapter_names), model._adapter_state.sharing
    groups = [*sharing.values()] if name is None else [sharing.get(name, ())]
    if alone := [n for n in names if not any(n in group for group in groups)]:
        raise StateError(f"{alone[0]!r} shares no such parameters. Groups: {listing(sharing)}.")
    for each in names:
        _replace(model, each, lambda _, p: nn.Parameter(p.detach().clone(), p.requires_grad))
    leave_groups(model, names)
    list_ties(model)


def share_equal(model: AdaptedModel, names: Sequence[str]) -> None:
    """Make adapters that were loaded share parameters that equal those of another adapter.

    New adapters with the same seed are equal too; a zero B shows them, and they are left alone.
    """
    state = model._adapter_state
    for name in names:
        config, own = state.find(name).config, shareable_of(model, name)
        seed = config.get("init_weights_seed")
        if not own or (seed is not None and any(not bool(p.any()) for p in own.values())):
            continue
        for other, record in state.records.items():
            if other == name or record.config != config:
                continue
            theirs = shareable_of(model, other)
            if own.keys() != theirs.keys():
                continue
            pairs = [(p, theirs[place]) for place, p in own.items()]
            alike = all(p.device == t.device and p.dtype == t.dtype for p, t in pairs)
            if alike and all(torch.equal(p, t) for p, t in pairs):
                group = next((g for g, n in state.sharing.items() if other in n), None)
                members = state.sharing.pop(group) if group is not None else (other,)
                same = (*members, *(n for n in (name,) if n not in members))
                _join(model, same, other, None if group == _group_name(members) else group)
                break


def _group_name(names: Sequence[str]) -> str:
    """Return the default name of a group; different groups have different names."""
    return repr([*names]) if any("," in name for name in names) else ",".join(names)


def _sharers(model: AdaptedModel, given: Composition | Sequence[str] | str) -> tuple[str, ...]:
    """Return the names of adapters in a composition, a list, or a string with commas.

    Raises:
        StateError: an adapter is merged or in use, or the model is sharded.
        UnknownNameError: an adapter is unknown.
    """
    listed = given.split(",") if isinstance(given, str) else given
    names = listed.flatten() if isinstance(listed, Composition) else tuple(listed)
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    for name in names:
        model._adapter_state.find(name)
        refuse_overridden(model, name)
        refuse_in_flight(model, name)
        refuse_merged(model, name)
    return names


def _replace(
    model: AdaptedModel,
    name: str,
    made: Callable[[tuple[str, str], nn.Parameter], nn.Parameter],
) -> None:
    """Replace the parameters that an adapter can share."""
    modules = dict(modules_of(model, name))
    for (path, key), parameter in shareable_of(model, name).items():
        owner, _, own = key.rpartition(".")
        modules[path].get_submodule(owner).register_parameter(own, made((path, key), parameter))
