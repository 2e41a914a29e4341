"""Hotswap: give an adapter the values of another one, in place.

`hotswap=True` is an argument of transformers. Every tensor of the slot, the adapter that takes the
values, keeps its address, size and dtype, and the slot keeps its config. So compiled code runs on,
and the config describes what the slot computes: smaller tensors are padded with zeros, the ratio of
two scalings goes into the values, and layers that the other adapter lacks get values that change
nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from adapterzoo import formats, tensor_parallel
from adapterzoo.composition import parse
from adapterzoo.config import AdapterConfig, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import ConfigError, StateError, argument
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import Checkpoint

from . import adapters, checkpointing, sharding, slots
from .activation import check_setup, refuse_merged, refuse_used, replan, set_active
from .heads import copies, named, store
from .hf.guards import paused, refuse_in_flight
from .hf.info import ModelInfo
from .state import AdaptedModel, AdapterRecord, LoadOptions, modules_of

Writes: TypeAlias = list[tuple[Tensor, Tensor]]
"""Tensors of the model, and the values that they get."""


def load(
    model: AdaptedModel,
    folder: Path,
    asked: LoadOptions,
    hub_name: str | None = None,
    or_add: bool = False,
) -> tuple[str, bool]:
    """Load a folder into an adapter of the model.

    Args:
        model: the model with the slot.
        folder: the folder of the adapter with the values.
        asked: the arguments of the public method.
        hub_name: the name that the user gave, if the folder is a download.
        or_add: whether an adapter of a new name is added as a slot, of the rank `slot_rank`.

    Returns:
        The adapter's name, and whether it was added.

    Raises:
        ConfigError: the adapter cannot take these values; nothing has changed.
        StateError: a new slot would have its own embeddings.
        UnknownNameError: there is no adapter of this name.
    """
    stored = formats.read(folder, "adapter", ModelInfo(model, asked.with_head))
    checkpointing.check_fingerprint(model, stored, asked.fingerprint)
    name = checkpointing.name_in(asked.load_as, stored, hub_name or folder)
    if or_add and name not in model._adapter_state.records:
        rank = model._adapter_state.slot_rank or 1
        if stored.metadata.get("embeddings") is not None:
            raise StateError(_EMBEDDINGS.format(name=name))
        if isinstance(config := stored.metadata.get("config"), Mapping):
            # refuses a larger rank before anything changes
            AdapterConfig.from_dict(config).of_rank(rank)
        name = checkpointing.load_adapter(model, folder, asked, hub_name)
        to_rank(model, name, rank)
        return name, True
    ignored = ["overwrite_ok"] if asked.overwrite_ok is False else []
    ignored += [name for name in ("leave_out", "id2label") if getattr(asked, name) is not None]
    if ignored:
        raise ConfigError(
            f"hotswap=True replaces only values. Leave {ignored[0]} out, or write hotswap=False."
        )
    sharding.refuse_if_sharded(model, "Load it before fully_shard(model).")
    slot = _slot(model, name)
    coming = checkpointing.filled(model, stored, (), asked.dtype)
    writes = _writes(model, name, coming)
    if asked.with_head and stored.metadata.get("head") is not None:
        writes += _writes_of_head(model, name, stored, asked)
    checkpointing.compare(model, stored, coming, name, asked)
    if asked.set_active:
        check_setup(model, parse(name), ())
    write(writes)
    model._adapter_state.records[name] = _taking(slot, coming)
    if asked.set_active:
        set_active(model, name)
    asked.report()
    asked.load_weights(folder, name)
    return name, False


def copy(model: AdaptedModel, name: str, into: str) -> None:
    """Give an adapter the values of another one of the model, without its head.

    Args:
        model: the model with both.
        name: the adapter whose values are copied.
        into: the slot.

    Raises:
        ConfigError: the slot cannot take them; nothing has changed.
        StateError: the slot is merged, or shares parameters.
        UnknownNameError: an adapter is unknown.
    """
    sharding.refuse_if_sharded(model, "Write it before fully_shard(model).")
    record = model._adapter_state.find(name)
    slot = _slot(model, into)
    coming = dataclasses.replace(record, coming=dict(modules_of(model, name)))
    write(_writes(model, into, coming))
    model._adapter_state.records[into] = _taking(slot, record)


def _taking(slot: AdapterRecord, other: AdapterRecord) -> AdapterRecord:
    """Return the record of a slot that has taken the values of another adapter."""
    return dataclasses.replace(slot, meta=other.meta, trained_on=other.trained_on)


def _slot(model: AdaptedModel, name: str) -> AdapterRecord:
    """Return the record of an adapter whose values may be replaced.

    Raises:
        StateError: they are merged, used by continuous batching, or shared with other adapters.
        UnknownNameError: there is none.
    """
    record = model._adapter_state.find(name)
    refuse_merged(model, name)
    refuse_in_flight(model, name)
    for group, names in model._adapter_state.sharing.items():
        if name in names:
            raise StateError(f"{name!r} shares parameters. Write unshare_parameters({group!r}).")
    return record


def _writes(model: AdaptedModel, name: str, record: AdapterRecord) -> Writes:
    """Return the writes that give the adapter `name` the values of the modules in a record.

    Raises:
        ConfigError: it cannot take them.
    """
    slot = model._adapter_state.find(name)
    unused = _unused(slot, record)
    lines = _differences(slot, record, unused)
    pairs = () if lines else zip(slot.config.members, record.config.members, strict=True)
    is_padded = any(own[key] != other[key] for own, other in pairs for key in own.slot_fields)
    found: Writes = []
    for path, own in () if lines else modules_of(model, name):
        other = slots.without_effect(model, path, own) if path in unused else record.coming[path]
        coming, mine = in_slot(other, own), own.state_dict(keep_vars=True)
        lines += [f"{path}/{key}   in one of them only" for key in coming.keys() ^ mine.keys()]
        for key in coming.keys() & mine.keys():
            tensor, values = mine[key], coming[key]
            if not _has_room(tensor, values, is_padded):
                lines.append(
                    f"{path}/{key}   slot {list(tensor.shape)} {tensor.dtype}, "
                    f"values {list(values.shape)} {values.dtype}"
                )
            found.append((tensor, values))
    if lines:
        shown = "\n  ".join(sorted(lines)[:10])
        raise ConfigError(
            f"the values do not fit {name!r}:\n  {shown}\nWrite hotswap=False, overwrite_ok=True."
        )
    return found


def _has_room(slot: Tensor, values: Tensor, is_padded: bool) -> bool:
    # values of a narrower dtype are converted exactly
    if torch.promote_types(slot.dtype, values.dtype) is not slot.dtype or slot.is_meta:
        return False
    if not is_padded or slot.dim() != values.dim():
        return slot.shape == values.shape
    return all(a >= b for a, b in zip(slot.shape, values.shape, strict=True))


def _unused(slot: AdapterRecord, record: AdapterRecord) -> set[str]:
    """Return the paths of a slot that the record lacks, if its methods may act in fewer layers."""
    may = all("target_modules" in member.slot_fields for member in slot.config.members)
    return {path for path, p in slot.places.items() if may and p and path not in record.places}


def _differences(slot: AdapterRecord, record: AdapterRecord, unused: set[str]) -> list[str]:
    """Return how a slot differs in method, layers and options that tensors cannot express.

    Args:
        slot: the record that takes the values.
        record: the record with the values.
        unused: paths of the slot that the other record may lack.
    """
    kinds = ["|".join(m.architecture for m in c.members) for c in (slot.config, record.config)]
    if kinds[0] != kinds[1]:
        return [f"method   slot {kinds[0]!r}, values {kinds[1]!r}"]
    mine, theirs = _sites(slot.places), _sites(record.places)
    shown = {**mine, **theirs}
    others = {shown[key] for key in mine.keys() ^ theirs.keys() if key[0] not in unused}
    lines = [f"{name}   in one of them only" for name in others]
    for own, other in zip(slot.config.members, record.config.members, strict=True):
        left, right = own.to_dict(), other.to_dict()
        lines += [
            f"{key}={left.get(key)!r} and not {right.get(key)!r}"
            for key in sorted(left.keys() | right.keys())
            if key not in own.training_fields | own.slot_fields and left.get(key) != right.get(key)
        ]
    return lines


def _sites(places: Mapping[str, tuple[Placement, ...]]) -> dict[Any, str]:
    """Return the adapted paths and sites, with their names in messages.

    Shared modules have a path, but no site.
    """
    found: dict[Any, str] = {(path,): path for path in places}
    for path, placements in places.items():
        for p in placements:
            part = "" if p.site.output_slice is None else f" ({p.site.role})"
            found[path, p.location, p.site] = f"{path}{part}"
    return found


def in_slot(adapter: Adapter, slot: Adapter) -> dict[str, Tensor]:
    """Return an adapter's tensors as a slot takes them; of fused ones and unions part by part."""
    tensors = dict(adapter.state_dict())
    for path, part in adapter.named_modules():
        if isinstance(part, Adapter):
            inside = f"{path}." if path else ""
            own: Any = slot.get_submodule(path)
            tensors = {key: t for key, t in tensors.items() if not key.startswith(inside)}
            tensors |= {inside + key: t for key, t in part.in_slot(own).items()}
    return tensors


def _writes_of_head(
    model: AdaptedModel, name: str, stored: Checkpoint, asked: LoadOptions
) -> Writes:
    """Return the writes that give the head of an adapter the values of the file.

    Raises:
        CheckpointError: the head has other sizes, or another config.
        ConfigError: there is none.
    """
    record = store.head_in(stored)
    hint = f"Write {argument('with_head', False, 'load_adapter')}."
    if name not in named.saved_names(model):
        raise ConfigError(f"the file has a head, and the adapter {name!r} has none. {hint}")
    # only for its checks: what it returns would replace the head
    store.fitting(model, record, name, dataclasses.replace(asked, overwrite_ok=True))
    if model._has_named_heads and not isinstance(record.document.get("config"), Mapping):
        raise ConfigError(
            f"the file holds the head of a task class, and {name!r} has a named one. {hint}"
        )
    tensors = named.completed(model, name, record.document, record.tensors)
    own = named.record_of(model, name)
    mine = {} if own is None else own.tensors
    fit.check_fit(type(model).__name__, tensors, mine, asked.dtype)
    return [(mine[key], values) for key, values in tensors.items()]


def write(writes: Writes) -> None:
    """Write values into tensors, and zeros where they are smaller."""
    with torch.no_grad():
        for tensor, values in writes:
            if tensor_parallel.is_part(tensor):
                tensor_parallel.write(tensor, values)
                continue
            if tensor.shape != values.shape:
                tensor.zero_()
            tensor[tuple(slice(size) for size in values.shape)].copy_(values)


# --- slots: adapters of one rank, into which others are loaded later ---

_EMBEDDINGS = (
    "the adapter {name!r} has its own embeddings, and cannot get another rank with them. Add "
    "it with the largest rank, and write load_adapter(…, load_as={name!r}, hotswap=True)."
)


def with_rank(model: AdaptedModel, name: str, rank: int) -> AdapterConfig:
    """Return the config of an adapter after `to_rank`.

    Raises:
        ConfigError: its rank is larger.
        StateError: the model is sharded, or the adapter is in use.
    """
    config = model._adapter_state.find(name).config.of_rank(rank)
    sharding.refuse_if_sharded(model, "Write it before fully_shard(model).")
    refuse_used(model, name)
    refuse_in_flight(model, name)
    if copies.table_of(model, name) is not None:
        raise StateError(_EMBEDDINGS.format(name=name))
    return config


def to_rank(model: AdaptedModel, name: str, rank: int) -> None:
    """Give an adapter the rank of a slot; what it computes stays.

    Raises:
        ConfigError: its rank is larger.
        StateError: the model is sharded, or the adapter is in use.
    """
    config, record = with_rank(model, name, rank), model._adapter_state.find(name)
    if config == record.config:
        return
    with torch.random.fork_rng(devices=()):
        made = adapters.make(model, config)
    for path, old in modules_of(model, name):
        module = made.coming[path]
        values, own = in_slot(old, module), module.state_dict(keep_vars=True)
        before = old.state_dict(keep_vars=True)
        for key, tensor in own.items():
            tensor.data = tensor.data.to(values[key].device, values[key].dtype)
            if tensor.is_floating_point():
                tensor.requires_grad_(key in before and before[key].requires_grad)
        write([(tensor, values[key]) for key, tensor in own.items()])
        module.train(old.training)
    with paused(model):
        adapters.uninstall(model, name)
        adapters.install(model, name, dataclasses.replace(made, meta=record.meta))
        replan(model)
