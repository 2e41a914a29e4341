"""The low-rank update of a mixed batch in Triton: one launch for each product.

The kernels are those of `low_rank_triton` and `compose_triton`, with the batch's plan
(`grouped.plan_of`): a program takes a chunk of rows of one adapter and reads their numbers from the
plan, so rows are not gathered or scattered in memory. Rows without an adapter also form chunks,
so every output is written. The gradient of a factor is the sum over the rows of its adapter,
in a fixed order: the same operands give the same bits.

Dtypes are those of `low_rank_triton`: products in the factors' dtype, sums in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import compose_triton, low_rank
from .low_rank_triton import outer, shrunk
from .tiles_triton import RowPlan, precision


def shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: Tensor) -> Tensor:
    """Project down: t = dropout(x) aᵀ; `noise` is a seed, int64 `[1]`.

    `x` `[batch, *tokens, d_in]`, `a` `[n, rank, d_in]` → `[batch, *tokens, rank]` in the dtype
    of `a`; zero for a row without an adapter.
    """
    return _shrink(x, a, p, noise, _plan(x, a, plan), None)


def shrink_backward(
    dt: Tensor, x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: Tensor, *needs: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in its dtype, and of a; empty if not needed.

    Without `needs_a`, `x` may be empty: only its dtype is read.
    """
    needs_x, needs_a = needs or (True,) * 2
    dx, da = x.new_empty(0), a.new_empty(0)
    left, own = low_rank.rows_of(dt.to(a.dtype)), _plan(dt, a, plan)  # [rows, rank]
    if needs_x:
        dx = x.new_empty((*dt.shape[:-1], a.shape[2]))  # [batch, *tokens, d_in]
        scale = low_rank.dropout_scale(p)
        compose_triton.write(dx, None, left, a.mT, scale, p=p, noise=noise, plan=own)
    if needs_a:
        da = outer(
            low_rank.rows_of(x), left, p, noise, a.dtype, own, transposed=True
        )  # [n, rank, d_in]
    return dx, da


def expand(y: Tensor, t: Tensor, b: Tensor, scales: Tensor, plan: Tensor) -> Tensor:
    """Add the update: y + scaling · t bᵀ; `scales` float32 `[n]`.

    `y` `[batch, *tokens, d_out]`, `t` `[batch, *tokens, rank]`, `b` `[n, d_out, rank]` → shape and
    dtype of `y`; a row without an adapter keeps its bits.
    """
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    return compose_triton.write(
        out, low_rank.rows_of(y), low_rank.rows_of(t), b, scales, plan=_plan(y, b, plan)
    )


def expand_backward(
    dy: Tensor, t: Tensor, b: Tensor, scales: Tensor, plan: Tensor, *needs: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of t and b; empty if not needed.

    Without `needs_b`, `t` may be empty: only its dtype is read.
    """
    needs_t, needs_b = needs or (True,) * 2
    dt, db = t.new_empty(0), b.new_empty(0)
    own = _plan(dy, b, plan)
    if needs_t:
        dt = _shrink(dy, b.to(t.dtype).mT, 0.0, None, own, scales)
    if needs_b:
        db = outer(
            low_rank.rows_of(dy), low_rank.rows_of(t), 0.0, None, b.dtype, own, scales
        )  # [n, d_out, rank]
    return dt, db


def _shrink(
    x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: RowPlan, scales: Tensor | None
) -> Tensor:
    """Return `s · dropout(x) aᵀ` of each row, in the dtype of `a`."""
    t = shrunk(low_rank.rows_of(x), a, p, noise, a.dtype, precision(a.dtype), plan, scales)
    return t.view(*x.shape[:-1], a.shape[1])  # [batch, *tokens, rank]


def _plan(x: Tensor, factors: Tensor, plan: Tensor) -> RowPlan:
    """Return the plan of a batch `x` `[batch, *tokens, width]` with factors `[n, …]`."""
    return RowPlan(plan, x.shape[0], math.prod(x.shape[1:-1]), factors.shape[0])
