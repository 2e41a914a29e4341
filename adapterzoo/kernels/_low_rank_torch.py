"""The low-rank update in torch operations, with the signatures of `low_rank_triton`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import _dropout
from ._ops import differentiated
from ._skinny import outer, project
from .mode import is_batched

# up to so many elements, two small operations cost less than one with the views that it needs
SMALL = 1 << 14


def shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None) -> Tensor:
    """Project down: t = dropout(x) aᵀ; `noise` as `_dropout.bits` drew it.

    `x` `[*batch, d_in]`, `a` `[rank, d_in]` → `[*batch, rank]` in the dtype of `a`.
    """
    if noise is None:
        kept = x.to(a.dtype)  # [*batch, d_in]
        return linear(kept, a) if is_small(x) else batched(project(rows_of(kept), a), x)
    rows = rows_of(x)  # [rows, d_in]
    masks = _dropout.slices(noise, x.shape, p, a.dtype)
    t = torch.cat([project(mask.mul_(rows[own]), a) for own, mask in masks])  # [rows, rank]
    return batched(t.mul_(_dropout.kept_scale(p)), x)  # [*batch, rank]


def shrink_backward(
    dt: Tensor,
    x: Tensor,
    a: Tensor,
    p: float,
    noise: Tensor | None,
    needs_x: bool = True,
    needs_a: bool = True,
    onto: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in its dtype, and of a; empty if not needed.

    Differentiable again. Without `needs_a`, `x` may be empty: only its dtype is read. With `onto`,
    the gradient of x is added to it, in place unless gradients are needed.
    """
    if noise is not None:
        dt = dt * _dropout.kept_scale(p)  # [*batch, rank]
        if not (torch.is_grad_enabled() or is_batched(dt)):
            return _dropped_backward(dt, x, a, p, noise, onto, needs_x, needs_a)
    dx, da = x.new_empty(0), a.new_empty(0)
    shape, flat = (*dt.shape[:-1], a.shape[-1]), rows_of(dt)
    mask = None if noise is None else _dropout.mask(noise, shape, p).to(a.dtype)
    if onto is not None and mask is None and not torch.is_grad_enabled():
        dx = onto.contiguous()
        if dx.dtype is a.dtype:
            rows_of(dx).addmm_(flat, a)  # [rows, d_in]
        else:
            dx.add_((flat @ a).view(shape))
    elif needs_x:
        dx = (flat @ a).view(shape)  # [*batch, d_in]
        dx = (dx if mask is None else dx * mask).to(x.dtype)
        dx = dx if onto is None else onto + dx
    if needs_a:
        kept = x if mask is None else mask * x
        da = flat.T @ rows_of(kept.to(a.dtype))  # [rank, d_in]
    return dx, da


def _dropped_backward(
    dt: Tensor, x: Tensor, a: Tensor, p: float, noise: Tensor, onto: Tensor | None, *needs: bool
) -> tuple[Tensor, Tensor]:
    """Return `shrink_backward` with dropout, without gradients; `dt` is scaled for dropout."""
    needs_x, needs_a = needs
    shape, flat = (*dt.shape[:-1], a.shape[-1]), rows_of(dt)
    dx = x.new_empty(shape if needs_x else 0) if onto is None else onto.contiguous()
    da = a.new_zeros(a.shape if needs_a else 0)
    rows = rows_of(x) if needs_a else x
    for own, mask in _dropout.slices(noise, shape, p, a.dtype):
        if onto is not None:
            rows_of(dx)[own].addcmul_(flat[own] @ a, mask)
        elif needs_x:
            rows_of(dx)[own] = (flat[own] @ a).mul_(mask)
        if needs_a:
            da.addmm_(flat[own].T, mask.mul_(rows[own]))
    return dx, da


def expand(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Add the update: y + scaling · t bᵀ.

    `y` `[*batch, d_out]`, `t` `[*batch, rank]`, `b` `[d_out, rank]` → shape and dtype of `y`.
    """
    if is_small(y) and y.dtype is t.dtype is b.dtype:
        return torch.add(y, linear(t, b), alpha=scaling)
    # do not round y to the dtype of the products: float16 and bfloat16 each lose the other's bits
    dtype = y.dtype if y.dtype is t.dtype else torch.promote_types(y.dtype, t.dtype)
    # not a view, because a model may change its layer's output in place
    out = y.to(dtype, copy=True, memory_format=torch.contiguous_format)
    rows_of(out).addmm_(rows_of(t).to(dtype), b.T.to(dtype), alpha=scaling)  # [rows, d_out]
    return out.to(y.dtype)


def expand_backward(
    dy: Tensor, t: Tensor, b: Tensor, scaling: float, needs_t: bool = True, needs_b: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of t and b; empty if not needed.

    Differentiable again. Without `needs_b`, `t` may be empty: only its dtype is read.
    """
    flat = rows_of(dy.to(t.dtype))  # [rows, d_out]
    dt, db = t.new_empty(0), b.new_empty(0)
    if needs_t:
        dt = batched(project(flat, scaling * b.T.to(t.dtype)), dy)  # [*batch, rank]
    if needs_b:
        db = (outer(flat, rows_of(t)) * scaling).to(b.dtype)  # [d_out, rank]
    return dt, db


# `expand` that keeps t, for operands of one dtype
Expand = differentiated(expand, expand_backward, added=True)


def added(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    """`expand`, differentiable, for operands of one dtype."""
    # for few small operations, autograd keeps as little and costs less
    if is_small(y) or not torch.is_grad_enabled():
        return expand(y, t, b, scaling)
    out: Tensor = Expand.apply(y, t, b, scaling)
    return out


def is_small(x: Tensor) -> bool:
    """Return whether to use fewer rather than faster operations, as compilers need."""
    return x.numel() <= SMALL or torch.compiler.is_compiling()


def rows_of(x: Tensor) -> Tensor:
    """Return `x` `[*batch, width]` as `[rows, width]`."""
    return x.reshape(-1, x.shape[-1])


def batched(rows: Tensor, like: Tensor) -> Tensor:
    """Return `rows` `[rows, width]` as `[*batch, width]`, with the batch of `like`."""
    return rows.view(*like.shape[:-1], rows.shape[1])
