"""Output layers of language models: tied to the embeddings in the model, but stored in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def shared_or_own(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], tied: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a file's head, tied to the embeddings or with its own output layer.

    Args:
        config: of the head.
        tensors: of the file.
        tied: tensors that a head of this config shares with the base model.

    Returns:
        The config, with `tie_word_embeddings=False` where the file has other values than the base
        model, and the tensors that are the head's own.
    """
    own = {
        key: tensor
        for key, tensor in tensors.items()
        if key not in tied or not is_same(tensor, tied[key])
    }
    if own.keys() & tied.keys():
        return {**config, "tie_word_embeddings": False}, own
    return dict(config), own


def is_same(theirs: Tensor, mine: Tensor) -> bool:
    """Return whether two tensors have the same values in the dtype of the model."""
    own = mine.detach().cpu()
    return theirs.shape == own.shape and bool((theirs.to(own.dtype) == own).all())
