"""Output layers from the base model's checkpoint, which an adapter's file does not repeat.

The matrix onto the vocabulary is frozen unless the embeddings are trained, and may be larger than
all adapters of a model. A file names its digest, and loading takes it from the model's own head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo.errors import CheckpointError, argument, in_python
from adapterzoo.formats.fit import digest
from adapterzoo.heads import PredictionHead

from .interface import HeadRecord

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
