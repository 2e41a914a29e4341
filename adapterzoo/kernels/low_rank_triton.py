"""The low-rank update in Triton: shrink t = x Aᵀ and expand y + s · t Bᵀ, with their backwards.

The shrink reads x once; expand is a composition without a gain, in `compose_triton`. The kernels
are also those of mixed batches, whose plan says which rows a program takes; see `grouped_triton`.
There are no atomics: the same operands give the same bits.

Products are in the dtype of the factors, as in the definition: x, y and dy are cast when they are
read, and sums are float32. t and dt are in that dtype too, since the next product would round them.
"""

# functions under triton.jit have no types to declare
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import compose_triton, low_rank
from .ops import launch
from .tiles_triton import (
    RowPlan,
    Tile,
    added,
    cut,
    is_small,
    keep,
    parted,
    precision,
    product,
    rows_at,
    rows_of,
    stacked_strides,
    tall,
)

# above this, programs would read x again for each part of the rank, and cuBLAS is faster
_WIDEST_RANK = 64


# the tiles are the largest that spill no register on sm_80, sm_90 and sm_100, and `small` ones on
# sm_86, sm_89 and sm_120


def shrink_tile(rows: int, rank: int, dtype: torch.dtype, small: bool = False) -> Tile:
    """Return the configuration for a number of rows, a rank and the dtype of the factors.

    `small`: see `is_small`.
    """
    return chunk_tile(tall(rows), rank, dtype, small)


def chunk_tile(rows: int, rank: int, dtype: torch.dtype, small: bool = False) -> Tile:
    """Return the configuration for the rows of a tile; see `shrink_tile`."""
    warps = 8 if small and rows > 16 else 4
    if dtype is torch.float32:
        return Tile(rows, 32, 32, warps, 3)
    return Tile(rows, 128 if rank <= 16 else 64, cut(rank), warps, 3)


def outer_tile(rank: int, dtype: torch.dtype, mixed: bool = False) -> Tile:
    """Return the configuration for a rank and dtype; its rows are those of a step of the sum.

    `mixed`: with a plan, whose numbers are loaded ahead of the rows.
    """
    if dtype is torch.float32:
        return Tile(64, 64, 32, 4, 3)
    return Tile(64, 64, cut(rank), 4, 5 if mixed else 3)


@triton.jit(do_not_specialize=["rows", "head", "tokens", "threshold"])
def shrink_kernel(
    x, a, scales, seed, plan, t, x_row, x_col, a_each, a_row, a_col, rows, width, rank, part, head,
    tokens, threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write t[p] = s · dropout(x) aᵀ over features p · part to (p + 1) · part; 0: no adapter."""
    tiles = tl.cdiv(rank, RANK)
    adapter, row = rows_of(plan, head, tl.program_id(0) // tiles, rows, tokens, ROWS)
    r = (tl.program_id(0) % tiles) * RANK + tl.arange(0, RANK)
    p = tl.program_id(1)
    end = min(width, (p + 1) * part)
    if plan is not None:
        a += adapter.to(tl.int64) * a_each
        end = tl.where(adapter < 0, 0, end)
    dtype = a.dtype.element_ty
    x_rows = x + row.to(tl.int64)[:, None] * x_row
    a_rows = a + r.to(tl.int64)[None, :] * a_row
    acc = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(p * part, end, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (k < width)[None, :]
        tile = tl.load(x_rows + k.to(tl.int64)[None, :] * x_col, inside, other=0.0).to(dtype)
        if seed is not None:
            tile = tl.where(keep(tl.load(seed), row, first, COLUMNS, threshold), tile, 0.0)
        factor = (k < width)[:, None] & (r < rank)[None, :]
        columns = tl.load(a_rows + k.to(tl.int64)[:, None] * a_col, factor, other=0.0)
        acc = product(tile, columns, acc, PRECISION)
    if seed is not None:
        acc *= scale
    if scales is not None:
        acc *= tl.load(scales + adapter, adapter >= 0, other=0.0)
    here = t + (p.to(tl.int64) * rows + row)[:, None] * rank + r[None, :]
    tl.store(here, acc.to(t.dtype.element_ty), (row < rows)[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["rows", "batch", "tokens", "parts", "threshold"])
def outer_kernel(
    x, t, scales, seed, plan, sums, x_row, x_col, t_row, t_col, sums_part, sums_each, sums_row,
    sums_col, rows, width, rank, batch, tokens, parts, threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write sums[p, adapter] = s · dropout(x)ᵀ t over part p of the adapter's rows; 0: no rows."""
    ranks, tiles = tl.cdiv(rank, RANK), tl.cdiv(width, COLUMNS)
    adapter = tl.program_id(0) // (ranks * tiles)
    r = (tl.program_id(0) % ranks) * RANK + tl.arange(0, RANK)
    first = (tl.program_id(0) // ranks % tiles) * COLUMNS
    k = first + tl.arange(0, COLUMNS)
    p = tl.program_id(1)
    begin, end = 0, rows
    if plan is not None:
        begin = tl.load(plan + batch + adapter) * tokens
        end = tl.load(plan + batch + adapter + 1) * tokens
    step = tl.cdiv(tl.cdiv(end - begin, ROWS), parts) * ROWS
    begin += p * step
    end = min(end, begin + step)
    dtype = t.dtype.element_ty
    x_columns = x + k.to(tl.int64)[:, None] * x_col
    t_columns = t + r.to(tl.int64)[None, :] * t_col
    acc = tl.zeros((COLUMNS, RANK), tl.float32)
    for at in tl.range(begin, end, ROWS, num_stages=STAGES):
        row = rows_at(plan, at + tl.arange(0, ROWS), end, rows, tokens)
        # asynchronous, unlike the transpose of a tile
        inside = (k < width)[:, None] & (row < rows)[None, :]
        left = tl.load(x_columns + row.to(tl.int64)[None, :] * x_row, inside, other=0.0).to(dtype)
        if seed is not None:
            kept = keep(tl.load(seed), row, first, COLUMNS, threshold)
            left = tl.where(tl.trans(kept), left, 0.0)
        inside = (row < rows)[:, None] & (r < rank)[None, :]
        right = tl.load(t_columns + row.to(tl.int64)[:, None] * t_row, inside, other=0.0)
        acc = product(left, right, acc, PRECISION)
    if seed is not None:
        acc *= scale
    if scales is not None:
        acc *= tl.load(scales + adapter)
    here = sums + p.to(tl.int64) * sums_part + adapter.to(tl.int64) * sums_each
    here += k.to(tl.int64)[:, None] * sums_row + r.to(tl.int64)[None, :] * sums_col
    tl.store(here, acc, (k < width)[:, None] & (r < rank)[None, :])


def shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None) -> Tensor:
    """Project down: t = dropout(x) aᵀ; `noise` is a seed, int64 `[1]`.

    `x` `[*batch, d_in]`, `a` `[rank, d_in]` → `[*batch, rank]` in the dtype of `a`.
    """
    flat = x.reshape(-1, x.shape[-1])  # [rows, d_in]
    if noise is None and a.shape[0] > _WIDEST_RANK and x.dtype is a.dtype:
        t = flat @ a.T
    else:
        t = shrunk(flat, a, p, noise, a.dtype, precision(a.dtype))
    return t.view(*x.shape[:-1], a.shape[0])  # [*batch, rank]


def shrunk(
    x: Tensor,
    a: Tensor,
    p: float,
    noise: Tensor | None,
    dtype: torch.dtype,
    exact: str,
    plan: RowPlan | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Return `shrink` of rows `[rows, d_in]` in a dtype, with a precision of the products.

    With a plan, `a` is `[n, rank, d_in]`, and `scales` `[n]` multiply the results (None: 1).
    """
    (rows, width), rank = x.shape, a.shape[-2]
    small, of = is_small(x), (rank, a.dtype)
    tile = chunk_tile(plan.tall, *of, small) if plan else shrink_tile(rows, *of, small)
    blocks = triton.cdiv(rows, tile.rows) if plan is None else plan.chunks
    programs = blocks * triton.cdiv(rank, tile.rank)
    parts, part = parted(width, tile.columns, programs)
    t = x.new_empty((parts, rows, rank), dtype=dtype if parts == 1 else torch.float32)
    launch(
        shrink_kernel, (programs, parts), x, a, scales, noise, plan and plan.values, t,
        *x.stride(), *stacked_strides(a), rows, width, rank, part, plan.head if plan else 0,
        plan.tokens if plan else 1, low_rank.dropout_threshold(p), low_rank.dropout_scale(p),
        PRECISION=exact, **tile.settings,
    )  # fmt: skip
    return added(t, dtype)


def outer(
    x: Tensor,
    t: Tensor,
    p: float,
    noise: Tensor | None,
    dtype: torch.dtype,
    plan: RowPlan | None = None,
    scales: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return s · dropout(x)ᵀ t of rows `[rows, width]` and `[rows, rank]`: `[n, width, rank]`.

    n is 1 without a plan; `scales` as for `shrunk`. With `transposed`, return `[n, rank, width]`.
    """
    (rows, width), rank = x.shape, t.shape[1]
    tile, n = outer_tile(rank, t.dtype, plan is not None), plan.adapters if plan else 1
    programs = n * triton.cdiv(width, tile.columns) * triton.cdiv(rank, tile.rank)
    # split the rows like features elsewhere; one adapter may have all of them
    parts, _ = parted(max(rows, 1), tile.rows, programs)
    shape = (rank, width) if transposed else (width, rank)
    out = x.new_empty((parts, n, *shape), dtype=torch.float32)
    launch(
        outer_kernel, (programs, parts), x, t, scales, noise, plan and plan.values, out,
        *x.stride(), *t.stride(), *(out.mT if transposed else out).stride(), rows, width, rank,
        plan.batch if plan else 0, plan.tokens if plan else 1, parts,
        low_rank.dropout_threshold(p), low_rank.dropout_scale(p),
        PRECISION=precision(t.dtype), **tile.pipelined,
    )  # fmt: skip
    return added(out, dtype)


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

    Two products, since one only writes dx and the other only reads x: a kernel for both would
    save no pass. Without dropout they are torch's. Without `needs_a`, `x` may be empty: only its
    dtype is read.
    """
    if noise is None:
        return low_rank.shrink_torch_backward(dt, x, a, p, None, needs_x, needs_a)
    (rank, width), scale = a.shape, low_rank.dropout_scale(p)
    left = dt.reshape(-1, rank).to(a.dtype)  # [rows, rank]
    dx, da = x.new_empty(0), a.new_empty(0)
    if needs_x:
        dx = x.new_empty((*dt.shape[:-1], width))  # [*batch, d_in]
        compose_triton.write(dx, None, left, a.T, scale, p=p, noise=noise)
    if needs_a:
        flat = x.reshape(-1, width)  # [rows, d_in]
        if rank <= _WIDEST_RANK:
            return dx, outer(flat, left, p, noise, a.dtype, transposed=True).squeeze(0)
        kept = a.new_empty(flat.shape)
        compose_triton.write(kept, flat, p=p, noise=noise)
        # the sum is not read; alpha is applied before the result is rounded
        da = torch.addmm(a.new_empty(1), left.T, kept, beta=0, alpha=scale)  # [rank, d_in]
    return dx, da


def expand(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Add the update: y + scaling · t bᵀ.

    `y` `[*batch, d_out]`, `t` `[*batch, rank]`, `b` `[d_out, rank]` → shape and dtype of `y`.
    """
    return compose_triton.compose(y, None, None, t, b, scaling)


def expand_backward(
    dy: Tensor, t: Tensor, b: Tensor, scaling: float, needs_t: bool = True, needs_b: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of t and b; empty if not needed.

    Without `needs_b`, `t` may be empty: only its dtype is read.
    """
    needs = False, False, False, needs_t, needs_b
    *_, dt, db = compose_triton.compose_backward(dy, dy, None, None, t, b, scaling, False, *needs)
    return dt, db
