"""The low-rank update of a mixed batch in Triton: three kernels, one launch for each product.

A program takes a chunk of rows of one adapter. It reads the numbers of its rows from the batch's
plan (`_groups.plan_of`), so that rows are not gathered or scattered in memory. Rows without an
adapter form chunks too, so that every output is written. The gradient of a factor is the sum over
the rows of its adapter, in a fixed order: the same operands give the same bits.

Dtypes are those of `low_rank_triton`: products in the factors' dtype, sums in float32.
"""

# functions under triton.jit have no types to declare
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _dropout
from ._groups import CHUNK, chunk_rows
from ._launch import launch
from ._tiles_triton import Tile, added, cut, keep, parted, precision, product

_CHUNK = tl.constexpr(CHUNK)


# the tiles are the largest that spill no register on sm_80, sm_90 and sm_100


def shrink_tile(rows: int, rank: int, dtype: torch.dtype) -> Tile:
    """Return the configuration for rows per chunk, rank and dtype of the factors."""
    if dtype is torch.float32:
        return Tile(rows, 32, 32, 4, 3)
    return Tile(rows, 128 if rank <= 16 else 64, cut(rank), 4, 3)


def expand_tile(rows: int, rank: int, dtype: torch.dtype) -> Tile:
    """Return the configuration; see `shrink_tile`."""
    if dtype is torch.float32:
        return Tile(rows, 64, 32, 4, 2)
    return Tile(rows, 128, cut(rank), 4, 2)


def outer_tile(rank: int, dtype: torch.dtype) -> Tile:
    """Return the configuration for a rank and dtype; its rows are those of a step of the sum."""
    if dtype is torch.float32:
        return Tile(64, 64, 32, 4, 2)
    return Tile(64, 64, cut(rank), 4, 3)


@triton.jit
def rows_of(plan, place, there, tokens):
    """Return the rows of x at some places of the order by adapter; int64."""
    return tl.load(plan + place // tokens, there, other=0).to(tl.int64) * tokens + place % tokens


@triton.jit(do_not_specialize=["batch", "tokens", "n", "rows", "threshold"])
def grouped_shrink_kernel(
    x, a, scales, seed, plan, t, x_row, x_col, a_each, a_row, a_col, batch, tokens, n, rows, width,
    rank, part, threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, DROPS: tl.constexpr,
    SCALES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write t[p] = s · dropout(x) aᵀ over features p · part to (p + 1) · part; 0: no adapter."""
    tiles = tl.cdiv(rank, RANK)
    chunk = plan + batch + n + 1 + (tl.program_id(0) // tiles) * _CHUNK
    adapter, start, stop = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    if start >= stop:
        return
    place = start + tl.arange(0, ROWS)
    there = place < stop
    row = rows_of(plan, place, there, tokens)
    r = (tl.program_id(0) % tiles) * RANK + tl.arange(0, RANK)
    p = tl.program_id(1)
    dtype = a.dtype.element_ty
    x_rows = x + row[:, None] * x_row
    a_rows = a + adapter.to(tl.int64) * a_each + r.to(tl.int64)[None, :] * a_row
    end = tl.where(adapter < 0, 0, min(width, (p + 1) * part))
    acc = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(p * part, end, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        inside = there[:, None] & (k < width)[None, :]
        tile = tl.load(x_rows + k.to(tl.int64)[None, :] * x_col, inside, other=0.0).to(dtype)
        if DROPS:
            tile = tl.where(keep(tl.load(seed), row, first, COLUMNS, threshold), tile, 0.0)
        factor = (k < width)[:, None] & (r < rank)[None, :]
        columns = tl.load(a_rows + k.to(tl.int64)[:, None] * a_col, factor, other=0.0)
        acc = product(tile, columns, acc, PRECISION)
    if DROPS:
        acc *= scale
    if SCALES:
        acc *= tl.load(scales + adapter, adapter >= 0, other=0.0)
    here = t + (p.to(tl.int64) * rows + row)[:, None] * rank + r[None, :]
    tl.store(here, acc.to(t.dtype.element_ty), there[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["batch", "tokens", "n", "threshold"])
def grouped_expand_kernel(
    y, t, b, scales, seed, plan, out, y_row, y_col, t_row, t_col, b_each, b_row, b_col, batch,
    tokens, n, width, rank, threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, DROPS: tl.constexpr,
    ADDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out = y + s · t bᵀ (y if no adapter), or out = mask · (t bᵀ) (0 if no adapter)."""
    tiles = tl.cdiv(width, COLUMNS)
    chunk = plan + batch + n + 1 + (tl.program_id(0) // tiles) * _CHUNK
    adapter, start, stop = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    if start >= stop:
        return
    place = start + tl.arange(0, ROWS)
    there = place < stop
    row = rows_of(plan, place, there, tokens)
    first = (tl.program_id(0) % tiles) * COLUMNS
    k = first + tl.arange(0, COLUMNS)
    b_columns = b + adapter.to(tl.int64) * b_each + k.to(tl.int64)[None, :] * b_row
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for low in range(0, tl.where(adapter < 0, 0, rank), RANK):
        r = low + tl.arange(0, RANK)
        left = tl.load(
            t + row[:, None] * t_row + r.to(tl.int64)[None, :] * t_col,
            there[:, None] & (r < rank)[None, :],
            other=0.0,
        )
        factor = tl.load(
            b_columns + r.to(tl.int64)[:, None] * b_col,
            (r < rank)[:, None] & (k < width)[None, :],
            other=0.0,
        ).to(t.dtype.element_ty)
        acc = product(left, factor, acc, PRECISION)
    inside = there[:, None] & (k < width)[None, :]
    if ADDS:
        at = y + row[:, None] * y_row + k.to(tl.int64)[None, :] * y_col
        whole = tl.load(at, inside, other=0.0).to(tl.float32)
        acc *= tl.load(scales + adapter, adapter >= 0, other=0.0)
        # a sum with 0 would lose the sign of a zero
        acc = tl.where(adapter < 0, whole, whole + acc)
    if DROPS:
        acc = tl.where(keep(tl.load(seed), row, first, COLUMNS, threshold), acc * scale, 0.0)
    tl.store(out + row[:, None] * width + k[None, :], acc.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["batch", "tokens", "n", "parts", "threshold"])
def grouped_outer_kernel(
    x, t, scales, seed, plan, da, x_row, x_col, t_row, t_col, batch, tokens, n, width, rank, parts,
    threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, DROPS: tl.constexpr,
    SCALES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write da[p, adapter] = s · dropout(x)ᵀ t over a part of the adapter's rows; 0: no rows."""
    ranks, tiles = tl.cdiv(rank, RANK), tl.cdiv(width, COLUMNS)
    adapter = tl.program_id(0) // (ranks * tiles)
    r = (tl.program_id(0) % ranks) * RANK + tl.arange(0, RANK)
    first = (tl.program_id(0) // ranks % tiles) * COLUMNS
    k = first + tl.arange(0, COLUMNS)
    p = tl.program_id(1)
    begin = tl.load(plan + batch + adapter) * tokens
    last = tl.load(plan + batch + adapter + 1) * tokens
    step = tl.cdiv(tl.cdiv(last - begin, ROWS), parts) * ROWS
    begin += p * step
    last = min(last, begin + step)
    dtype = t.dtype.element_ty
    acc = tl.zeros((COLUMNS, RANK), tl.float32)
    for at in range(begin, last, ROWS):
        place = at + tl.arange(0, ROWS)
        there = place < last
        row = rows_of(plan, place, there, tokens)
        tile = tl.load(
            x + row[:, None] * x_row + k.to(tl.int64)[None, :] * x_col,
            there[:, None] & (k < width)[None, :],
            other=0.0,
        ).to(dtype)
        if DROPS:
            tile = tl.where(keep(tl.load(seed), row, first, COLUMNS, threshold), tile, 0.0)
        right = tl.load(
            t + row[:, None] * t_row + r.to(tl.int64)[None, :] * t_col,
            there[:, None] & (r < rank)[None, :],
            other=0.0,
        )
        acc = product(tl.trans(tile), right, acc, PRECISION)
    if DROPS:
        acc *= scale
    if SCALES:
        acc *= tl.load(scales + adapter)
    here = ((p.to(tl.int64) * n + adapter) * width + k)[:, None] * rank + r[None, :]
    tl.store(da + here, acc, (k < width)[:, None] & (r < rank)[None, :])


def shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: Tensor) -> Tensor:
    """Project down: t = dropout(x) aᵀ; `noise` is a seed, int64 `[1]`.

    `x` `[batch, *tokens, d_in]`, `a` `[n, rank, d_in]` → `[batch, *tokens, rank]` in the dtype
    of `a`; zero for a row without an adapter.
    """
    return _shrink(x, a, p, noise, plan, None)


def shrink_backward(
    dt: Tensor, x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: Tensor, *needs: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in its dtype, and of a; empty if not needed.

    Without `needs_a`, `x` may be empty: only its dtype is read.
    """
    needs_x, needs_a = needs or (True,) * 2
    dx, da = x.new_empty(0), a.new_empty(0)
    if needs_x:
        dx = x.new_empty((*dt.shape[:-1], a.shape[2]))
        _expand(None, dt.to(a.dtype), a.mT, None, dx, p, noise, plan)
    if needs_a:
        own = _outer(x, dt.to(a.dtype), a.shape[0], p, noise, plan, None)  # [n, d_in, rank]
        da = own.to(a.dtype).mT.clone(memory_format=torch.contiguous_format)  # [n, rank, d_in]
    return dx, da


def expand(y: Tensor, t: Tensor, b: Tensor, scales: Tensor, plan: Tensor) -> Tensor:
    """Add the update: y + scaling · t bᵀ; `scales` float32 `[n]`.

    `y` `[batch, *tokens, d_out]`, `t` `[batch, *tokens, rank]`, `b` `[n, d_out, rank]` → shape and
    dtype of `y`; a row without an adapter keeps its bits.
    """
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    _expand(y, t, b, scales, out, 0.0, None, plan)
    return out


def expand_backward(
    dy: Tensor, t: Tensor, b: Tensor, scales: Tensor, plan: Tensor, *needs: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of t and b; empty if not needed.

    Without `needs_b`, `t` may be empty: only its dtype is read.
    """
    needs_t, needs_b = needs or (True,) * 2
    dt, db = t.new_empty(0), b.new_empty(0)
    if needs_t:
        dt = _shrink(dy, b.to(t.dtype).mT, 0.0, None, plan, scales)
    if needs_b:
        db = _outer(dy, t, b.shape[0], 0.0, None, plan, scales).to(b.dtype)  # [n, d_out, rank]
    return dt, db


def _shrink(
    x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: Tensor, scales: Tensor | None
) -> Tensor:
    """Return `s · dropout(x) aᵀ` of each row, in the dtype of `a`."""
    flat = x.reshape(-1, x.shape[-1])  # [rows, wide]
    (rows, width), (n, rank, _) = flat.shape, a.shape
    chunks, batch, tokens = _sizes(x, n, plan)
    tile = shrink_tile(chunk_rows(tokens), rank, a.dtype)
    programs = chunks * triton.cdiv(rank, tile.rank)
    parts, part = parted(width, tile.columns, programs)
    t = torch.empty(
        (parts, rows, rank), dtype=a.dtype if parts == 1 else torch.float32, device=x.device
    )
    launch(
        grouped_shrink_kernel, (programs, parts), flat, a, scales, noise, plan, t, *flat.stride(),
        *a.stride(), batch, tokens, n, rows, width, rank, part, _dropout.threshold(p),
        _dropout.kept_scale(p),
        DROPS=noise is not None, SCALES=scales is not None, PRECISION=precision(a.dtype),
        **tile.settings,
    )  # fmt: skip
    return added(t, a.dtype).view(*x.shape[:-1], rank)  # [batch, *tokens, rank]


def _expand(
    y: Tensor | None,
    t: Tensor,
    b: Tensor,
    scales: Tensor | None,
    out: Tensor,
    p: float,
    noise: Tensor | None,
    plan: Tensor,
) -> None:
    """Write `y + s · t bᵀ` of each row, or without y `dropout(t bᵀ)`, into a contiguous `out`."""
    n, width, rank = b.shape
    left = t.reshape(-1, rank)  # [rows, rank]
    flat = left if y is None else y.reshape(-1, width)  # [rows, d_out]
    chunks, batch, tokens = _sizes(t, n, plan)
    tile = expand_tile(chunk_rows(tokens), rank, t.dtype)
    launch(
        grouped_expand_kernel, (chunks * triton.cdiv(width, tile.columns),),
        None if y is None else flat, left, b, scales, noise, plan, out, *flat.stride(),
        *left.stride(), *b.stride(), batch, tokens, n, width, rank, _dropout.threshold(p),
        _dropout.kept_scale(p),
        DROPS=noise is not None, ADDS=y is not None, PRECISION=precision(t.dtype), **tile.settings,
    )  # fmt: skip


def _outer(
    x: Tensor,
    t: Tensor,
    n: int,
    p: float,
    noise: Tensor | None,
    plan: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """Return `s · dropout(x)ᵀ t` over the rows of each adapter, float32 `[n, wide, rank]`."""
    flat, right = x.reshape(-1, x.shape[-1]), t.reshape(-1, t.shape[-1])  # [rows, wide], [.., rank]
    (rows, width), rank = flat.shape, right.shape[1]
    _, batch, tokens = _sizes(x, n, plan)
    tile = outer_tile(rank, t.dtype)
    programs = n * triton.cdiv(width, tile.columns) * triton.cdiv(rank, tile.rank)
    # split the rows like features elsewhere; one adapter may have all of them
    parts, _ = parted(max(rows, 1), tile.rows, programs)
    da = torch.empty((parts, n, width, rank), dtype=torch.float32, device=x.device)
    launch(
        grouped_outer_kernel, (programs, parts), flat, right, scales, noise, plan, da,
        *flat.stride(), *right.stride(), batch, tokens, n, width, rank, parts,
        _dropout.threshold(p), _dropout.kept_scale(p),
        DROPS=noise is not None, SCALES=scales is not None, PRECISION=precision(t.dtype),
        **tile.settings,
    )  # fmt: skip
    return added(da, torch.float32)


def _sizes(x: Tensor, n: int, plan: Tensor) -> tuple[int, int, int]:
    """Return the number of chunks, the rows of the batch, and the tokens of each row."""
    batch = x.shape[0]
    return (plan.shape[0] - batch - n - 1) // CHUNK, batch, math.prod(x.shape[1:-1])
