"""The grouped low-rank update in torch operations, with the signatures of `grouped_triton`.

It consists of two products: `_project` multiplies each row by its adapter's factor, and `_outer`
sums over the rows of each adapter. Rows form blocks of equal size, whose product is one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, promote_types

from . import _dropout
from ._groups import Groups
from ._low_rank_torch import SMALL


class Blocks(NamedTuple):
    """How rows of the batch form blocks of equal size, each of one adapter.

    Attributes:
        size: rows of the batch in each block.
        rows: the attribute of the groups with the rows in the order of the blocks; None: all rows
            in the order of the batch, after which the rows without an adapter must be restored.
        adapters: the attribute of the groups with each block's adapter; None: blocks are in the
            order of the stack.
    """

    size: int
    rows: str | None
    adapters: str | None


def blocks_of(groups: Groups, n: int, tokens: int, rank: int) -> Blocks | None:
    """Return the cheapest blocks; None if one product per adapter is cheaper.

    Args:
        groups: of the batch.
        n: number of adapters.
        tokens: of each row.
        rank: the smaller dimension of the factors.
    """
    used, active = len(groups.adapters), len(groups.rows)
    adapters = None if groups.whole and used == n else "adapters"
    if groups.even and groups.sorted:
        return Blocks(groups.lengths[0], None, adapters)
    # copy rows or factors, whichever is smaller
    if groups.even and tokens < rank and (adapters is None or active > used):
        return Blocks(groups.lengths[0], "order", adapters)
    if tokens >= rank or active <= 4 * used:
        # if few rows have no adapter, computing them costs less than leaving them out
        few = 2 * active >= len(groups.index)
        return Blocks(1, None, "of_all") if few else Blocks(1, "rows", "of_rows")
    return None


def low_rank(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: Sequence[float], groups: Groups
) -> Tensor:
    """Return `expand` of `shrink` for operands of one dtype, without dropout; differentiable.

    Computes the usual cases here: on a CPU each call in Python counts.
    """
    batch, n, rank = len(groups.index), a.shape[0], a.shape[1]
    usual = x.dim() == 3 and y.dim() == 3 and _is_one(scaling)
    blocks = groups.kept_blocks(n, x.shape[1], rank, blocks_of) if usual else None
    if blocks is None or (groups.base and blocks.rows is not None):
        return expand(y, shrink(x, a, 0.0, None, groups), b, scaling, groups)
    _, tokens, width = y.shape
    if blocks.adapters is not None:
        a, b = _taken(a, blocks.adapters, groups), _taken(b, blocks.adapters, groups)
    if blocks.rows is not None:
        x = x.index_select(0, groups.numbers(blocks.rows, x.device))
    target = y
    if blocks.size > 1:
        count, size = batch // blocks.size, blocks.size * tokens
        x = x.reshape(count, size, x.shape[2])  # [blocks, rows, d_in]
        if blocks.rows is None:
            target = y.reshape(count, size, width)  # [blocks, rows, d_out]
    t = torch.bmm(x, a.mT)  # [blocks, rows, rank]
    if groups.base:
        t = _restored(t, None, groups)
    # contiguous for large operands: autograd's products of the backward are then faster
    up = b.mT if y.numel() <= SMALL else b.mT.contiguous()  # [blocks, rank, d_out]
    if blocks.rows is None:
        out = torch.baddbmm(target, t, up, alpha=scaling[0]).view(y.shape)
        return _restored(out, y, groups) if groups.base else out
    own = torch.bmm(t, up).view(y.shape).index_select(0, groups.numbers("inverse", x.device))
    return torch.add(y, own, alpha=scaling[0])


def shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None, groups: Groups) -> Tensor:
    """Project down: t = dropout(x) aᵀ; `noise` as `_dropout.bits` drew it.

    `x` `[batch, *tokens, d_in]`, `a` `[n, rank, d_in]` → `[batch, *tokens, rank]` in the dtype
    of `a`; zero for a row without an adapter.
    """
    if noise is None:
        return _project(x.to(a.dtype), a.mT, groups)
    kept = _dropout.mask(noise, x.shape, p).to(a.dtype).mul_(x)  # [batch, *tokens, d_in]
    return _project(kept, a.mT, groups).mul_(_dropout.kept_scale(p))


def shrink_backward(
    dt: Tensor, x: Tensor, a: Tensor, p: float, noise: Tensor | None, groups: Groups, *needs: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in its dtype, and of a; empty if not needed.

    Differentiable again. Without `needs_a`, `x` may be empty: only its dtype is read.
    """
    needs_x, needs_a = needs or (True,) * 2
    dx, da = x.new_empty(0), a.new_empty(0)
    kept = x
    if noise is not None:
        dt = dt * _dropout.kept_scale(p)  # [batch, *tokens, rank]
        kept = _dropout.mask(noise, (*dt.shape[:-1], a.shape[-1]), p).to(a.dtype)
    if needs_x:
        dx = _project(dt, a, groups)  # [batch, *tokens, d_in]
        dx = (dx if noise is None else dx.mul_(kept)).to(x.dtype)
    if needs_a:
        if noise is not None:
            # in place, to save a large temporary, unless gradients are needed
            kept = kept * x if torch.is_grad_enabled() else kept.mul_(x)
        da = _outer(dt, kept.to(a.dtype), groups, a.shape[0])  # [n, rank, d_in]
    return dx, da


def expand(
    y: Tensor, t: Tensor, b: Tensor, scaling: Sequence[float] | Tensor, groups: Groups
) -> Tensor:
    """Add the update: y + scaling · t bᵀ.

    `y` `[batch, *tokens, d_out]`, `t` `[batch, *tokens, rank]`, `b` `[n, d_out, rank]` → shape and
    dtype of `y`; a row without an adapter keeps its bits.
    """
    t, s = _scaled(t, scaling, groups)
    if groups.base:
        t = t.index_fill(0, groups.numbers("base", t.device), 0.0)
    # bᵀ in rows, as in `low_rank`
    rows = b.mT.to(t.dtype).contiguous()  # [n, rank, d_out]
    return _project(t, rows, groups, y, s)


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
    dy = dy.to(t.dtype)
    dt, db = t.new_empty(0), b.new_empty(0)
    if needs_t:
        # bᵀ in rows, as in `low_rank`
        rows = b.mT.to(t.dtype).contiguous()  # [n, rank, d_out]
        dt, s = _scaled(_project(dy, rows.mT, groups), scaling, groups)
        dt = dt * s  # [batch, *tokens, rank]
    if needs_b:
        t, s = _scaled(t, scaling, groups)
        # tᵀ dy is twice as fast on the CPU as dyᵀ t
        db = _outer(t * s, dy, groups, b.shape[0]).mT.to(b.dtype).contiguous()  # [n, d_out, rank]
    return dt, db


def _project(
    x: Tensor, factors: Tensor, groups: Groups, onto: Tensor | None = None, s: float = 1.0
) -> Tensor:
    """Return x · f with each row's factor f, or `onto + s · x · f`; differentiable.

    `x` `[batch, *tokens, wide]`, `factors` `[n, wide, narrow]` → `[batch, *tokens, narrow]`. A row
    without an adapter has the bits of `onto`, or is zero.
    """
    n, wide, narrow = factors.shape
    shape = (*x.shape[:-1], narrow)
    if not groups.rows:
        return factors.new_zeros(shape) if onto is None else onto.clone()
    batch, tokens = shape[0], math.prod(shape[1:-1])
    target = None if onto is None else onto.reshape(batch, tokens, narrow)
    blocks = groups.kept_blocks(n, tokens, min(wide, narrow), blocks_of)
    rows = "order" if blocks is None else blocks.rows
    moved = x.reshape(batch, tokens, wide)  # [batch, tokens, wide]
    if rows is not None:
        moved = moved.index_select(0, groups.numbers(rows, x.device))
    active = moved.shape[0]
    if blocks is None:
        # one part for each adapter: [length · tokens, wide]
        parts = moved.flatten(0, 1).split([tokens * length for length in groups.lengths])
        pairs = zip(parts, groups.adapters, strict=True)
        own = torch.cat([part @ factors[adapter] for part, adapter in pairs])
    else:
        if blocks.adapters is not None:
            factors = _taken(factors, blocks.adapters, groups)
        # [blocks, rows · tokens, wide]
        moved = moved.reshape(active // blocks.size, blocks.size * tokens, wide)
        dtype = factors.dtype
        # one pass, unless the sum would round `target`
        if rows is None and target is not None and promote_types(target.dtype, dtype) is dtype:
            onto = target.to(dtype).reshape(*moved.shape[:2], narrow)  # [blocks, .., narrow]
            own = torch.baddbmm(onto, moved, factors, alpha=s)
            return _restored(own.view(target.shape).to(target.dtype), target, groups).view(shape)
        own = torch.bmm(moved, factors)  # [blocks, rows · tokens, narrow]
    own = own.view(active, tokens, narrow)  # [active, tokens, narrow]
    if rows == "order" and active == batch:
        rows, own = None, own.index_select(0, groups.numbers("inverse", x.device))
    if rows is None:
        if target is not None:
            own = torch.add(target, own, alpha=s).to(target.dtype)
        return _restored(own, target, groups).view(shape)  # [batch, *tokens, narrow]
    places = groups.numbers(rows, x.device)
    if target is None:
        target = own.new_zeros(batch, tokens, narrow)
    else:
        own = torch.add(target.index_select(0, places), own, alpha=s).to(target.dtype)
    return target.index_copy(0, places, own).view(shape)  # [batch, *tokens, narrow]


def _restored(out: Tensor, target: Tensor | None, groups: Groups) -> Tensor:
    """Return `out` with its rows without an adapter overwritten by those of `target`, or by 0.

    This is hidden from autograd, to save copies of the gradient: the update of these rows is a
    product with rows of zeros, which can only have changed the sign of a zero.
    """
    if groups.base:
        places = groups.numbers("base", out.device)
        if target is None:
            out.index_fill_(0, places, 0.0)
        else:
            own = target.detach().index_select(0, places)
            out.detach().index_copy_(0, places, own)
    return out


def _outer(u: Tensor, v: Tensor, groups: Groups, n: int) -> Tensor:
    """Return the sum of uᵀ v over each adapter's rows, zero if it has none; differentiable.

    `u` `[batch, *tokens, narrow]`, `v` `[batch, *tokens, wide]` → `[n, narrow, wide]`.
    """
    batch, tokens, narrow, wide = u.shape[0], math.prod(u.shape[1:-1]), u.shape[-1], v.shape[-1]
    if not groups.rows:
        return u.new_zeros(n, narrow, wide)
    blocks = groups.kept_blocks(n, tokens, min(narrow, wide), blocks_of)
    u, v = u.reshape(batch, tokens, narrow), v.reshape(batch, tokens, wide)
    rows = "order" if blocks is None else blocks.rows
    if rows is not None:
        u, v = (w.index_select(0, groups.numbers(rows, w.device)) for w in (u, v))
    if blocks is None:
        u, v = u.flatten(0, 1), v.flatten(0, 1)  # [rows · tokens, narrow], [.., wide]
        sizes = [tokens * length for length in groups.lengths]
        own = torch.stack([p.T @ q for p, q in zip(u.split(sizes), v.split(sizes), strict=True)])
        adapters = None if groups.whole and len(sizes) == n else "adapters"
    else:
        count, size = u.shape[0] // blocks.size, blocks.size * tokens
        u, v = u.reshape(count, size, narrow), v.reshape(count, size, wide)  # [blocks, rows, ..]
        own, adapters = torch.bmm(u.mT, v), blocks.adapters  # [blocks, narrow, wide]
        if adapters == "of_all" and groups.base:
            own, adapters = own.index_select(0, groups.numbers("rows", u.device)), "of_rows"
    if adapters is None:
        return own
    return own.new_zeros(n, narrow, wide).index_add(0, groups.numbers(adapters, u.device), own)


def _taken(factors: Tensor, adapters: str, groups: Groups) -> Tensor:
    """Return the factors of the blocks, in their memory layout: another would double the cost."""
    if factors.stride(-1) != 1:
        return _taken(factors.mT, adapters, groups).mT
    own = factors.index_select(0, groups.numbers(adapters, factors.device))
    if adapters == "of_all" and groups.base and own.requires_grad:
        # a row without an adapter may hold inf or NaN, which must not reach the factor it borrows
        own = own.index_fill_(0, groups.numbers("base", own.device), 0.0)
    return own


def _scaled(t: Tensor, scaling: Sequence[float] | Tensor, groups: Groups) -> tuple[Tensor, float]:
    """Return `t` and a factor for all rows; unequal scalings are multiplied into `t`."""
    if isinstance(scaling, Tensor):
        scaling = scaling.tolist()
    if _is_one(scaling):
        return t, scaling[0] if scaling else 1.0
    each = groups.row_scales(tuple(scaling), t.device, t.dtype)  # [batch]
    return t * each.view(-1, *[1] * (t.dim() - 1)), 1.0


def _is_one(scaling: Sequence[float]) -> bool:
    """Return whether all adapters have the same scaling."""
    return not scaling or scaling.count(scaling[0]) == len(scaling)
