"""The low-rank update in torch operations, with the signatures of `low_rank_triton`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import _dropout

# up to here two small operations cost less than the views that make them one
SMALL = 1 << 14


def shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None) -> Tensor:
    """Project down: t = dropout(x) aᵀ; `noise` as `_dropout.bits` drew it.

    `x` `[*batch, d_in]`, `a` `[rank, d_in]` → `[*batch, rank]` in the dtype of `a`.
    """
    if noise is None:
        return linear(x.to(a.dtype), a)
    kept = _dropout.mask(noise, x.shape).to(a.dtype).mul_(x)  # [*batch, d_in]
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
    """The gradients of x, in its dtype, and of a; empty where not needed.

    Differentiable in its turn. Without `needs_a`, `x` may be empty: only its dtype is looked at.
    """
    dx, da = x.new_empty(0), a.new_empty(0)
    kept = x
    if noise is not None:
        dt = dt * _dropout.kept_scale(p)  # [*batch, rank]
        kept = _dropout.mask(noise, (*dt.shape[:-1], a.shape[-1])).to(a.dtype)
    if needs_x:
        dx = dt @ a  # [*batch, d_in]
        dx = (dx if noise is None else dx.mul_(kept)).to(x.dtype)
    if needs_a:
        if noise is not None:
            # a large temporary less, unless its gradient is asked for
            kept = kept * x if torch.is_grad_enabled() else kept.mul_(x)
        da = _flat(dt).T @ _flat(kept.to(a.dtype))  # [rank, d_in]
    return dx, da


def expand(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Add the update: y + scaling · t bᵀ.

    `y` `[*batch, d_out]`, `t` `[*batch, rank]`, `b` `[d_out, rank]` → shape and dtype of `y`.
    """
    b = b.to(t.dtype)
    # a compiler makes one operation of the two by itself
    small = torch.compiler.is_compiling() or y.numel() <= SMALL
    if small and y.dtype is t.dtype and y.is_contiguous():
        return torch.add(y, linear(t, b), alpha=scaling)
    # bᵀ in rows: the products of a backward by autograd are twice as fast on the CPU
    rows = b.T.contiguous()  # [rank, d_out]
    out = torch.addmm(_flat(y).to(t.dtype), _flat(t), rows, alpha=scaling)  # [rows, d_out]
    return out.view(y.shape).to(y.dtype)


def expand_backward(
    dy: Tensor,
    t: Tensor,
    b: Tensor,
    scaling: float,
    needs_t: bool = True,
    needs_b: bool = True,
) -> tuple[Tensor, Tensor]:
    """The gradients of t and b; empty where not needed.

    Differentiable in its turn. Without `needs_b`, `t` may be empty: only its dtype is looked at.
    """
    dy = dy.to(t.dtype)
    dt, db = t.new_empty(0), b.new_empty(0)
    if needs_t:
        # with bᵀ in rows, and tᵀ dy and not dyᵀ t: 2 and 5 times as fast on the CPU
        dt = linear(dy, b.T.to(t.dtype).contiguous()) * scaling  # [*batch, rank]
    if needs_b:
        db = ((_flat(t) * scaling).T @ _flat(dy)).T.to(b.dtype).contiguous()  # [d_out, rank]
    return dt, db


def _flat(x: Tensor) -> Tensor:
    """`[*batch, width]` as `[rows, width]`."""
    return x.reshape(-1, x.shape[-1])
