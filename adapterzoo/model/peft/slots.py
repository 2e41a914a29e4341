"""`enable_peft_hotswap` of transformers: adapters of one rank, into which later ones are loaded."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from adapterzoo import formats
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import ConfigError, StateError, listing
from adapterzoo.model import adapters, checkpointing, sharding
from adapterzoo.model.activation import refuse_used, replan
from adapterzoo.model.heads import tables
from adapterzoo.model.heads.interface import LoadOptions
from adapterzoo.model.hf import documents
from adapterzoo.model.hf.hotswap import Write, in_slot, load, write
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.state import AdaptedModel, modules_of

_EMBEDDINGS = (
    "the adapter {name!r} has its own embeddings, and cannot get another rank with them. Add "
    "it with the largest rank, and write load_adapter(…, load_as={name!r}, hotswap=True)."
)


def chosen(model: AdaptedModel, hotswap: bool | str) -> Callable[..., str]:
    """Return the function that loads an adapter.

    Args:
        model: with adapters.
        hotswap: as in `load_adapter`.

    Raises:
        ConfigError: it is neither a bool nor "auto".
    """
    if not isinstance(hotswap, bool) and hotswap != "auto":
        raise ConfigError(f"hotswap={hotswap!r} is not True, False or 'auto'. Leave it out.")
    if hotswap == "auto" and model._adapter_state.slot_rank is not None:
        return load_or_swap
    return load if hotswap is True else checkpointing.load_adapter


def load_or_swap(
    model: AdaptedModel,
    path: checkpointing.StrPath,
    version: str | None,
    revision: str | None,
    source: str | None,
    hub_options: Mapping[str, Any],
    asked: LoadOptions,
) -> str:
    """Swap into the adapter of the name if there is one; if not, load it with `slot_rank`.

    Raises:
        ConfigError: its rank is larger.
        StateError: it has its own embeddings.
    """
    rank = model._adapter_state.slot_rank or 1
    folder, hub_name = checkpointing.found(model, path, version, revision, source, hub_options)
    stored = formats.read(Path(folder), "adapter", ModelInfo(model, asked.with_head))
    name = documents.name_in(asked.load_as, stored, hub_name or folder)
    given = path, version, revision, source, hub_options, asked
    if name in model._adapter_state.records:
        return load(model, *given)
    if stored.metadata.get("embeddings") is not None:
        raise StateError(_EMBEDDINGS.format(name=name))
    if isinstance(config := stored.metadata.get("config"), Mapping):
        # refuses a larger rank before anything changes
        AdapterConfig.from_dict(config).of_rank(rank)
    name = checkpointing.load_adapter(model, *given)
    widen(model, name, rank)
    return name


def enable(model: AdaptedModel, rank: int, check_compiled: str) -> None:
    """Let adapters that are loaded from now on be slots of a rank.

    Args:
        model: with adapters, or without.
        rank: the largest of all adapters.
        check_compiled: whether adapters that the model has, which become slots too, are an
            "error", something to "warn" of, or neither: "ignore".

    Raises:
        ConfigError: an argument is not legal, or the rank of an adapter is larger.
        StateError: the model has adapters, or one of them is in use.
    """
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConfigError(f"target_rank={rank!r} is not a rank. Write target_rank=128.")
    if check_compiled not in ("error", "warn", "ignore"):
        raise ConfigError(
            f"check_compiled={check_compiled!r} is not 'error', 'warn' or 'ignore'. Leave it out."
        )
    records = model._adapter_state.records
    if records and check_compiled != "ignore":
        text = (
            f"the model has the adapters {listing(records)}, whose sizes change, so that a "
            f"compiled model compiles again. Write it before the first adapter is loaded, or "
            f"check_compiled='ignore'."
        )
        if check_compiled == "error":
            raise StateError(text)
        warnings.warn(text, UserWarning, stacklevel=3)
    for name in records:
        _check_widening(model, name, rank)
    for name in tuple(records):
        widen(model, name, rank)
    model._adapter_state.slot_rank = rank


def _check_widening(model: AdaptedModel, name: str, rank: int) -> AdapterConfig:
    """Return the config of an adapter after `widen`.

    Raises:
        ConfigError: its rank is larger.
        StateError: the model is sharded, or the adapter is in use.
    """
    config = model._adapter_state.find(name).config.of_rank(rank)
    sharding.refuse_if_sharded(model, "Write it before fully_shard(model).")
    refuse_used(model, name)
    if tables.table_of(model, name) is not None:
        raise StateError(_EMBEDDINGS.format(name=name))
    return config


def widen(model: AdaptedModel, name: str, rank: int) -> None:
    """Give an adapter the rank of a slot; what it computes stays.

    Raises:
        ConfigError: its rank is larger.
        StateError: the model is sharded, or the adapter is in use.
    """
    config, record = _check_widening(model, name, rank), model._adapter_state.find(name)
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
        write([Write(tensor, values[key]) for key, tensor in own.items()])
        module.train(old.training)
    adapters.uninstall(model, name)
    adapters.install(model, name, dataclasses.replace(made, meta=record.meta))
    replan(model)
