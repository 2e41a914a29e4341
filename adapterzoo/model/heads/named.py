"""Named heads: find, select, build and tie them. A model with a static head has none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from adapterzoo.composition import Composition, last_adapter
from adapterzoo.composition.rows import ActiveHeads, heads_of_rows, parse_heads, parts_of
from adapterzoo.errors import (
    StateError,
    listing,
    unknown_name,
)
from adapterzoo.heads import (
    HeadConfig,
    PredictionHead,
)
from adapterzoo.model.hf.backbone import describe, ties_output
from adapterzoo.model.state import heads_of

from .copies import shared_with_heads, table_of, take

HeadNames: TypeAlias = "str | list[str] | Composition | None"


def find(model: Any, name: object) -> PredictionHead:
    """Return the head of this name.

    Raises:
        UnknownNameError: there is none.
    """
    if not isinstance(name, str) or name not in model.heads:
        raise unknown_name("", "head", name, model.heads)
    return cast("PredictionHead", model.heads[name])


def active_name(model: Any) -> str:
    """Return the name of the one head that is active.

    Raises:
        StateError: there is none, or there are several.
    """
    names = model._active.heads.names
    if len(names) == 1:
        return cast("str", names[0])
    raise StateError(
        f"{len(names)} heads are active, so the head is ambiguous. "
        f"Write its name; heads: {listing(model.heads)}."
    )


def config_from(model: Any, values: Mapping[str, Any]) -> HeadConfig:
    """Return the config of a head, of a type of this model or of all, from its dict.

    Raises:
        ConfigError: it is not a dict, or a value is not legal.
    """
    kind = values.get("head_type") if isinstance(values, Mapping) else None
    return cast("HeadConfig", model.custom_heads.get(str(kind), HeadConfig).from_dict(values))


# --- activate ---


def checked(model: Any, given: HeadNames) -> ActiveHeads:
    """Return the heads that a user's argument describes; check that they exist.

    Raises:
        CompositionError: it is a composition that heads cannot have.
        UnknownNameError: a head is unknown.
    """
    heads = parse_heads(given)
    for name in heads.names:
        find(model, name)
    return heads


def chosen(model: Any, heads: HeadNames = None) -> ActiveHeads:
    """Return the heads of a call, checked; None: the active ones."""
    return checked(model, heads) if heads else model._active.heads


def active_heads(model: Any, names: HeadNames = None) -> dict[str, PredictionHead]:
    """Return the heads of these names; None: the active ones."""
    return {name: find(model, name) for name in chosen(model, names).names}


def show_labels(model: Any) -> None:
    """Write the labels of the active head to the config, where pipelines and Trainer read them."""
    names = model._active.default.plan.heads.names
    if len(names) != 1:
        return
    head = find(model, names[0]).config
    model.config.problem_type = head.problem_type
    if labels := head.id2label:
        model.config.id2label = labels
        model.config.label2id = {label: number for number, label in labels.items()}


def own_heads(model: Any, parts: Sequence[Any]) -> list[str | None]:
    """Return for each part of a batch the head of its adapter's name, None without one."""
    names, there = map(last_adapter, parts), heads_of(model)
    return [name if name is not None and name in there else None for name in names]


def heads_of_parts(model: Any, parts: Sequence[Any], otherwise: tuple[str, ...]) -> tuple[str, ...]:
    """Return the head of each part of a batch; a single name if it is the same for all.

    Args:
        model: with named heads.
        parts: of the batch.
        otherwise: the heads of parts without one of their own; returned where no part has one.
    """
    own = own_heads(model, parts)
    if not any(own) or (None in own and len(otherwise) != 1):
        return otherwise
    names = tuple(otherwise[0] if name is None else name for name in own)
    return names[:1] if len(set(names)) == 1 else names


def for_setup(
    model: Any, setup: Composition | None, wanted: HeadNames, active: ActiveHeads
) -> ActiveHeads:
    """Return the named heads of a plan.

    Args:
        model: with adapters.
        setup: the composition of adapters.
        wanted: heads that the user asks for; None: those with the names of the last adapters if
            there are any, else the active ones.
        active: the active heads.
    """
    if not model._has_named_heads:
        return ActiveHeads()
    if wanted is not None:
        return checked(model, wanted)
    if setup is None:
        return active
    parts, rows = parts_of(setup)
    names = heads_of_parts(model, parts, active.names)
    return active if names is active.names else heads_of_rows(names, rows)


def for_rows(
    model: Any, parts: tuple[Any, ...], one_head: bool
) -> tuple[ActiveHeads, tuple[str, ...]]:
    """Return the heads of a mixed batch, and their names if each has its own part, else ().

    Args:
        model: with adapters.
        parts: the adapter or composition of each kind of row. A part without a head of its own gets
            the active one.
        one_head: whether the caller chooses one head for all rows.

    Raises:
        StateError: a part has no head of its own, and several are active.
    """
    active = model._active.default.plan.heads
    own = own_heads(model, parts)
    if None in own and any(own) and len(active.names) != 1 and not one_head:
        raise StateError(
            f"adapter_names=…: {parts[own.index(None)]!r} has no head of its name, and the "
            f"active heads are {listing(active.names)}, not one for such rows. Write "
            f"model.active_head = {next(filter(None, own))!r}, or head=… for all rows."
        )
    if not any(own):
        return active, ()
    names = heads_of_parts(model, parts, active.names)
    return ActiveHeads(names), names


def check_generation(model: Any, given: Mapping[str, Any]) -> None:
    """Check that a named head is active, which can score the next token.

    Raises:
        StateError: none is.
    """
    if model._has_named_heads and not (given.get("head") or model._active.heads.names):
        raise StateError(
            f"generate(): no head is active, so nothing scores the next token. Heads: "
            f"{listing(model.heads)}. Write add_causal_lm_head('my_task'), on an "
            f"encoder–decoder add_seq2seq_lm_head('my_task'), or model.active_head = 'my_task'."
        )


# --- build and tie ---


def built(model: Any, config: HeadConfig, device: torch.device | None = None) -> PredictionHead:
    """Return a fresh head, tied if the config ties it; `device` None: the model's."""
    backbone = describe(model)
    if device is not None:
        backbone = dataclasses.replace(backbone, device=device)
    # initial values are overwritten: do not disturb the caller's random numbers
    with torch.random.fork_rng(devices=()):
        head = config.build(backbone)
    tie(model, head)
    return head


def tie(model: Any, head: PredictionHead, name: str | None = None) -> None:
    """Let the last layer of a language modeling head share the embeddings, if the config ties it.

    Args:
        model: with named heads.
        head: of any type.
        name: of the adapter whose table it is, where that has one of its own.
    """
    if ties_output(model.config, head.config):
        own = None if name is None else table_of(model, name)
        head.tie(model.get_input_embeddings().weight if own is None else own)


def is_on(head: Any, weight: Tensor | None) -> bool:
    """Return whether the last layer of a head shares this weight."""
    layer = None if head is None else head.output_embeddings
    return layer is not None and layer.weight is weight


def own_tensors(model: Any, head: PredictionHead, but: Tensor | None = None) -> dict[str, Tensor]:
    """Return the tensors of a head without those that belong to the base model.

    Args:
        model: with named heads.
        head: of the model, or not yet.
        but: a tensor of an adapter that counts as the head's own.
    """
    backbone = shared_with_heads(model).keys() - {id(but)}
    tensors = head.state_dict(keep_vars=True)
    # a parameter with two names is there once
    first = {id(t): key for key, t in reversed(tensors.items()) if id(t) not in backbone}
    return {key: t for key, t in tensors.items() if first.get(id(t)) == key}


def share_table(model: Any, name: str) -> None:
    """Let the head of the adapter's name share its table."""
    head = heads_of(model).get(name)
    if head is None or table_of(model, name) is None:
        return
    # a head whose layer was replaced has one of its own
    if is_on(head, model.get_input_embeddings().weight):
        tie(model, head, name)


def release(model: Any, owner: str) -> None:
    """Take out the copy of an adapter or fusion, which goes, and untie a head from its table."""
    take(model, owner)
    head, table = heads_of(model).get(owner), table_of(model, owner)
    if head is not None and table is not None and is_on(head, table):
        tie(model, head)
