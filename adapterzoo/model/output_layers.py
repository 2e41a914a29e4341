"""Output layers that a checkpoint of transformers brought, which a file need not hold again.

The matrix onto the vocabulary is frozen unless the embeddings are trained, and may be larger than
all adapters of a model. A file names its digest, and loading takes it from the model's own head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo.checkpoint.digest import digest
from adapterzoo.errors import CheckpointError
from adapterzoo.heads import LMHead

from .records import HeadRecord

FIELD = "output"


def without_output(head: object, record: HeadRecord) -> HeadRecord:
    """The record of a head without its output layer, where that is the checkpoint's own.

    Args:
        head: of any type.
        record: with all its tensors.
    """
    if not isinstance(head, LMHead) or not head.of_checkpoint:
        return record
    key, weight = _key(head), head.output_embeddings.weight
    plain = type(weight) is nn.Parameter and not weight.is_meta
    if weight.requires_grad or not plain or key not in record.tensors:
        return record
    kept = {k: tensor for k, tensor in record.tensors.items() if k != key}
    return HeadRecord({**record.document, FIELD: digest(weight)}, kept)


def with_output(
    call: str,
    head: object,
    heads: Iterable[object],
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The tensors of a head with the output layer that its file leaves out.

    Args:
        call: what the user wrote, for messages.
        head: that gets the tensors.
        heads: of the model.
        document: of the head in the file.
        tensors: in the file.
        dtype: into which the user lets values be converted.

    Raises:
        CheckpointError: no head of the model has that layer.
    """
    named = document.get(FIELD)
    if named is None or not isinstance(head, LMHead):
        return dict(tensors)
    for other in heads:
        if not isinstance(other, LMHead) or not other.of_checkpoint:
            continue
        weight = other.output_embeddings.weight
        # rounded values have another digest, and the user asks for them
        if dtype is not None or digest(weight) == named:
            return {**tensors, _key(head): weight.detach()}
    raise CheckpointError(
        f"{call}: the file leaves out the head's output layer, which is that of the checkpoint "
        f"that its base model came from, and no head of this model has it. Load the checkpoint "
        f"with its head: AutoAdapterModel.from_pretrained(…). Or write with_head=False."
    )


def start_with(head: object, heads: Iterable[object]) -> None:
    """Give a fresh head the output layer that the model's checkpoint brought, if there is one.

    Args:
        head: of any type, not tied.
        heads: of the model.
    """
    if not isinstance(head, LMHead):
        return
    mine = head.output_embeddings.weight
    for other in heads:
        if isinstance(other, LMHead) and other.of_checkpoint and other is not head:
            theirs = other.output_embeddings.weight
            if theirs.shape == mine.shape and not mine.is_meta:
                with torch.no_grad():
                    mine.copy_(theirs)
                head.of_checkpoint = theirs.dtype is mine.dtype
                return


def _key(head: LMHead) -> str:
    return f"{next(reversed(head._modules))}.weight"
