"""The product of rotated features with a frozen weight, as one node of autograd's graph.

y = gain ∘ (x · Rot) Wᵀ + bias is x W'ᵀ + bias with W' = gain ∘ (W · Rotᵀ), which costs less than a
pass over x and one over y if x has many rows. The gradient of x is dx = dy W'. As Rot is
orthogonal, that of x · Rot is dx · Rot, and the blocks get (xᵀ dx) · Rot: no features are rotated.

Saves x and, for the gradient of the gain, the output; see `compose`. W' is formed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import _butterfly_torch, _compose_torch, mode
from ._low_rank_torch import rows_of
from ._ops import below
from .compose import saved_by, tells

# what a pass over values costs, where a rotation of as many costs 1
_PASS = 1 / 4


def product(x: Tensor, w: Tensor, bias: Tensor | None, blocks: Tensor, gain: Tensor) -> Tensor:
    """Return `gain · linear(x · Rot, w) + bias`.

    Only for operands with `frozen.takes` and `takes`.

    Args:
        x: `[*batch, d_in]`.
        w: `[d_out, d_in]`.
        bias: `[d_out]`; None: there is none.
        blocks: orthogonal rotations of the chunks, `[chunks, width, width]`; the gradient relies on
            that.
        gain: `[d_out]`.

    Returns:
        `[*batch, d_out]`, in the dtype of `x`.
    """
    if not torch.is_grad_enabled():
        return _product(x, w, bias, blocks, gain)
    y: Tensor = _Product.apply(x, w, bias, blocks, gain)
    return y


def takes(x: Tensor, w: Tensor, Q: Tensor) -> bool:
    """Return whether `product` computes with these on a CPU, and costs less than a rotation of x.

    Half precision would round the changes of a weight away, and a linear layer rounds differently
    for a weight with other strides.

    Args:
        x: `[*batch, d_in]`.
        w: `[d_out, d_in]`.
        Q: `[m, chunks, width, width]`, from `butterfly.folded`.
    """
    if not x.is_cpu or Q.dim() != 4 or Q.shape[0] > 1 or not (Q.dtype is w.dtype is x.dtype):
        return False
    d_out, d_in = w.shape
    saves = w.numel() <= x.numel() // d_in * (d_in + _PASS * d_out)
    return saves and w.is_contiguous() and mode.is_plain(x)


def _product(x: Tensor, w: Tensor, bias: Tensor | None, blocks: Tensor, gain: Tensor) -> Tensor:
    return linear(x, _changed(w, blocks, gain), bias)


def _changed(w: Tensor, blocks: Tensor, gain: Tensor) -> Tensor:
    """Return W' `[d_out, d_in]`."""
    return _butterfly_torch.rotate_into(w, blocks.mT).mul_(gain.unsqueeze(-1))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        out = below(_product, *args)
        kept = out if ctx.needs_input_grad[4] else out.new_empty(0)
        ctx.save_for_backward(*args, kept)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w, bias, blocks, gain, kept = saved_by(ctx, "rotated_weight")
        needs_x, _, _, needs_blocks, needs_gain = ctx.needs_input_grad
        dx = dblocks = dgain = None
        if needs_x or needs_blocks:
            # a second derivative must not assume that Rot is orthogonal
            if torch.is_grad_enabled():
                of_rotated = rows_of(dy) @ (gain.unsqueeze(-1) * w)  # [rows, d_in]
                dx, dblocks = _butterfly_torch.rotate_backward(of_rotated, rows_of(x), blocks)
            else:
                dx = rows_of(dy) @ _changed(w, blocks, gain)  # [rows, d_in]
                dblocks = _butterfly_torch.dots(x, dx, blocks) @ blocks if needs_blocks else None
        if needs_gain:
            told = tells(gain, kept.dtype, bias is not None)
            if not told:
                kept, bias = linear(_butterfly_torch.rotate(x, blocks), w), None
            dgain = _compose_torch.gain_backward(dy, kept, gain, bias, told)
        dx = dx.view(x.shape) if needs_x and dx is not None else None
        return dx, None, None, dblocks if needs_blocks else None, dgain
