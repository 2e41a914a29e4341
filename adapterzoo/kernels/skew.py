"""Skew-symmetric matrices from their upper triangles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import mode


def skew_reference(vectors: Tensor, b: int) -> Tensor:
    """Return the skew-symmetric matrices with these upper triangles, row by row.

    Args:
        vectors: `[*lead, b (b − 1) / 2]`.
        b: rows and columns of each matrix.

    Returns:
        `[*lead, b, b]`.
    """
    flat = vectors.new_zeros(*vectors.shape[:-1], b * b).index_copy(
        -1, _places(b, vectors.device), vectors
    )
    upper: Tensor = flat.unflatten(-1, (b, b))  # [*lead, b, b]
    return upper - upper.mT


def skew(vectors: Tensor, b: int) -> Tensor:
    """Return `skew_reference`; keeps nothing for the backward.

    Args:
        vectors: `[*lead, b (b − 1) / 2]`.
        b: rows and columns of each matrix.

    Returns:
        `[*lead, b, b]`.
    """
    if mode.is_reference() or torch.compiler.is_compiling():
        return skew_reference(vectors, b)
    S: Tensor = _Skew.apply(vectors, b)
    return S


def _places(b: int, device: torch.device) -> Tensor:
    """Return where the upper triangle is in a matrix of b · b numbers, row by row."""
    row, column = torch.triu_indices(b, b, 1, device=device)
    places: Tensor = row * b + column
    return places


class _Skew(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, b: int) -> Any:
        return skew_reference(vectors, b)

    @staticmethod
    def backward(ctx: Any, dS: Tensor) -> Any:
        both = (dS - dS.mT).flatten(-2)  # [*lead, b · b]
        return both.index_select(-1, _places(dS.shape[-1], dS.device)), None
