"""Named heads: activate, add, delete and resize them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.composition.rows import ActiveHeads
from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import (
    ConfigError,
    DuplicateNameError,
)
from adapterzoo.heads import HeadConfig, PredictionHead
from adapterzoo.inject import AdapterDict
from adapterzoo.model.hf.backbone import describe, ties_output
from adapterzoo.model.hf.hosts import refuse_trained, refuse_while_batching
from adapterzoo.model.sharding import refuse_if_sharded
from adapterzoo.model.state import DEFAULT_EMBEDDINGS
from adapterzoo.names import check_name
from adapterzoo.runtime import Plan

from .copies import list_ties
from .embeddings import drop_biases
from .named import (
    HeadNames,
    checked,
    config_from,
    find,
    show_labels,
    tie,
)
from .records import start_with
from .sharing import update_outputs


def start(model: Any) -> None:
    """Make the heads that the config lists; the base model must exist."""
    model.heads = AdapterDict()
    model.custom_heads = {}
    listed = getattr(model.config, "prediction_heads", None) or {}
    model.config.prediction_heads = {}
    document = vars(model.config).get("adapters")
    ours = document if isinstance(document, Mapping) and "heads" in document else {}
    # transformers sorts the keys of objects; our entry keeps the order
    order = [name for name in ours.get("known_heads", ()) if name in listed]
    for name in dict.fromkeys([*order, *listed]):
        # our entry names the active head, and the config has its labels
        add(model, name, config_from(model, listed[name]), set_active=not ours)


def activate(model: Any, setup: HeadNames) -> None:
    """Activate heads in all threads."""
    heads = checked(model, setup)
    refuse_while_batching(model)
    default = model._active.default
    default.plan = dataclasses.replace(default.plan, heads=heads)
    show_labels(model)


def add(
    model: Any,
    name: object,
    config: HeadConfig,
    overwrite_ok: bool = False,
    set_active: bool = True,
) -> None:
    """Add a head with fresh parameters."""
    checked = free_name(model, name, overwrite_ok)
    if config.scores_vocabulary and model._adapter_state.embeddings != DEFAULT_EMBEDDINGS:
        config = _of_vocabulary(model, config)
    head = config.build(describe(model))
    if not ties_output(model.config, head.config):
        start_with(head, model.heads.values())
    enter(model, checked, head, set_active)


def _of_vocabulary(model: Any, config: HeadConfig) -> HeadConfig:
    """Return a config that keeps the number of tokens if other embeddings become active."""
    own = "vocab_size" in config.keys() and config["vocab_size"] is None  # noqa: SIM118
    if not own or ties_output(model.config, config):
        return config
    return config.replace(vocab_size=model.get_input_embeddings().num_embeddings)


def add_type(model: Any, head_type: str, cls: Any) -> None:
    """Register a head type for this model alone.

    Raises:
        ConfigError: it is not a config class, or has another `head_type`.
    """
    if not (isinstance(cls, type) and issubclass(cls, HeadConfig)):
        raise ConfigError(
            f"{cls!r}: a head type is registered by its config class. Derive one from "
            f"adapterzoo.heads.HeadConfig whose build(backbone) makes the head, an "
            f"adapterzoo.heads.PredictionHead."
        )
    if cls.head_type != head_type:
        raise ConfigError(
            f"{cls.__name__}.head_type is {cls.head_type!r}, the name in files. Write "
            f"register_custom_head({cls.head_type!r}, {cls.__name__})."
        )
    model.custom_heads[head_type] = cls


def free_name(model: Any, name: object, overwrite_ok: bool) -> str:
    """Check that a head may be added under a name, and return the name.

    Raises:
        DuplicateNameError: it is taken.
    """
    checked = check_name(name)
    refuse_if_sharded(model, "Add it before fully_shard(model).")
    if checked in model.heads and not overwrite_ok:
        raise DuplicateNameError(
            f"there is a head {checked!r}. Write another name, or overwrite_ok=True to replace it."
        )
    return checked


def enter(model: Any, name: str, head: PredictionHead, set_active: bool) -> None:
    """Put a head into the model, replacing one of the same name."""
    drop_biases(model, name)
    model.heads[name] = head.train(model.training)
    listed = {**model.config.prediction_heads, name: head.config.to_dict()}
    model.config.prediction_heads = listed
    tie(model, head, name)
    update_outputs(model)
    list_ties(model)
    if set_active:
        activate(model, name)
    elif name in model._active.default.plan.heads.names:
        # it replaced an active head
        show_labels(model)


def delete(model: Any, name: str) -> None:
    """Delete a head; no other head becomes active."""
    refuse_trained(model, name, find(model, name).parameters())
    refuse_if_sharded(model, "Write model.active_head = None.")
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
    list_ties(model)


@torch.no_grad()
def replace_output(model: Any, head: PredictionHead, output: nn.Linear) -> None:
    """Replace the last layer of a language modeling head.

    Raises:
        ConfigError: it is not a linear layer.
    """
    head.replace_output(output)
    update_outputs(model)
    list_ties(model)


def resize(
    model: Any, resize_table: Callable[[], Any], unchanged: bool, mean_resizing: bool
) -> Any:
    """Resize the token embeddings and all language modeling heads.

    Args:
        model: with named heads.
        resize_table: transformers' own method; returns the embedding.
        unchanged: whether the size stays the same.
        mean_resizing: whether new rows are the mean of the old ones; else they are drawn.
    """
    plan, table = model._active.plan, model.get_input_embeddings().weight
    # take these before: tying anew changes heads that share the table
    heads = [head for head in model.heads.values() if head.output_embeddings is not None]
    before = [(head, *_weight_and_bias(head.output_embeddings)) for head in heads]
    # transformers would resize the layer of one active head even if its config forbids it
    with model._active.overridden(dataclasses.replace(plan, heads=ActiveHeads())):
        resized = resize_table()
    if unchanged:
        return resized
    backbone = describe(model)
    std = None if mean_resizing else backbone.init_std
    for head, weight, bias in before:
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
    list_ties(model)
    return resized


def _with_rows(old: Tensor, count: int, std: float | None) -> Tensor:
    """Return a matrix with a number of rows: the first old ones, then new ones.

    Args:
        old: `[tokens, *width]`.
        count: rows of the result, `[count, *width]`.
        std: new ones are drawn from a normal distribution around 0; None: they are the mean.
    """
    kept = old[:count]
    added = old.new_empty(count - len(kept), *old.shape[1:])
    if std is None:
        added.copy_(old.mean(0, dtype=compute_dtype(old.dtype)).expand_as(added))
    else:
        added.normal_(std=std)
    return torch.cat([kept, added])


def _weight_and_bias(layer: nn.Linear) -> tuple[Any, Tensor | None]:
    # torch's types claim that there always is a bias
    bias = cast("Tensor | None", layer.bias)
    return layer.weight, None if bias is None else bias.detach()
