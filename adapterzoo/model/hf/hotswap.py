"""Hotswap: give an adapter the values of another one, in place.

`hotswap=True` is an argument of transformers. Every tensor of the slot, the adapter that takes the
values, keeps its address, size and dtype, and the slot keeps its config. So compiled code runs on,
and the config describes what the slot computes: smaller tensors are padded with zeros, and the
ratio of two scalings goes into the values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from adapterzoo import formats
from adapterzoo.composition import parse
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import ConfigError, StateError, argument, listing
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.model import checkpointing, sharding
from adapterzoo.model.activation import check_setup, refuse_merged, set_active
from adapterzoo.model.adapterhub import arguments
from adapterzoo.model.heads import checkpoints
from adapterzoo.model.heads.interface import LoadOptions
from adapterzoo.model.state import AdaptedModel, AdapterRecord, modules_of

from . import documents
from .continuous_batching import refuse_while_batching
from .info import ModelInfo

_Places: TypeAlias = Mapping[str, tuple[Placement, ...]]


class Write(NamedTuple):
    """A tensor of the model, and the values that it gets."""

    tensor: Tensor
    values: Tensor


def load(
    model: AdaptedModel,
    path: checkpointing.StrPath,
    version: str | None,
    revision: str | None,
    source: str | None,
    hub_options: Mapping[str, Any],
    asked: LoadOptions,
) -> str:
    """Load a file into an adapter of the model; arguments as of `checkpointing.load_adapter`.

    Raises:
        ConfigError: the adapter cannot take these values; nothing has changed.
        UnknownNameError: there is no adapter of this name.
    """
    _refuse_changes(asked)
    sharding.refuse_if_sharded(model, "Load it before fully_shard(model).")
    folder, hub_name = checkpointing.found(model, path, version, revision, source, hub_options)
    stored = formats.read(Path(folder), "adapter", ModelInfo(model, asked.with_head))
    name = documents.name_in(asked.load_as, stored, hub_name or folder)
    slot = _slot(model, name)
    coming = checkpointing.filled(model, stored, (), asked.dtype)
    writes = _writes(model, name, coming.config, coming.places, coming.coming)
    if asked.with_head and stored.metadata.get("head") is not None:
        writes += _writes_of_head(model, name, stored, asked)
    arguments.compare(asked, coming.config, stored.metadata.get("model_name"))
    if asked.set_active:
        refuse_while_batching(model)
        check_setup(model, parse(name), ())
    write(writes)
    _forget_former(model, name)
    model._adapter_state.records[name] = dataclasses.replace(slot, meta=coming.meta)
    if asked.set_active:
        set_active(model, name)
    arguments.report(asked.loading_info)
    arguments.load_weights(asked, folder, name)
    return name


def copy(model: AdaptedModel, name: str, into: str) -> None:
    """Give an adapter the values of another one of the model, without its head.

    Args:
        model: with both.
        name: of the adapter whose values are copied.
        into: the slot.

    Raises:
        ConfigError: the slot cannot take them; nothing has changed.
        StateError: the slot is merged, or shares parameters.
        UnknownNameError: there is no adapter of one of the names.
    """
    sharding.refuse_if_sharded(model, "Write it before fully_shard(model).")
    record = model._adapter_state.find(name)
    slot = _slot(model, into)
    if name == into:
        raise ConfigError(f"the adapter {name!r} has its own values. Write another into=….")
    modules = dict(modules_of(model, name))
    write(_writes(model, into, record.config, record.places, modules))
    _forget_former(model, into)
    model._adapter_state.records[into] = dataclasses.replace(slot, meta=record.meta)


def _forget_former(model: AdaptedModel, name: str) -> None:
    """Clear what the adapter's modules keep of their former values."""
    for _, module in modules_of(model, name):
        module.train(module.training)


def _slot(model: AdaptedModel, name: str) -> AdapterRecord:
    """Return the record of an adapter whose values may be replaced.

    Raises:
        StateError: they are merged, being batched, or those of other adapters too.
        UnknownNameError: there is none.
    """
    record = model._adapter_state.find(name)
    refuse_merged(model, name)
    refuse_while_batching(model, name)
    for group, names in model._adapter_state.sharing.items():
        if name in names:
            others = listing(n for n in names if n != name)
            raise StateError(
                f"{name!r} shares parameters with {others}, which would change too. Write "
                f"unshare_parameters(name={group!r}) first."
            )
    return record


def _refuse_changes(asked: LoadOptions) -> None:
    given = {"leave_out": asked.leave_out, "id2label": asked.id2label}
    for key, value in given.items():
        if value is not None:
            raise ConfigError(
                f"hotswap=True, {key}={value!r}: the adapter that takes the values keeps its "
                f"layers and labels. Leave {key} out, or write hotswap=False."
            )
    if asked.overwrite_ok is False:
        raise ConfigError(
            "hotswap=True, overwrite_ok=False: a hotswap replaces the values of the adapter. "
            "Leave overwrite_ok out."
        )


def _writes(
    model: AdaptedModel,
    name: str,
    config: AdapterConfig,
    places: _Places,
    modules: Mapping[str, Adapter],
) -> list[Write]:
    """Return what gives the adapter `name` the values of modules.

    Raises:
        ConfigError: it cannot take them.
    """
    slot = model._adapter_state.find(name)
    _refuse_other_sites(name, slot.places, places)
    _refuse_other_config(name, slot.config, config)
    is_padded = _differ_in_size(slot.config, config)
    found: dict[str, Write] = {}
    lines: list[str] = []
    for path, own in modules_of(model, name):
        coming, mine = in_slot(modules[path], own), own.state_dict(keep_vars=True)
        lines += [
            f"{path}/{key}   in one of them only" for key in sorted(coming.keys() ^ mine.keys())
        ]
        for key in coming.keys() & mine.keys():
            tensor, values = mine[key], coming[key]
            if not _has_room(tensor, values, is_padded):
                lines.append(
                    f"{path}/{key}   slot {list(tensor.shape)} {_dtype(tensor)}, "
                    f"values {list(values.shape)} {_dtype(values)}"
                )
            found[f"{path}/{key}"] = Write(tensor, values)
    if lines:
        shown = "\n  ".join(sorted(lines)[:10])
        raise ConfigError(
            f"the values do not fit into the adapter {name!r}:\n  {shown}\nAdd it with the largest "
            f"size that it will take, or write hotswap=False, overwrite_ok=True."
        )
    return list(found.values())


def _has_room(slot: Tensor, values: Tensor, is_padded: bool) -> bool:
    # values of a narrower dtype are converted exactly
    if torch.promote_types(slot.dtype, values.dtype) is not slot.dtype or slot.is_meta:
        return False
    if slot.dim() != values.dim():
        return False
    if not is_padded:
        return slot.shape == values.shape
    return all(a >= b for a, b in zip(slot.shape, values.shape, strict=True))


def _differ_in_size(mine: AdapterConfig, theirs: AdapterConfig) -> bool:
    pairs = zip(mine.members, theirs.members, strict=True)
    return any(own[key] != other[key] for own, other in pairs for key in own.slot_fields)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def in_slot(adapter: Adapter, slot: Adapter) -> dict[str, Tensor]:
    """Return the tensors for a slot; of a fused adapter or a union those of its parts."""
    tensors = dict(adapter.state_dict())
    for path, part in adapter.named_modules():
        if isinstance(part, Adapter):
            inside = f"{path}." if path else ""
            own: Any = slot.get_submodule(path)
            tensors = {key: t for key, t in tensors.items() if not key.startswith(inside)}
            tensors |= {inside + key: t for key, t in part.in_slot(own).items()}
    return tensors


def _refuse_other_sites(name: str, mine: _Places, theirs: _Places) -> None:
    ours, values = _sites(mine), _sites(theirs)
    if ours.keys() != values.keys():
        lost = sorted({ours[key] for key in ours.keys() - values.keys()})
        new = sorted({values[key] for key in values.keys() - ours.keys()})
        raise ConfigError(
            f"the adapter {name!r} adapts {listing(lost) or 'no others'} and the values are for "
            f"{listing(new) or 'no others'} instead; a hotswap needs the same layers. Write "
            f"hotswap=False, overwrite_ok=True."
        )


def _sites(places: _Places) -> dict[Any, str]:
    """Return what is adapted, with its name in messages; shared modules have a path alone."""
    found: dict[Any, str] = {(path,): path for path in places}
    for path, placements in places.items():
        for p in placements:
            part = "" if p.site.output_slice is None else f" ({p.site.role})"
            found[path, p.location, p.site] = f"{path}{part}"
    return found


def _refuse_other_config(name: str, mine: AdapterConfig, theirs: AdapterConfig) -> None:
    """Refuse fields that differ, change the output, and have no place in tensors."""
    pairs = list(zip(mine.members, theirs.members, strict=False))
    same_count = len(mine.members) == len(theirs.members)
    if not same_count or any(a.architecture != b.architecture for a, b in pairs):
        kinds = ["|".join(m.architecture for m in config.members) for config in (mine, theirs)]
        raise ConfigError(
            f"the adapter {name!r} is of the method {kinds[0]!r} and the values are of "
            f"{kinds[1]!r}; a hotswap needs one method. Write hotswap=False, overwrite_ok=True."
        )
    for own, other in pairs:
        ours, values = own.to_dict(), other.to_dict()
        free = own.training_fields | own.slot_fields
        differing = {
            key: (ours.get(key), values.get(key))
            for key in sorted(ours.keys() | values.keys())
            if key not in free and ours.get(key) != values.get(key)
        }
        if differing:
            shown = ", ".join(f"{k}={a!r} and not {b!r}" for k, (a, b) in differing.items())
            raise ConfigError(
                f"the adapter {name!r} has {shown}, as the values need it; a hotswap changes only "
                f"tensors. Write hotswap=False, overwrite_ok=True."
            )


def _writes_of_head(
    model: AdaptedModel, name: str, stored: Checkpoint, asked: LoadOptions
) -> list[Write]:
    """Return what gives the head of an adapter the values of the file.

    Raises:
        CheckpointError: the head has other sizes, or another config.
        ConfigError: there is none.
    """
    strategy, record = model._head_strategy, checkpoints.head_in(stored)
    hint = f"Write {argument('with_head', False, 'load_adapter')}."
    if name not in strategy.saved_names():
        raise ConfigError(f"the file has a head, and the adapter {name!r} has none. {hint}")
    # its checks; what it returns would replace the head
    strategy.fitting(record, name, dataclasses.replace(asked, overwrite_ok=True))
    if strategy.is_named and not isinstance(record.document.get("config"), Mapping):
        raise ConfigError(
            f"the file holds the head of a class of transformers, and {name!r} has a named one; "
            f"a hotswap needs the same. {hint}"
        )
    tensors = strategy.completed(name, record.document, record.tensors)
    own = strategy.record(name)
    mine = {} if own is None else own.tensors
    fit.check_fit(type(model).__name__, tensors, mine, asked.dtype)
    return [Write(mine[key], values) for key, values in tensors.items()]


def write(writes: list[Write]) -> None:
    """Write values into tensors, and zeros where they are smaller."""
    with torch.no_grad():
        for tensor, values in writes:
            if tensor.shape != values.shape:
                tensor.zero_()
            tensor[tuple(slice(size) for size in values.shape)].copy_(values)
