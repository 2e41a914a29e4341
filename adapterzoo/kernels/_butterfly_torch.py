"""Rotation of features by chunks in torch operations, with the signatures of `butterfly_triton`."""

from __future__ import annotations

import torch
from torch import Tensor

from .mode import is_batched


def rotate(x: Tensor, blocks: Tensor) -> Tensor:
    """Return the product x · blockdiag(blocks).

    `x` `[*experts, *batch, d_in]`, `blocks` `[*experts, chunks, width, width]` → shape and dtype
    of `x`; under autocast its dtype.
    """
    rotated = _parts(x, blocks) @ blocks.to(x.dtype)  # [*experts, chunks, rows, width]
    return rotated.transpose(-3, -2).reshape(x.shape)  # [*experts, *batch, d_in]


def rotate_into(x: Tensor, blocks: Tensor) -> Tensor:
    """Return `rotate` without experts, written in place of a copy; autograd cannot record it.

    `blocks` are of the dtype of `x`.
    """
    chunks, width, _ = blocks.shape
    rows = x.reshape(-1, chunks, width)
    y = x.new_empty(rows.shape)
    torch.bmm(rows.transpose(0, 1), blocks, out=y.transpose(0, 1))
    return y.view(x.shape)  # [*batch, d_in]


def rotate_into_backward(
    dy: Tensor, x: Tensor, blocks: Tensor, needs_x: bool, needs_blocks: bool
) -> tuple[Tensor, Tensor]:
    """Return `rotate_backward` of `rotate_into`."""
    if torch.is_grad_enabled() or is_batched(dy):
        return rotate_backward(dy, x, blocks, needs_x, needs_blocks)
    dx = rotate_into(dy, blocks.mT) if needs_x else dy
    return dx, rotate_backward(dy, x, blocks, False, needs_blocks)[1]


def rotate_backward(
    dy: Tensor, x: Tensor, blocks: Tensor, needs_x: bool = True, needs_blocks: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of blocks; empty if not needed.

    Differentiable again. Without `needs_blocks`, `x` may be empty: only its dtype is read.
    """
    dx, dblocks = x.new_empty(0), blocks.new_empty(0)
    if needs_x:
        dx = rotate(dy, blocks.mT).to(x.dtype).contiguous()
    if needs_blocks:
        dblocks = dots(x, dy, blocks).to(blocks.dtype)
    return dx, dblocks


def dots(x: Tensor, y: Tensor, blocks: Tensor) -> Tensor:
    """Return xᵀ y of each chunk, in the shape of `blocks`.

    `x` and `y` `[*experts, *batch, d_in]`, `blocks` `[*experts, chunks, width, width]`.
    """
    return _parts(x, blocks).mT @ _parts(y, blocks)


def _parts(x: Tensor, blocks: Tensor) -> Tensor:
    """Return `x` `[*experts, *batch, d_in]` as `[*experts, chunks, rows, width]`."""
    *experts, chunks, width, _ = blocks.shape
    # [*experts, rows, chunks, width] before the transposition
    return x.reshape(*experts, -1, chunks, width).transpose(-3, -2)
