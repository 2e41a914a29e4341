"""Named heads: find, select, build and tie them, and convert them to records for checkpoints.

A model with a static head has no named ones. The matrix onto the vocabulary is frozen unless the
embeddings are trained, and may be larger than all adapters of a model. A file may therefore store
only its digest; loading then takes the matrix from a head of the model.
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
    """Return the head with this name.

    Raises:
        UnknownNameError: there is none.
    """
    if not isinstance(name, str) or name not in model.heads:
        raise unknown_name("", "head", name, model.heads)
    return cast("PredictionHead", model.heads[name])


def active_name(model: Any) -> str | None:
    """Return the name of the only active head.

    For a static head this is the owner, even without a copy yet; None: the original.

    Raises:
        StateError: no head is active, several are, or rows use different heads.
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
    """Return the config of a head from its dict; the model's own head types come first.

    Raises:
        ConfigError: the argument is not a dict, or a value is not legal.
    """
    kind = values.get("head_type") if isinstance(values, Mapping) else None
    return cast("HeadConfig", model.custom_heads.get(str(kind), HeadConfig).from_dict(values))


# --- activate ---


def checked(model: Any, given: HeadNames) -> ActiveHeads:
    """Return the heads that the user names, after checking that they exist.

    Raises:
        CompositionError: heads cannot have this composition.
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
    """Return the heads by name; None: the active ones."""
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
    """Return the head with the adapter's name for each part of a batch; None without one."""
    names, there = map(last_adapter, parts), heads_of(model)
    return [name if name is not None and name in there else None for name in names]


def heads_of_parts(model: Any, parts: Sequence[Any], otherwise: tuple[str, ...]) -> tuple[str, ...]:
    """Return the head of each part of a batch; a single name if it is the same for all.

    Args:
        model: a model with named heads.
        parts: the composition of each part.
        otherwise: the heads for parts without one of their own; returned if no part has one.
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
        model: a model with adapters.
        setup: the composition of adapters.
        wanted: the heads that the user asks for; None: those with the names of the last adapters,
            or the active ones if there are none.
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
    """Return the heads of a mixed batch, and their names if parts have heads of their own, or ().

    Args:
        model: a model with adapters.
        parts: the adapter or composition of each kind of row. A part without a head of its own gets
            the active one.
        one_head: whether the caller chooses one head for all rows.

    Raises:
        StateError: a part has no head of its own, and no single head is active.
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
    """Check that a head is active if the model has named heads.

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
    """Return a new head, tied if the config ties it; `device=None`: the model's device."""
    backbone = describe(model)
    if device is not None:
        backbone = dataclasses.replace(backbone, device=device)
    # initial values are overwritten: do not disturb the caller's random numbers
    with torch.random.fork_rng(devices=()):
        head = config.build(backbone)
    tie(model, head)
    return head


def tie(model: Any, head: PredictionHead, name: str | None = None) -> None:
    """Tie the last layer of a language modeling head to the embeddings, if the config ties it.

    Args:
        model: a model with named heads.
        head: a head of any type.
        name: the adapter whose own table is used, if it has one; None: the model's table.
    """
    if ties_output(model.config, head.config):
        own = None if name is None else copies.table_of(model, name)
        head.tie(model.get_input_embeddings().weight if own is None else own)
        split_tied(head)


def split_tied(head: PredictionHead) -> None:
    """Split the computation of a head's last layer if a `tp_plan` has split its weight."""
    layer = head.output_embeddings
    if layer is not None and is_part(layer.weight):
        with split_later(layer):
            split_output(layer)


def is_on(head: Any, weight: Tensor | None) -> bool:
    """Return whether the last layer of a head shares this weight."""
    layer = None if head is None else head.output_embeddings
    return layer is not None and layer.weight is weight


def own_tensors(model: Any, head: PredictionHead, but: Tensor | None = None) -> dict[str, Tensor]:
    """Return the tensors of a head without those that it shares with the base model or a table.

    Args:
        model: a model with named heads.
        head: a head, in the model or not.
        but: an adapter's table that counts as the head's own.
    """
    backbone = copies.shared_with_heads(model).keys() - {id(but)}
    tensors = plain_state(head)
    # a parameter with two names is returned once
    first = {id(t): key for key, t in reversed(tensors.items()) if id(t) not in backbone}
    return {key: t for key, t in tensors.items() if first.get(id(t)) == key}


def share_table(model: Any, name: str) -> None:
    """Tie the head with an adapter's name to the adapter's table, if it has one."""
    head = heads_of(model).get(name)
    if head is None or copies.table_of(model, name) is None:
        return
    # a head whose layer was replaced has its own weight
    if is_on(head, model.get_input_embeddings().weight):
        tie(model, head, name)


def release(model: Any, owner: str) -> None:
    """Take out an adapter's or fusion's own head, and untie the named head from its table."""
    copies.take(model, owner)
    head, table = heads_of(model).get(owner), copies.table_of(model, owner)
    if head is not None and table is not None and is_on(head, table):
        tie(model, head)


# --- heads in checkpoints ---


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """A head in a checkpoint: a document of JSON types, and tensors."""

    document: dict[str, Any]
    tensors: dict[str, Tensor]


def saved_names(model: AdaptedModel) -> tuple[str, ...]:
    """Return the names of the heads that can be saved; for copies of a static head, the owners."""
    return (*heads_of(model), *model._adapter_state.copies)


def name_with(model: Any, adapter: str) -> str | None:
    """Return the name of the head that is saved with an adapter.

    This is the head with the adapter's name, or the only active one if no other adapter or fusion
    has its name. A copy of a static head has the name of its adapter.
    """
    if not model._has_named_heads or adapter in model.heads:
        return adapter
    active, state = model._active.heads.names, model._adapter_state
    owned = any(name in state.records or name in state.fusions for name in active)
    return active[0] if len(active) == 1 and not owned else None


def record_of(
    model: Any, name: str | None, alone: bool = False, short: bool = False
) -> HeadRecord | None:
    """Return the record of a head for a checkpoint; None if there is no head.

    Args:
        model: a model with adapters.
        name: name of the head; for a static head its owner, None for the original.
        alone: whether it is saved without the adapter with its name; a table that the two share
            then counts as the head's own.
        short: whether to leave out an output layer that came from the base model's checkpoint.
    """
    if model._has_named_heads:
        return None if name is None else of_named(model, name, alone, short)
    tensors, layer = copies.tensors_of(model, name), output_embeddings_of(model)
    rest = {key: t for key, t in head_tensors(model).items() if key not in tensors}
    weight = None if layer is None else cast("Tensor", layer.weight)
    large = {key: tensor for key, tensor in rest.items() if tensor is weight}
    is_empty = not (rest or layer is not None)
    if not tensors and (is_empty or (not alone and (large or layer is None))):
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
    """Return the record of a named head for a checkpoint; arguments as in `record_of`."""
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
    """Return the tensors of a file, with the output layer if a short record left it out.

    Raises:
        CheckpointError: the model's head has another config.
    """
    if not model._has_named_heads:
        return tensors
    saved = config_from(model, document["config"])
    head = find(model, name)
    fit.check_same(f"head {name!r}", saved, head.config)
    return with_output(head, model.heads.values(), document, tensors)


def all_tensors(model: Any) -> dict[str, Tensor]:
    """Return the tensors of all heads without shared ones, by names for messages."""
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


# fields of the document: the digest of an output layer that is left out; its key in a task class
FIELD, OUTPUT_KEY = "output", "output_key"


def with_output(
    head: PredictionHead,
    heads: Iterable[PredictionHead],
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a head, with the output layer if its file leaves it out.

    Args:
        head: the head that gets the tensors.
        heads: the heads of the model.
        document: the head's document in the file.
        tensors: its tensors in the file.
        dtype: the dtype to which the user wants values converted; None: no conversion.

    Raises:
        CheckpointError: no head of the model has that layer.
    """
    key = head.output_key
    if key is None or document.get(FIELD) is None:
        return dict(tensors)
    return {**tensors, key: output_like(heads, document[FIELD], dtype)}


def output_like(
    heads: Iterable[PredictionHead], named: object, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the output layer with a digest that came from the base model's checkpoint.

    With `dtype`, the digest is not compared.

    Raises:
        CheckpointError: no head has it.
    """
    for weight in _of_checkpoint(heads):
        # the user asks for rounded values, which have another digest
        if dtype is not None or digest(weight) == named:
            return weight.detach()
    raise CheckpointError(
        "the file leaves out the output layer of the checkpoint that its base model came from, and "
        f"no head here has it. Write {argument('with_head', False, 'load_adapter')}."
    )


def start_with(head: PredictionHead, heads: Iterable[PredictionHead]) -> None:
    """Give a new head the values of the output layer in the base model's checkpoint, if known.

    Args:
        head: a head of any type, not tied.
        heads: the heads of the model.
    """
    if (layer := head.output_embeddings) is None or layer.weight.is_meta:
        return
    mine = layer.weight
    fitting = (t for t in _of_checkpoint(heads) if t is not mine and t.shape == mine.shape)
    if (theirs := next(fitting, None)) is not None:
        with torch.no_grad():
            mine.copy_(theirs)
        head.of_checkpoint = theirs.dtype is mine.dtype


def _of_checkpoint(heads: Iterable[PredictionHead]) -> Iterator[Tensor]:
    """Yield the weights of output layers that came from the base model's checkpoint."""
    for head in heads:
        if (layer := head.output_embeddings) is not None and head.of_checkpoint:
            yield layer.weight
