"""Rotation of features by chunks in torch operations, with the signatures of `butterfly_triton`."""

from __future__ import annotations

from torch import Tensor, bmm


def rotate(x: Tensor, blocks: Tensor) -> Tensor:
    """Return the product x · blockdiag(blocks).

    `x` `[*experts, *batch, d_in]`, `blocks` `[*experts, chunks, width, width]` → shape and dtype
    of `x`; under autocast its dtype.
    """
    if blocks.dim() == 3:
        # rows of one chunk beside each other: [chunks, rows, width]
        parts = x.reshape(-1, *blocks.shape[:2]).transpose(0, 1)
        return bmm(parts, blocks.to(x.dtype)).transpose(0, 1).reshape(x.shape)  # [*batch, d_in]
    rotated = _parts(x, blocks) @ blocks.to(x.dtype)  # [*experts, chunks, rows, width]
    return rotated.transpose(-3, -2).reshape(x.shape)  # [*experts, *batch, d_in]


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
        whole = _parts(x, blocks).mT @ _parts(dy, blocks)  # [*experts, chunks, width, width]
        dblocks = whole.to(blocks.dtype)
    return dx, dblocks


def _parts(x: Tensor, blocks: Tensor) -> Tensor:
    """Return `x` `[*experts, *batch, d_in]` as `[*experts, chunks, rows, width]`."""
    *experts, chunks, width, _ = blocks.shape
    # [*experts, rows, chunks, width] before the transposition
    return x.reshape(*experts, -1, chunks, width).transpose(-3, -2)
