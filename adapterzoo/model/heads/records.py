"""Heads as checkpoints hold them, and output layers that files do not repeat.

The matrix onto the vocabulary is frozen unless the embeddings are trained, and may be larger than
all adapters of a model. A file names its digest, and loading takes it from the model's own head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.errors import CheckpointError, StateError, argument, in_python
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import OWN_OUTPUT
from adapterzoo.formats.fit import digest
from adapterzoo.heads import STATIC, PredictionHead, StaticConfig
from adapterzoo.model.hf.task_classes import (
    MODEL_CONFIG,
    config_fields,
    head_tensors,
    saved_fields,
)
from adapterzoo.model.sharding import class_name
from adapterzoo.model.state import AdaptedModel, heads_of

from . import copies, named


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


def active_name(model: Any) -> str | None:
    """Return the name of the only active head.

    Of a static head, it is the owner, even if it has no copy yet; None: the original.

    Raises:
        StateError: there is none, there are several, or rows use different heads.
    """
    if model._has_named_heads:
        return named.active_name(model)
    setup = model._active.plan.setup
    owners = copies.owners_of(setup)
    if len({o if o in model._adapter_state.copies else None for o in owners}) > 1:
        raise StateError(
            f"{setup!r} is active, and its rows use different heads, so the head is "
            f"ambiguous. Write set_active_adapters('a') first."
        )
    return next(iter(owners), None) if len(owners) == 1 else None


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
    return _of_static(model, name, alone)


def of_named(model: Any, name: str, alone: bool = False, short: bool = False) -> HeadRecord:
    """Return a named head as a checkpoint holds it; arguments as of `record_of`."""
    head = named.find(model, name)
    config, table = head.config, copies.table_of(model, name) if alone else None
    if table is not None and named.is_on(head, table):
        config = config.replace(tie_word_embeddings=False)
    tensors = named.own_tensors(model, head, table)
    document: dict[str, Any] = {"config": config.to_dict()}
    if isinstance(config, StaticConfig):
        document[MODEL_CONFIG] = saved_fields(model.config, config)
    record = HeadRecord(document, tensors)
    return without_output(head, record) if short else record


def _of_static(model: Any, name: str | None, alone: bool) -> HeadRecord | None:
    tensors, layer = copies.tensors_of(model, name), model.get_output_embeddings()
    rest = {key: t for key, t in head_tensors(model).items() if key not in tensors}
    weight = None if layer is None else cast("Tensor", layer.weight)
    large = {key: tensor for key, tensor in rest.items() if tensor is weight}
    if not tensors and not alone and (large or layer is None):
        return None
    if not (tensors or rest or layer is not None):
        return None
    config = model.config
    document: dict[str, Any] = {
        STATIC: class_name(model),
        "label2id": getattr(config, "label2id", None),
        MODEL_CONFIG: config_fields(config),
    }
    if copies.output_path(model) in copies.layers_with(model, name):
        document[OWN_OUTPUT] = True
    if large and not alone:
        (key,) = large
        document |= {FIELD: digest(large[key]), OUTPUT_KEY: key}
        rest.pop(key)
    return HeadRecord(document, {**tensors, **rest})


def completed(
    model: Any, name: str, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the tensors of a file, with the output layer that a short record left out.

    Raises:
        CheckpointError: the head has another config.
    """
    if not model._has_named_heads:
        return tensors
    saved = named.config_from(model, document["config"])
    head = named.find(model, name)
    fit.check_same(f"head {name!r}", saved, head.config)
    return with_output(head, model.heads.values(), document, tensors)


def all_tensors(model: Any) -> dict[str, Tensor]:
    """Return the own tensors of all heads, named for messages."""
    found = {
        f"head {name}: {key}": tensor
        for name, head in heads_of(model).items()
        for key, tensor in named.own_tensors(model, head).items()
    }
    for owner in model._adapter_state.copies:
        tensors = copies.tensors_of(model, owner)
        found |= {f"head of {owner}: {key}": tensor for key, tensor in tensors.items()}
    return found


# --- output layers from the base model's checkpoint ---


FIELD = "output"


# of a task class: the key of its weight there
OUTPUT_KEY = "output_key"


def without_output(head: PredictionHead, record: HeadRecord) -> HeadRecord:
    """Return a head's record without its output layer, if that is unchanged from the checkpoint.

    Args:
        head: of any type.
        record: with all its tensors.
    """
    key, layer = head.output_key, head.output_embeddings
    if key is None or layer is None or not head.of_checkpoint:
        return record
    weight = layer.weight
    plain = type(weight) is nn.Parameter and not weight.is_meta
    if weight.requires_grad or not plain or key not in record.tensors:
        return record
    kept = {k: tensor for k, tensor in record.tensors.items() if k != key}
    return HeadRecord({**record.document, FIELD: digest(weight)}, kept)


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
        "the file leaves out the head's output layer, which is that of the checkpoint "
        "that its base model came from, and no head of this model has it. Write "
        f"{in_python('AutoAdapterModel.from_pretrained(…) with the checkpoint of its head, or ')}"
        f"{argument('with_head', False, 'load_adapter')}."
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
