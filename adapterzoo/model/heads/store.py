"""Named heads: activate, add, delete and resize them, and load heads of checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo.composition.rows import ActiveHeads
from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import CheckpointError, ConfigError, DuplicateNameError, argument, in_python
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.formats.fit import same_bits
from adapterzoo.heads import (
    OWN_OUTPUT,
    STATIC,
    HeadConfig,
    PredictionHead,
    StaticConfig,
    labels_from,
)
from adapterzoo.inject.adapted import AdapterDict
from adapterzoo.model.activation import replan
from adapterzoo.model.hf.backbone import describe, ties_output
from adapterzoo.model.hf.guards import refuse_trained
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.hf.task_classes import MODEL_CONFIG, head_tensors, other_fields
from adapterzoo.model.sharding import class_name, equalize, refuse_if_fixed
from adapterzoo.model.state import DEFAULT_EMBEDDINGS, LoadOptions
from adapterzoo.names import check_name
from adapterzoo.runtime import Plan

from . import copies, named
from .named import HeadNames, HeadRecord
from .tables import drop_biases, update_outputs


def start(model: Any) -> None:
    """Build the heads that the config lists; the base model must exist."""
    model.heads = AdapterDict()
    model.custom_heads = {}
    listed = getattr(model.config, "prediction_heads", None) or {}
    model.config.prediction_heads = {}
    document = vars(model.config).get("adapters")
    ours = document if isinstance(document, Mapping) and "heads" in document else {}
    # transformers sorts keys in config files; our entry keeps the order
    order = [name for name in ours.get("known_heads", ()) if name in listed]
    for name in dict.fromkeys([*order, *listed]):
        # our entry names the active head, whose labels the config already has
        add(model, name, named.config_from(model, listed[name]), set_active=not ours)


def activate(model: Any, setup: HeadNames) -> None:
    """Activate heads in all threads."""
    heads, default = named.checked(model, setup), model._active.default
    default.plan = dataclasses.replace(default.plan, heads=heads)
    named.show_labels(model)


def add(
    model: Any,
    name: object,
    config: HeadConfig,
    overwrite_ok: bool = False,
    set_active: bool = True,
) -> None:
    """Add a head with fresh parameters."""
    checked = free_name(model, name, overwrite_ok)
    if (
        model._adapter_state.embeddings != DEFAULT_EMBEDDINGS
        and config.get("vocab_size", 0) is None
        and not ties_output(model.config, config)
    ):
        # it keeps its number of tokens when other embeddings become active
        config = config.replace(vocab_size=model.get_input_embeddings().num_embeddings)
    head = config.build(describe(model))
    if not ties_output(model.config, head.config):
        named.start_with(head, model.heads.values())
    enter(model, checked, head, set_active)


def free_name(model: Any, name: object, overwrite_ok: bool) -> str:
    """Check that a head can be added under a name, and return the name.

    Raises:
        DuplicateNameError: the name is taken.
    """
    checked = check_name(name)
    refuse_if_fixed(model, "Add it before fully_shard(model).")
    if checked in model.heads and not overwrite_ok:
        raise DuplicateNameError(
            f"there is a head {checked!r}. Write another name, or overwrite_ok=True to replace it."
        )
    return checked


def enter(model: Any, name: str, head: PredictionHead, set_active: bool) -> None:
    """Put a head into the model, replacing one with the same name."""
    drop_biases(model, name)
    equalize(model, [head])
    model.heads[name] = head.train(model.training)
    listed = {**model.config.prediction_heads, name: head.config.to_dict()}
    model.config.prediction_heads = listed
    named.tie(model, head, name)
    update_outputs(model)
    if set_active:
        activate(model, name)
    elif name in model._active.default.plan.heads.names:
        # it replaced an active head
        named.show_labels(model)


def delete(model: Any, name: str) -> None:
    """Delete a head; no other head becomes active."""
    refuse_trained(model, name, named.find(model, name).parameters())
    refuse_if_fixed(model, "Write model.active_head = None.")
    drop_biases(model, name)
    del model.heads[name]
    listed = model.config.prediction_heads.items()
    model.config.prediction_heads = {n: config for n, config in listed if n != name}

    def without(plan: Plan) -> Plan:
        if name not in plan.heads.names:
            return plan
        names = tuple(n for n in plan.heads.names if n != name)
        return dataclasses.replace(plan, heads=ActiveHeads(names))

    active = model._active
    active.default.plan = without(active.default.plan)
    active.change_overrides(without)
    update_outputs(model)


def resize(
    model: Any, resize_table: Callable[[], Any], unchanged: bool, mean_resizing: bool
) -> Any:
    """Resize the token embeddings and all language modeling heads.

    Args:
        model: a model with named heads.
        resize_table: transformers' own method, which returns the embedding.
        unchanged: whether the size stays the same.
        mean_resizing: whether new rows are the mean of the old ones; if not, they are random.
    """
    plan, table = model._active.plan, model.get_input_embeddings().weight
    # read these first: tying again changes the heads that share the table
    heads: Any = [head for head in model.heads.values() if head.output_embeddings is not None]
    layers = [head.output_embeddings for head in heads]
    before = [(m.weight, None if m.bias is None else m.bias.detach()) for m in layers]
    # without this, transformers would resize the active head, even if its config sets a size
    with model._active.overridden(dataclasses.replace(plan, heads=ActiveHeads())):
        resized = resize_table()
    if unchanged:
        return resized
    backbone = describe(model)
    std = None if mean_resizing else backbone.init_std
    for head, (weight, bias) in zip(heads, before, strict=True):
        shared = weight is table
        rows = resized.weight.shape[0] if shared else backbone.vocab_size
        rows = head.config.get("vocab_size") or rows or weight.shape[0]
        if shared and rows == resized.weight.shape[0]:
            weight = resized.weight
        elif shared or rows != weight.shape[0]:
            head.of_checkpoint = False
            weight = nn.Parameter(_with_rows(weight, rows, std), weight.requires_grad)
        if bias is not None and bias.shape[0] != rows:
            bias = _with_rows(bias, rows, None if mean_resizing else 0.0)
        head.resize_output(weight, bias)
    update_outputs(model)
    return resized


def _with_rows(old: Tensor, count: int, std: float | None) -> Tensor:
    """Return a matrix with another number of rows, `[count, *width]`: old ones, then new ones.

    Args:
        old: the matrix `[tokens, *width]`.
        count: the number of rows.
        std: standard deviation of the new rows, around 0; None: each is the mean of the old ones.
    """
    kept = old[:count]
    added = old.new_empty(count - len(kept), *old.shape[1:])
    if std is None:
        added.copy_(old.mean(0, dtype=compute_dtype(old.dtype)).expand_as(added))
    else:
        added.normal_(std=std)
    return torch.cat([kept, added])


# --- heads of checkpoints ---


def head_in(stored: Checkpoint) -> HeadRecord:
    """Return the head in a checkpoint.

    Raises:
        CheckpointError: its description is damaged.
    """
    document = stored.metadata.get("head")
    if not isinstance(document, Mapping):
        raise CheckpointError(
            f"the checkpoint describes its head by {document!r}, which is not an object. "
            f"Write {argument('with_head', False, 'load_adapter')}."
        )
    return HeadRecord(dict(document), stored.head)


def fitting(
    model: Any, record: HeadRecord, name: str | None, asked: LoadOptions
) -> Callable[[], None]:
    """Check a checkpoint's head completely, and return a function that puts it into the model.

    Args:
        model: a model with adapters.
        record: the head.
        name: its name; for a static head its owner, None for the original.
        asked: the arguments of `load_adapter` or `load_head`.

    Raises:
        CheckpointError: the head does not fit.
        ConfigError: `id2label` is given for a static head.
    """
    if not model._has_named_heads:
        return _fitting_static(model, record, name, asked)
    saved = record.document.get(MODEL_CONFIG)
    if not isinstance(record.document.get("config"), Mapping):
        # the head of a task class
        document, static = record.document, dict(record.tensors)
        if (key := document.get(named.OUTPUT_KEY)) is not None:
            static[key] = named.output_like(model.heads.values(), document[named.FIELD])
        labels = document.get("label2id")
        translated = ModelInfo(model).from_static(
            str(document.get(STATIC)),
            static,
            labels if isinstance(labels, Mapping) else None,
            saved if isinstance(saved, Mapping) else None,
        )
        record, saved = HeadRecord(*translated), None
    config = named.config_from(model, record.document["config"])
    if isinstance(config, StaticConfig) and isinstance(saved, Mapping):
        config = config.replace(fields=other_fields(model.config, saved) or None)
    if asked.id2label is not None:
        config = config.replace(label2id=labels_from(asked.id2label))
    checked = free_name(model, name, bool(asked.overwrite_ok))
    # the config of an untrusted file may ask for too much memory: compare before allocating it
    empty = named.built(model, config, torch.device("meta"))
    heads = model.heads.values()
    tensors = named.with_output(empty, heads, record.document, record.tensors, asked.dtype)
    fits = named.own_tensors(model, empty)
    fit.check_fit(type(model).__name__, fit.converted(tensors, fits), fits, None)
    head = named.built(model, config)
    if asked.dtype is not None:
        for tensor in named.own_tensors(model, head).values():
            tensor.data = tensor.data.to(asked.dtype)
    fit.fill(head, tensors)
    if asked.dtype is None:
        head.of_checkpoint = named.FIELD in record.document
    return lambda: enter(model, checked, head, asked.set_active)


def _fitting_static(
    model: Any, record: HeadRecord, name: str | None, asked: LoadOptions
) -> Callable[[], None]:
    if asked.id2label is not None:
        raise ConfigError("a static head's labels are model.config.id2label. Leave id2label out.")
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
    inside = tuple(f"{path}." for path in copies.layers_of(model))
    shared = {key: t for key, t in mine.items() if not key.startswith(inside)}
    # the adapter's own output layer may still have the values of the original
    own_output = bool(record.document.get(OWN_OUTPUT)) or any(
        _differs(output[key], tensors[key]) for key in output if key in tensors
    )
    if own_output:
        mine |= output
        rest = {key: t for key, t in rest.items() if key not in output}
    for key, tensor in {**shared, **rest}.items():
        if key in tensors and not tensor.is_meta and _differs(tensor, tensors[key]):
            raise CheckpointError(
                f"{key!r} of the checkpoint's head is not that of this {type(model).__name__}, and "
                f"all adapters share it. Write {argument('with_head', False, 'load_adapter')}"
                f"{in_python(', or load_head(…) with no adapter active')}."
            )
    tensors = {key: t for key, t in tensors.items() if key not in rest or key in mine}
    fit.check_fit(type(model).__name__, fit.converted(tensors, mine), mine, None)
    layers = copies.made(model, own_output)
    for path, layer in layers.items():
        below = f"{path}."
        own = {k.removeprefix(below): t for k, t in tensors.items() if k.startswith(below)}
        fit.fill(layer, own)

    def enter() -> None:
        copies.put(model, name, layers)
        replan(model)

    return enter


def _differs(tensor: Tensor, theirs: Tensor) -> bool:
    return tensor.is_meta or not same_bits(theirs.to(tensor.device, tensor.dtype), tensor)
