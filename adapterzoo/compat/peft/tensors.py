"""Tensors of adapters under PEFT's keys, without a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adapterzoo import formats
from adapterzoo.errors import CheckpointError, StateError, listing
from adapterzoo.formats import fit
from adapterzoo.formats import peft as format_of_peft
from adapterzoo.formats.checkpoint import from_plain
from adapterzoo.model import checkpointing, sharding
from adapterzoo.model.activation import refuse_merged
from adapterzoo.model.heads.copies import modules_with
from adapterzoo.model.heads.named import HeadRecord, record_of, saved_names
from adapterzoo.model.heads.store import fitting
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.state import (
    AdaptedModel,
    AdapterRecord,
    LoadOptions,
    modules_of,
    named_tensors,
    own_parameters_of,
)


def encoded(model: AdaptedModel, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return PEFT's config and tensors for an adapter."""
    sharding.refuse_if_sharded(model, "Write save_adapter(folder, name).")
    info = ModelInfo(model)
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
    stored = format_of_peft.decoded(theirs, tensors, ModelInfo(model))
    adapter, document = stored.adapter, stored.metadata["head"]
    own = dict(modules_of(model, name))
    config = model._adapter_state.find(name).config
    adapter = from_plain(config, adapter, model.anatomy)
    fit.check_fit(type(model).__name__, adapter, named_tensors(own, keep_vars=True), None)
    enter = None
    if document is not None:
        asked = LoadOptions(overwrite_ok=True)
        enter = fitting(model, HeadRecord(document, stored.head), name, asked)
    values = fit.by_path(adapter)
    for path, module in own.items():
        fit.fill(module, values.get(path, {}))
    # a head that is there keeps its tensors, which an optimizer may have
    there = record_of(model, name) if name in saved_names(model) else None
    if there is not None:
        with torch.no_grad():
            for key in stored.head.keys() & there.tensors.keys():
                there.tensors[key].copy_(stored.head[key])
    elif enter is not None:
        enter()


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
