"""The low-rank update in torch operations, with the signatures of `low_rank_triton`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import _dropout


def shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None) -> Tensor:
    """Project down: t = dropout(x) aᵀ; `noise` as `_dropout.bits` drew it.

    `x` `[*batch, d_in]`, `a` `[rank, d_in]` → `[*batch, rank]` in the dtype of `a`.
    """
    if noise is None:
        return linear(x.to(a.dtype), a)
    kept = _dropout.mask(noise, x.shape, p).to(a.dtype).mul_(x)  # [*batch, d_in]
    return linear(kept, a).mul_(_dropout.kept_scale(p))


def shrink_backward(
    dt: Tensor,
    x: Tensor,
    a: Tensor,
    p: float,
    noise: Tensor | None,
    needs_x: bool = True,
    needs_a: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in its dtype, and of a; empty if not needed.

    Differentiable again. Without `needs_a`, `x` may be empty: only its dtype is read.
    """
    dx, da, mask = x.new_empty(0), a.new_empty(0), None
    if noise is not None:
        dt = dt * _dropout.kept_scale(p)  # [*batch, rank]
        mask = _dropout.mask(noise, (*dt.shape[:-1], a.shape[-1]), p).to(a.dtype)
    if needs_x:
        dx = dt @ a  # [*batch, d_in]
        dx = (dx if mask is None else dx * mask).to(x.dtype)
    if needs_a:
        kept = x if mask is None else mask * x
        da = rows_of(dt).T @ rows_of(kept.to(a.dtype))  # [rank, d_in]
    return dx, da


def expand(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Add the update: y + scaling · t bᵀ.

    `y` `[*batch, d_out]`, `t` `[*batch, rank]`, `b` `[d_out, rank]` → shape and dtype of `y`.
    """
    # do not round y to the dtype of the products: float16 and bfloat16 each lose the other's bits
    dtype = torch.promote_types(y.dtype, t.dtype)
    update = linear(t.to(dtype), b.to(dtype))  # [*batch, d_out]
    return torch.add(y, update, alpha=scaling).to(y.dtype)


def expand_backward(
    dy: Tensor, t: Tensor, b: Tensor, scaling: float, needs_t: bool = True, needs_b: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of t and b; empty if not needed.

    Differentiable again. Without `needs_b`, `t` may be empty: only its dtype is read.
    """
    dy = dy.to(t.dtype)
    dt, db = t.new_empty(0), b.new_empty(0)
    if needs_t:
        dt = dy @ (scaling * b.to(t.dtype))  # [*batch, rank]
    if needs_b:
        db = (rows_of(dy).T @ rows_of(t) * scaling).to(b.dtype)  # [d_out, rank]
    return dt, db


def rows_of(x: Tensor) -> Tensor:
    """Return `x` `[*batch, width]` as `[rows, width]`."""
    return x.reshape(-1, x.shape[-1])
