"""Heads in folders of their own, and heads of checkpoints that enter a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterzoo import formats
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    StateError,
    argument,
    in_python,
    unknown_name,
)
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import OWN_OUTPUT, Checkpoint
from adapterzoo.formats.fit import same_bits
from adapterzoo.heads import STATIC, StaticConfig, labels_from
from adapterzoo.model import sharding
from adapterzoo.model.activation import replan
from adapterzoo.model.hf.info import ModelInfo, StrPath, name_in, provenance, write
from adapterzoo.model.hf.task_classes import MODEL_CONFIG, head_tensors, other_fields
from adapterzoo.model.sharding import class_name
from adapterzoo.model.state import AdaptedModel, LoadOptions, heads_of

from . import copies, named, store
from .records import (
    FIELD,
    OUTPUT_KEY,
    HeadRecord,
    active_name,
    output_like,
    record_of,
    saved_names,
    with_output,
)


def save(
    model: AdaptedModel, folder: StrPath, head_name: str | None, format: str = "native"
) -> None:
    """Save only a head.

    Raises:
        UnknownNameError: there is no such head.
        StateError: there is none to save.
    """
    known = saved_names(model)
    if head_name is not None and head_name not in known:
        raise unknown_name("", "head", head_name, known)
    name = head_name or active_name(model)
    sharding.reshard(model)
    with sharding.gathering(model, ()):
        found = record_of(model, name, alone=True, short=format == "native")
        if found is None:
            raise StateError(
                f"this {type(model).__name__} has no head to save. "
                f"Write add_classification_head('my_task') first."
            )
        own_name = name if name and model._has_named_heads else sharding.class_name(model)
        document = {**provenance(model, own_name), "head": found.document}
        write(model, folder, Checkpoint(document, {}, found.tensors), "head", format)


def load(model: AdaptedModel, folder: StrPath, asked: LoadOptions) -> str:
    """Load and activate a head."""
    name, enter = read(model, folder, asked)
    enter()
    return name


def read(
    model: AdaptedModel, folder: StrPath, asked: LoadOptions
) -> tuple[str, Callable[[], None]]:
    """Read what `load_head` loads and check it; return its name and what enters it."""
    sharding.refuse_if_sharded(model, "Load it before fully_shard(model).")
    stored = formats.read(Path(folder), "head", ModelInfo(model))
    name = name_in(asked.load_as, stored, folder)
    target = name if model._has_named_heads else active_name(model)
    asked, warn = asked.overwriting(name, head=heads_of(model))
    enter_head = fitting(model, head_in(stored), target, asked)

    def enter() -> None:
        enter_head()
        warn()
        asked.report()

    return name, enter


def head_in(stored: Checkpoint) -> HeadRecord:
    """Return the head of a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    document = stored.metadata.get("head")
    if not isinstance(document, Mapping):
        raise CheckpointError(
            f"the checkpoint describes its head by {document!r}, which is not an object. "
            f"Save it again, or write {argument('with_head', False, 'load_adapter')}."
        )
    return HeadRecord(dict(document), stored.head)


def fitting(
    model: Any, record: HeadRecord, name: str | None, asked: LoadOptions
) -> Callable[[], None]:
    """Check a head of a checkpoint completely; return a function that puts it into the model.

    Args:
        model: with adapters.
        record: of the checkpoint.
        name: of the head; of a static head its owner, None for the original.
        asked: what the user asks for.

    Raises:
        CheckpointError: it does not fit.
        ConfigError: there are labels for a static head.
    """
    check = _fitting_named if model._has_named_heads else _fitting_static
    return check(model, record, name, asked)


def _fitting_named(
    model: Any, record: HeadRecord, name: str | None, asked: LoadOptions
) -> Callable[[], None]:
    if not isinstance(record.document.get("config"), Mapping):
        record = _translated(model, record)
    config = named.config_from(model, record.document["config"])
    saved = record.document.get(MODEL_CONFIG)
    if isinstance(config, StaticConfig) and isinstance(saved, Mapping):
        config = config.replace(fields=other_fields(model.config, saved) or None)
    if asked.id2label is not None:
        config = config.replace(label2id=labels_from(asked.id2label))
    checked = store.free_name(model, name, bool(asked.overwrite_ok))
    # an untrusted config may ask for more memory than there is: compare before allocating
    empty = named.built(model, config, torch.device("meta"))
    heads = model.heads.values()
    tensors = with_output(empty, heads, record.document, record.tensors, asked.dtype)
    fits = named.own_tensors(model, empty)
    fit.check_fit(type(model).__name__, fit.converted(tensors, fits), fits, None)
    head = named.built(model, config)
    if asked.dtype is not None:
        for tensor in named.own_tensors(model, head).values():
            tensor.data = tensor.data.to(asked.dtype)
    fit.fill(head, tensors)
    if asked.dtype is None:
        head.of_checkpoint = FIELD in record.document
    return lambda: store.enter(model, checked, head, asked.set_active)


def _translated(model: Any, record: HeadRecord) -> HeadRecord:
    """Return the head of a task class as a named one.

    Raises:
        CheckpointError: it cannot be one.
    """
    document, tensors = record.document, dict(record.tensors)
    if (key := document.get(OUTPUT_KEY)) is not None:
        tensors[key] = output_like(model.heads.values(), document[FIELD])
    given = document.get("label2id")
    saved = document.get(MODEL_CONFIG)
    translated = ModelInfo(model).from_static(
        str(document.get(STATIC)),
        tensors,
        given if isinstance(given, Mapping) else None,
        saved if isinstance(saved, Mapping) else None,
    )
    return HeadRecord(*translated)


def _fitting_static(
    model: Any, record: HeadRecord, name: str | None, asked: LoadOptions
) -> Callable[[], None]:
    if asked.id2label is not None:
        raise ConfigError(
            "id2label names the labels of a named head; this model's static head keeps them "
            "in model.config.id2label. Leave id2label out."
        )
    tensors = record.tensors
    if STATIC not in record.document:
        cls = class_name(model)
        tensors = ModelInfo(model).to_static(cls, record.document, tensors)
    mine = copies.tensors_of(model, None)
    rest = {key: t for key, t in head_tensors(model).items() if key not in mine}
    if name is None:
        # the original may get another output layer
        fits = mine | {key: rest[key] for key in rest.keys() & tensors.keys()}
        fit.check_fit(type(model).__name__, fit.converted(tensors, fits), fits, None)
        return lambda: fit.fill(model, tensors)
    output = copies.output_tensors(model)
    # a copy may still have the values of the original
    own_output = bool(record.document.get(OWN_OUTPUT)) or any(
        _differs(output[key], tensors[key]) for key in output if key in tensors
    )
    if own_output:
        mine |= output
        rest = {key: t for key, t in rest.items() if key not in output}
    _refuse_shared({**copies.rest_of(model), **rest}, tensors, model)
    tensors = {key: t for key, t in tensors.items() if key not in rest or key in mine}
    fit.check_fit(type(model).__name__, fit.converted(tensors, mine), mine, None)
    layers = copies.made(model, own_output)
    for path, layer in layers.items():
        inside = f"{path}."
        own = {k.removeprefix(inside): t for k, t in tensors.items() if k.startswith(inside)}
        fit.fill(layer, own)

    def enter() -> None:
        copies.put(model, name, layers)
        replan(model)

    return enter


def _differs(tensor: Tensor, theirs: Tensor) -> bool:
    if tensor.is_meta or theirs.shape != tensor.shape:
        return True
    return not same_bits(theirs.to(tensor.device, tensor.dtype), tensor)


def _refuse_shared(shared: Mapping[str, Tensor], tensors: Mapping[str, Tensor], model: Any) -> None:
    """Refuse a head with other values for tensors that all adapters share."""
    for key, tensor in shared.items():
        if key not in tensors or tensor.is_meta:
            continue
        if _differs(tensor, tensors[key]):
            raise CheckpointError(
                f"{key!r} of the checkpoint's head is not that of this {type(model).__name__}, and "
                f"all adapters share it: it is a tensor of the model itself. Write "
                f"{argument('with_head', False, 'load_adapter')}"
                f"{in_python(', or load_head(…) with no adapter active')}."
            )
