"""Named heads: find, select, build and tie them; and heads as checkpoints hold them.

A model with a static head has no named ones. The matrix onto the vocabulary is frozen unless the
embeddings are trained, and may be larger than all adapters of a model. A file names its digest, and
loading takes it from the model's own head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from adapterzoo.composition import Composition, last_adapter
from adapterzoo.composition.rows import ActiveHeads, heads_of_rows, parse_heads, parts_of
from adapterzoo.errors import CheckpointError, StateError, argument, listing, unknown_name
from adapterzoo.formats import fit
from adapterzoo.formats.fit import digest
from adapterzoo.heads import OWN_OUTPUT, STATIC, HeadConfig, PredictionHead, StaticConfig
from adapterzoo.inject.adapted import split_later
from adapterzoo.inject.building import plain_state
from adapterzoo.inject.parallel import split_output
from adapterzoo.model.hf.backbone import describe, ties_output
from adapterzoo.model.hf.task_classes import MODEL_CONFIG, config_fields, head_tensors
from adapterzoo.model.sharding import class_name
from adapterzoo.model.state import (
    AdaptedModel,
    config_of,
    heads_of,
    output_embeddings_of,
    output_path,
)
from adapterzoo.tensor_parallel import is_part

from . import copies

HeadNames: TypeAlias = "str | list[str] | Composition | None"


def find(model: Any, name: object) -> PredictionHead:
    """Return the head of this name.

    Raises:
        UnknownNameError: there is none.
    """
    if not isinstance(name, str) or name not in model.heads:
        raise unknown_name("", "head", name, model.heads)
    return cast("PredictionHead", model.heads[name])


def active_name(model: Any) -> str | None:
    """Return the name of the only active head.

    Of a static head, it is the owner, even if it has no copy yet; None: the original.

    Raises:
        StateError: there is none, there are several, or rows use different heads.
    """
    names: tuple[str | None, ...] = model._active.heads.names
    is_one = len(names) == 1
    if not model._has_named_heads:
        names, own = copies.owners_of(model._active.plan.setup), model._adapter_state.copies
        is_one = len({name if name in own else None for name in names}) <= 1
    if not is_one:
        raise StateError(
            f"{len(names)} heads are active, so the head is ambiguous. Activate one, or write its "
            f"name; heads: {listing(saved_names(model))}."
        )
    return names[0] if len(names) == 1 else None


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


def heads_by_name(model: Any, heads: ActiveHeads | None = None) -> dict[str, PredictionHead]:
    """Return heads by name; None: the active ones."""
    return {name: find(model, name) for name in (heads or model._active.heads).names}


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
            f"adapter_names=…: {parts[own.index(None)]!r} has no head of its name, and no single "
            f"head is active. Write model.active_head = {next(filter(None, own))!r}, or head=…."
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
            f"generate(): no head is active; heads: {listing(model.heads)}. Write "
            f"add_causal_lm_head('my_task'), add_seq2seq_lm_head(…) or model.active_head = '…'."
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
        own = None if name is None else copies.table_of(model, name)
        head.tie(model.get_input_embeddings().weight if own is None else own)
        split_tied(head)


def split_tied(head: PredictionHead) -> None:
    """Let the last layer of a head compute with embeddings that a `tp_plan` has split, if tied."""
    layer = head.output_embeddings
    if layer is not None and is_part(layer.weight):
        with split_later(layer):
            split_output(layer)


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
    backbone = copies.shared_with_heads(model).keys() - {id(but)}
    tensors = plain_state(head)
    # a parameter with two names is there once
    first = {id(t): key for key, t in reversed(tensors.items()) if id(t) not in backbone}
    return {key: t for key, t in tensors.items() if first.get(id(t)) == key}


def share_table(model: Any, name: str) -> None:
    """Let the head of the adapter's name share its table."""
    head = heads_of(model).get(name)
    if head is None or copies.table_of(model, name) is None:
        return
    # a head whose layer was replaced has one of its own
    if is_on(head, model.get_input_embeddings().weight):
        tie(model, head, name)


def release(model: Any, owner: str) -> None:
    """Take out the copy of an adapter or fusion, which goes, and untie a head from its table."""
    copies.take(model, owner)
    head, table = heads_of(model).get(owner), copies.table_of(model, owner)
    if head is not None and table is not None and is_on(head, table):
        tie(model, head)


# --- heads as checkpoints hold them ---


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """A head as a checkpoint holds it: a document of JSON types, and tensors."""

    document: dict[str, Any]
    tensors: dict[str, Tensor]


def saved_names(model: AdaptedModel) -> tuple[str, ...]:
    """Return the names of heads that can be saved; of copies of a static head, their owners."""
    return (*heads_of(model), *model._adapter_state.copies)


def name_with(model: Any, adapter: str) -> str | None:
    """Return the name of the head that is saved with an adapter.

    That is the head of the adapter's name, or else the only active one, if no other owns it. A copy
    of a static head is kept under the name of its adapter.
    """
    if not model._has_named_heads:
        return adapter
    if adapter in model.heads:
        return adapter
    active, state = model._active.heads.names, model._adapter_state
    owned = any(name in state.records or name in state.fusions for name in active)
    return active[0] if len(active) == 1 and not owned else None


def record_of(
    model: Any, name: str | None, alone: bool = False, short: bool = False
) -> HeadRecord | None:
    """Return a head as a checkpoint holds it; None if there is none.

    Args:
        model: with adapters.
        name: of the head; of a static head its owner, None for the original.
        alone: whether it is saved without the adapter of its name: a table that it shares with the
            adapter is its own.
        short: whether to leave out an output layer that the base model's checkpoint brought.
    """
    if model._has_named_heads:
        return None if name is None else of_named(model, name, alone, short)
    tensors, layer = copies.tensors_of(model, name), output_embeddings_of(model)
    rest = {key: t for key, t in head_tensors(model).items() if key not in tensors}
    weight = None if layer is None else cast("Tensor", layer.weight)
    large = {key: tensor for key, tensor in rest.items() if tensor is weight}
    if not tensors and not alone and (large or layer is None):
        return None
    if not (tensors or rest or layer is not None):
        return None
    config = config_of(model)
    document: dict[str, Any] = {
        STATIC: class_name(model),
        "label2id": getattr(config, "label2id", None),
        MODEL_CONFIG: config_fields(config),
    }
    if output_path(model) in copies.layers_with(model, name):
        document[OWN_OUTPUT] = True
    if large and not alone:
        (key,) = large
        document |= {FIELD: digest(large[key]), OUTPUT_KEY: key}
        rest.pop(key)
    return HeadRecord(document, {**tensors, **rest})


def of_named(model: Any, name: str, alone: bool = False, short: bool = False) -> HeadRecord:
    """Return a named head as a checkpoint holds it; arguments as in `record_of`."""
    head = find(model, name)
    config, table = head.config, copies.table_of(model, name) if alone else None
    if table is not None and is_on(head, table):
        config = config.replace(tie_word_embeddings=False)
    tensors = own_tensors(model, head, table)
    document: dict[str, Any] = {"config": config.to_dict()}
    if isinstance(config, StaticConfig):
        own = config.fields or {}
        document[MODEL_CONFIG] = {**config_fields(config_of(model)), "problem_type": None, **own}
    key, layer = head.output_key, head.output_embeddings
    if short and head.of_checkpoint and layer is not None and key is not None and key in tensors:
        weight = layer.weight
        if type(weight) is nn.Parameter and not weight.is_meta and not weight.requires_grad:
            document[FIELD] = digest(weight)
            del tensors[key]
    return HeadRecord(document, tensors)


def completed(
    model: Any, name: str, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the tensors of a file, with the output layer that a short record left out.

    Raises:
        CheckpointError: the head has another config.
    """
    if not model._has_named_heads:
        return tensors
    saved = config_from(model, document["config"])
    head = find(model, name)
    fit.check_same(f"head {name!r}", saved, head.config)
    return with_output(head, model.heads.values(), document, tensors)


def all_tensors(model: Any) -> dict[str, Tensor]:
    """Return the own tensors of all heads, named for messages."""
    found = {
        f"head {name}: {key}": tensor
        for name, head in heads_of(model).items()
        for key, tensor in own_tensors(model, head).items()
    }
    for owner in model._adapter_state.copies:
        tensors = copies.tensors_of(model, owner)
        found |= {f"head of {owner}: {key}": tensor for key, tensor in tensors.items()}
    return found


# --- output layers from the base model's checkpoint ---


FIELD = "output"


# of a task class: the key of its weight there
OUTPUT_KEY = "output_key"


def with_output(
    head: PredictionHead,
    heads: Iterable[PredictionHead],
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a head with the output layer that its file leaves out.

    Args:
        head: that gets the tensors.
        heads: of the model.
        document: of the head in the file.
        tensors: in the file.
        dtype: into which the user lets values be converted.

    Raises:
        CheckpointError: no head of the model has that layer.
    """
    named = document.get(FIELD)
    key = head.output_key
    if named is None or key is None:
        return dict(tensors)
    return {**tensors, key: output_like(heads, named, dtype)}


def output_like(
    heads: Iterable[PredictionHead], named: object, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the output layer of a checkpoint that has a digest, or any for another dtype.

    Raises:
        CheckpointError: no head has it.
    """
    for weight in _of_checkpoint(heads):
        # rounded values have another digest, and the user asks for them
        if dtype is not None or digest(weight) == named:
            return weight.detach()
    raise CheckpointError(
        "the file leaves out the output layer of the checkpoint that its base model came from, and "
        f"no head here has it. Write {argument('with_head', False, 'load_adapter')}."
    )


def start_with(head: PredictionHead, heads: Iterable[PredictionHead]) -> None:
    """Give a fresh head the output layer of the model's checkpoint, if there is one.

    Args:
        head: of any type, not tied.
        heads: of the model.
    """
    layer = head.output_embeddings
    if layer is None:
        return
    mine = layer.weight
    for theirs in _of_checkpoint(heads):
        if theirs is not mine and theirs.shape == mine.shape and not mine.is_meta:
            with torch.no_grad():
                mine.copy_(theirs)
            head.of_checkpoint = theirs.dtype is mine.dtype
            return


def _of_checkpoint(heads: Iterable[PredictionHead]) -> Iterator[Tensor]:
    """Yield the weights of output layers that the base model's checkpoint brought."""
    for head in heads:
        if (layer := head.output_embeddings) is not None and head.of_checkpoint:
            yield layer.weight
