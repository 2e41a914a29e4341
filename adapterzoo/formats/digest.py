"""Digests of tensors: equal for equal bits, on any device and in any memory layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def digest(tensor: Tensor) -> str:
    """Return a digest of dtype, shape and exact bits; the device and the strides do not matter.

    Returns:
        32 hexadecimal digits.
    """
    hashed = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    hashed.update(_bytes(tensor).numpy().data)
    return hashed.hexdigest()[:32]


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether dtype, shape and bits are equal."""
    alike = tensor.dtype is other.dtype and tensor.shape == other.shape
    return alike and torch.equal(_bytes(tensor), _bytes(other))


def same_values(theirs: Tensor, mine: Tensor) -> bool:
    """Return whether a file's tensor has the values of a model's tensor, in the model's dtype."""
    own = mine.detach().cpu()
    return theirs.shape == own.shape and bool((theirs.to(own.dtype) == own).all())


def _bytes(tensor: Tensor) -> Tensor:
    # −0 and NaN have bits too: bytes are compared, not numbers
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor."""
    return {key: digest(tensor) for key, tensor in sorted(tensors.items())}


def fingerprint(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return one digest for a config of JSON types and all tensors; 64 hexadecimal digits."""
    document = json.dumps([dict(config), digests(tensors)], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()
