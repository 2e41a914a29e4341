"""The grouped low-rank update in torch operations, with the signatures of `grouped_triton`.

Each row of the batch that has an adapter is multiplied by the factor of its adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from . import _dropout
from ._groups import Groups


def shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None, groups: Groups) -> Tensor:
    """Project down: t = dropout(x) aᵀ; `noise` as `_dropout.bits` drew it.

    `x` `[batch, *tokens, d_in]`, `a` `[n, rank, d_in]` → `[batch, *tokens, rank]` in the dtype
    of `a`; zero for a row without an adapter.
    """
    if noise is not None:
        x = _dropout.mask(noise, x.shape, p).to(a.dtype).mul_(x)  # [batch, *tokens, d_in]
        x = x.mul_(_dropout.kept_scale(p))
    own = _own(x.to(a.dtype), groups) @ _factors(a, groups).mT  # [rows, tokens, rank]
    return _placed(own, x.shape, groups)


def shrink_backward(
    dt: Tensor, x: Tensor, a: Tensor, p: float, noise: Tensor | None, groups: Groups, *needs: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in its dtype, and of a; empty if not needed.

    Differentiable again. Without `needs_a`, `x` may be empty: only its dtype is read.
    """
    needs_x, needs_a = needs or (True,) * 2
    dx, da, kept = x.new_empty(0), a.new_empty(0), None
    if noise is not None:
        dt = dt * _dropout.kept_scale(p)  # [batch, *tokens, rank]
        kept = _dropout.mask(noise, (*dt.shape[:-1], a.shape[-1]), p).to(a.dtype)
    own = _own(dt, groups)  # [rows, tokens, rank]
    if needs_x:
        dx = _placed(own @ _factors(a, groups), dt.shape, groups)  # [batch, *tokens, d_in]
        dx = (dx if kept is None else dx * kept).to(x.dtype)
    if needs_a:
        x = x.to(a.dtype) if kept is None else kept * x
        da = _summed(own.mT @ _own(x, groups), a, groups)  # [n, rank, d_in]
    return dx, da


def expand(
    y: Tensor, t: Tensor, b: Tensor, scaling: Sequence[float] | Tensor, groups: Groups
) -> Tensor:
    """Add the update: y + scaling · t bᵀ.

    `y` `[batch, *tokens, d_out]`, `t` `[batch, *tokens, rank]`, `b` `[n, d_out, rank]` → shape and
    dtype of `y`; a row without an adapter keeps its bits.
    """
    update = _scaled(t, scaling, groups) @ _factors(b, groups).to(t.dtype).mT
    # rounded once, to the dtype of y
    rows = (_own(y, groups) + update).to(y.dtype)  # [rows, tokens, d_out]
    if not groups.base:
        return rows.view(y.shape)
    places = groups.numbers("rows", y.device)
    return y.index_copy(0, places, rows.view(len(rows), *y.shape[1:]))


def expand_backward(
    dy: Tensor,
    t: Tensor,
    b: Tensor,
    scaling: Sequence[float] | Tensor,
    groups: Groups,
    *needs: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of t and b; empty if not needed.

    Differentiable again. Without `needs_b`, `t` may be empty: only its dtype is read.
    """
    needs_t, needs_b = needs or (True,) * 2
    dt, db = t.new_empty(0), b.new_empty(0)
    own = _own(dy.to(t.dtype), groups)  # [rows, tokens, d_out]
    if needs_t:
        made = own @ _factors(b, groups).to(t.dtype)  # [rows, tokens, rank]
        dt = _placed(made * _scales(scaling, made, groups), dy.shape, groups)
    if needs_b:
        db = _summed(own.mT @ _scaled(t, scaling, groups), b, groups)  # [n, d_out, rank]
    return dt, db


def _own(t: Tensor, groups: Groups) -> Tensor:
    """Return the rows with an adapter, `[rows, tokens, width]`, of `[batch, *tokens, width]`."""
    t = t.reshape(len(groups.index), math.prod(t.shape[1:-1]), t.shape[-1])
    return t.index_select(0, groups.numbers("rows", t.device)) if groups.base else t


def _placed(own: Tensor, shape: tuple[int, ...], groups: Groups) -> Tensor:
    """Return the inverse of `_own`, `[batch, *tokens, width]`: zeros in rows without an adapter."""
    shape = *shape[:-1], own.shape[-1]
    if not groups.base:
        return own.view(shape)
    whole = own.new_zeros(shape[0], *own.shape[1:])
    return whole.index_copy(0, groups.numbers("rows", own.device), own).view(shape)


def _factors(factors: Tensor, groups: Groups) -> Tensor:
    """Return the factor of each row with an adapter, `[rows, …]`, of `[n, …]`."""
    return factors.index_select(0, groups.numbers("of_rows", factors.device))


def _summed(own: Tensor, like: Tensor, groups: Groups) -> Tensor:
    """Return the sum over each adapter's rows `[n, …]`, of `[rows, …]`; zero if it has none."""
    numbers = groups.numbers("of_rows", own.device)
    return own.new_zeros(like.shape).index_add(0, numbers, own).to(like.dtype)


def _scales(scaling: Sequence[float] | Tensor, like: Tensor, groups: Groups) -> Tensor:
    """Return the factor s of each row with an adapter, `[rows, 1, 1]`."""
    each = tuple(scaling.tolist() if isinstance(scaling, Tensor) else scaling)
    scales = groups.row_scales(each, like.device, like.dtype)  # [batch]
    return _own(scales.view(-1, 1, 1), groups)


def _scaled(t: Tensor, scaling: Sequence[float] | Tensor, groups: Groups) -> Tensor:
    """Return s · t of each row with an adapter, `[rows, tokens, rank]`."""
    own = _own(t, groups)
    return own * _scales(scaling, own, groups)
