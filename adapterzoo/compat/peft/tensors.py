"""Tensors of adapters under PEFT's keys, without a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from adapterzoo import formats
from adapterzoo.contracts import WeightPlan
from adapterzoo.errors import CheckpointError, ConfigError, StateError, listing
from adapterzoo.formats import files, fit, places
from adapterzoo.formats import peft as format_of_peft
from adapterzoo.model import checkpointing, sharding
from adapterzoo.model.activation import refuse_merged
from adapterzoo.model.adapters import init_values
from adapterzoo.model.heads.copies import modules_with
from adapterzoo.model.heads.files import fitting
from adapterzoo.model.heads.records import HeadRecord, record_of, saved_names
from adapterzoo.model.hf.info import info_of
from adapterzoo.model.hf.init_data import collected
from adapterzoo.model.sharding import refuse_if_sharded
from adapterzoo.model.state import (
    AdaptedModel,
    AdapterRecord,
    LoadOptions,
    base_prefix,
    modules_of,
    named_tensors,
    own_parameters_of,
)


def tensors_of_peft(
    model: AdaptedModel, name: str | None, state_dict: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of an adapter and its head; they share memory with the model's.

    Raises:
        ConfigError: a state dict is given.
    """
    if state_dict is not None:
        raise ConfigError(
            "state_dict: tensors of a sharded model are gathered by save_adapter. Leave it out."
        )
    return encoded(model, one_name(model, name))[1]


def encoded(model: AdaptedModel, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return PEFT's config and tensors for an adapter."""
    sharding.refuse_if_sharded(model, "Write save_adapter(folder, name).")
    info = info_of(model)
    stored = formats.exported(checkpointing.checkpoint_of(model, name, True, None, "peft"), info)
    return format_of_peft.encoded(stored, info)


def check_savable(model: AdaptedModel, name: str, record: AdapterRecord) -> None:
    """Check that PEFT's format can express an adapter that is not in the model yet.

    Args:
        model: that gets the adapter.
        name: of the adapter.
        record: of the adapter, with its modules.

    Raises:
        CheckpointError: it cannot.
    """
    records = model._adapter_state.records
    before = dict(records)
    records[name] = record
    try:
        encoded(model, name)
    except CheckpointError as error:
        kind = type(record.config).__name__
        raise CheckpointError(
            f"save_pretrained could not write {name!r}: {error} To train it, write "
            f"adapterzoo.{kind}(…), and save_pretrained(folder, format='native')."
        ) from error
    finally:
        records.clear()
        records.update(before)


def one_name(model: AdaptedModel, name: str | None) -> str:
    """Return the name, or that of the only active adapter.

    Raises:
        StateError: not exactly one is active.
    """
    if name is not None:
        return name
    setup = model._active.plan.setup
    names = () if setup is None else setup.flatten()
    if len(names) != 1:
        raise StateError(
            f"{listing(names)} are active. Write its name; adapters: "
            f"{listing(model._adapter_state.records)}."
        )
    return names[0]


def fill(model: AdaptedModel, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Give an adapter, and its head, the values under PEFT's keys; all of them or nothing.

    Raises:
        CheckpointError: they are not those of the adapter.
    """
    refuse_merged(model, name)
    theirs, _ = encoded(model, name)
    stored = format_of_peft.decoded(theirs, tensors, info_of(model))
    adapter, document = stored.adapter, stored.metadata["head"]
    own = dict(modules_of(model, name))
    config = model._adapter_state.find(name).config
    adapter = places.own(config, adapter, model.anatomy)
    fit.check_fit(type(model).__name__, adapter, named_tensors(own, keep_vars=True), None)
    enter = None
    if document is not None:
        asked = LoadOptions(overwrite_ok=True)
        enter = fitting(model, HeadRecord(document, stored.head), name, asked)
    for path, module in own.items():
        start = f"{path}/"
        fit.fill(
            module, {k.removeprefix(start): t for k, t in adapter.items() if k.startswith(start)}
        )
    # a head that is there keeps its tensors, which an optimizer may have
    there = record_of(model, name) if name in saved_names(model) else None
    if there is not None:
        with torch.no_grad():
            for key in stored.head.keys() & there.tensors.keys():
                there.tensors[key].copy_(stored.head[key])
    elif enter is not None:
        enter()


# --- New values for an adapter from the weights that its layers had before quantization ---


def compensate(
    model: AdaptedModel,
    name: str,
    fields: Mapping[str, Any],
    source: Any,
    keeps: Callable[[Any, str], bool] | None,
) -> None:
    """Give an adapter initial values that need the original weights.

    Args:
        model: quantized, with the adapter.
        name: of the adapter.
        fields: of its config, that ask for these values.
        source: of the weights, see `collected`.
        keeps: called with the model and the name of each layer; whether its new values stay.

    Raises:
        ConfigError: no layer is quantized, a weight is missing, or there are no such values.
        StateError: the adapter is merged.
    """
    config = model._adapter_state.find(name).config
    refuse_merged(model, name)
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    if fields.keys() - config.field_names():
        raise ConfigError(
            f"{name!r} is {config!r}, which has no values that make up for quantization. Write "
            "LoRAConfig(…)."
        )
    plan = cast("WeightPlan", config.replace(**fields).init_plan(model.anatomy))
    modules: Mapping[str, Any] = dict(modules_of(model, name))
    start = base_prefix(model)
    for path, weight in collected(model, plan, source).items():
        module = modules[path]
        before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
        init_values(model, path, module, weight)
        if keeps is not None and not keeps(model, start + path):
            with torch.no_grad():
                for key, tensor in module.state_dict(keep_vars=True).items():
                    tensor.copy_(before[key])


# --- Checkpoints of transformers' `Trainer`: the trained tensors of a model, filled in place ---


def write_trained(model: AdaptedModel, folder: Path) -> None:
    """Write the trained tensors if the folder is a checkpoint of a `Trainer`.

    Args:
        model: with adapters.
        folder: that the trainer saves to.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    if not re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name):
        return
    # a trainer of sharded models has files of its own
    if not sharding.groups_of(model):
        files.write_tensors(folder / SAFE_WEIGHTS_NAME, {}, trained_tensors(model))


def holds_only_trained(model: AdaptedModel, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether tensors are those of `write_trained`, not those of a whole model."""
    mine = trained_tensors(model)
    return not any(key in tensors for key in model.state_dict(keep_vars=True) if key not in mine)


def fill_trained(model: AdaptedModel, tensors: Mapping[str, Tensor]) -> None:
    """Give a model the values that `write_trained` wrote; its tensors stay the same objects.

    Raises:
        CheckpointError: adapters, heads or what is trained differ; nothing has changed then.
    """
    mine = trained_tensors(model)
    fit.check_fit(type(model).__name__, tensors, mine, None)
    with torch.no_grad():
        for key, tensor in mine.items():
            tensor.copy_(tensors[key])


def trained_tensors(model: AdaptedModel) -> dict[str, Tensor]:
    """Return what adapters, heads and the training may change, each tensor once."""
    state = model._adapter_state
    modules: list[Any] = [m for name in state.records for _, m in modules_of(model, name)]
    modules += [m for name in state.records for m in modules_with(model, name)]
    own = {id(t) for m in modules for t in m.state_dict(keep_vars=True).values()}
    own |= {id(p) for p in own_parameters_of(model)}
    found: dict[int, tuple[str, Tensor]] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if tensor.requires_grad or id(tensor) in own:
            found.setdefault(id(tensor), (key, tensor))
    return dict(found.values())
