"""The product with a frozen weight and its low-rank update, as one node of autograd's graph.

y = x Wᵀ + bias + s · t Bᵀ. The layer's own product is made here, so that nothing else holds its
output, and the update is added to it in place. Likewise the gradient of x is new memory, to which
`low_rank.fork` adds that of t = x Aᵀ. Saves t, besides the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import _low_rank_torch, low_rank, mode
from ._ops import below


def product(
    x: Tensor, w: Tensor, bias: Tensor | None, t: Tensor, b: Tensor, scaling: float
) -> Tensor:
    """Return `expand(linear(x, w, bias), t, b, scaling)`, with the same bits.

    Only for operands with `takes`.

    Args:
        x: `[*batch, d_in]`, from `low_rank.fork`.
        w: `[d_out, d_in]`.
        bias: `[d_out]`; None: there is none.
        t: `[*batch, rank]`, from `low_rank.fork`.
        b: `[d_out, rank]`.
        scaling: the factor s.

    Returns:
        `[*batch, d_out]`, in the dtype of `x`.
    """
    if not torch.is_grad_enabled():
        return _expanded(x, w, bias, t, b, scaling)
    y: Tensor = _Product.apply(x, w, bias, t, b, scaling)
    return y


def takes(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Return whether `product` computes what a linear layer with these parameters does.

    The parameters are of the dtype of `x`, and need no gradients in this call; `x` runs eagerly and
    without autocast.
    """
    given = (w,) if bias is None else (w, bias)
    plain = all(type(p) in mode.ORIGINAL and p.dtype is x.dtype for p in given)
    # evaluation has the same bits whether or not the base model is frozen
    if torch.is_grad_enabled():
        plain = plain and not any(p.requires_grad for p in given)
    return plain and type(x) is Tensor and mode.is_eager(x)


def _expanded(
    x: Tensor, w: Tensor, bias: Tensor | None, t: Tensor, b: Tensor, scaling: float
) -> Tensor:
    y = linear(x, w, bias).contiguous()  # [*batch, d_out]
    fits = y.dtype is t.dtype is b.dtype and not _low_rank_torch.is_small(y)
    if fits and not mode.may_take_triton(y):
        _low_rank_torch.rows_of(y).addmm_(_low_rank_torch.rows_of(t), b.T, alpha=scaling)
        return y
    return low_rank.expand(y, t, b, scaling)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        _, w, _, t, b, ctx.scaling = args
        # without a gradient of b, only the dtype of t is needed
        ctx.save_for_backward(w, t if ctx.needs_input_grad[4] else t.new_empty(0), b)
        return below(_expanded, *args)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        w, t, b = ctx.saved_tensors
        needs_x, _, _, *needs = ctx.needs_input_grad[:5]
        dt, db = low_rank.expand_backward(dy, t, b, ctx.scaling, *needs)
        dx = None
        if needs_x:
            rows = _low_rank_torch.rows_of(dy) @ w  # [rows, d_in]
            dx = rows.view(*dy.shape[:-1], w.shape[1])  # [*batch, d_in]
        return dx, None, None, dt if needs[0] else None, db if needs[1] else None, None
