"""The low-rank update in Triton: shrink t = x Aᵀ and expand y + s · t Bᵀ, with their backwards.

The shrink reads x once; expand is a composition without a gain, in `compose_triton`. There are no
atomics: the same operands give the same bits.

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

from . import _dropout, _low_rank_torch, compose_triton
from ._launch import launch
from ._tiles_triton import FEW, Tile, added, cut, is_small, keep, loaded, parted, precision, product

# above this, programs would read x again for each part of the rank, and cuBLAS is faster
_WIDEST_RANK = 64


# the tiles are the largest that spill no register on sm_80, sm_90 and sm_100, and `small` ones on
# sm_86, sm_89 and sm_120


def shrink_tile(rows: int, rank: int, dtype: torch.dtype, small: bool = False) -> Tile:
    """Return the configuration for a number of rows, a rank and the dtype of the factors.

    `small`: see `is_small`.
    """
    warps = 8 if small and rows > FEW else 4
    if dtype is torch.float32:
        return Tile(16 if rows <= FEW else 64, 32, 32, warps, 3)
    return Tile(16 if rows <= FEW else 64, 128 if rank <= 16 else 64, cut(rank), warps, 3)


# of the kernel that only drops features, which has no products
DROP_TILE = Tile(16, 128, 0, 4, 2)


@triton.jit(do_not_specialize=["rows", "threshold"])
def shrink_kernel(
    x, a, seed, t, x_row, x_col, a_row, a_col, rows, width, rank, part, threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write t[p] = dropout(x) aᵀ over features p · part to (p + 1) · part."""
    tiles = tl.cdiv(rank, RANK)
    row = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    r = (tl.program_id(0) % tiles) * RANK + tl.arange(0, RANK)
    p = tl.program_id(1)
    dtype = a.dtype.element_ty
    x_rows = x + row.to(tl.int64)[:, None] * x_row
    a_rows = a + r.to(tl.int64)[None, :] * a_row
    acc = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(p * part, min(width, (p + 1) * part), COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (k < width)[None, :]
        tile = tl.load(x_rows + k.to(tl.int64)[None, :] * x_col, inside, other=0.0).to(dtype)
        if DROPS:
            tile = tl.where(keep(tl.load(seed), row, first, COLUMNS, threshold), tile, 0.0)
        factor = (k < width)[:, None] & (r < rank)[None, :]
        columns = tl.load(a_rows + k.to(tl.int64)[:, None] * a_col, factor, other=0.0)
        acc = product(tile, columns, acc, PRECISION)
    if DROPS:
        acc *= scale
    here = t + (p.to(tl.int64) * rows + row)[:, None] * rank + r[None, :]
    tl.store(here, acc.to(t.dtype.element_ty), (row < rows)[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["rows", "threshold"])
def drop_kernel(
    x, seed, out, x_row, x_col, rows, width, threshold, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write out = mask · x."""
    tiles = tl.cdiv(width, COLUMNS)
    row = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % tiles) * COLUMNS
    k = first + tl.arange(0, COLUMNS)
    tile = loaded(x, row, x_row, rows, k, x_col, width)
    tile = tl.where(keep(tl.load(seed), row, first, COLUMNS, threshold), tile, 0.0)
    here = out + row.to(tl.int64)[:, None] * width + k[None, :]
    tl.store(here, tile.to(out.dtype.element_ty), (row < rows)[:, None] & (k < width)[None, :])


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
    x: Tensor, a: Tensor, p: float, noise: Tensor | None, dtype: torch.dtype, exact: str
) -> Tensor:
    """Return `shrink` of rows `[rows, d_in]` in a dtype, with a precision of the products."""
    (rows, width), rank = x.shape, a.shape[0]
    tile = shrink_tile(rows, rank, a.dtype, is_small(x))
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(rank, tile.rank)
    parts, part = parted(width, tile.columns, programs)
    t = x.new_empty((parts, rows, rank), dtype=dtype if parts == 1 else torch.float32)
    launch(
        shrink_kernel, (programs, parts), x, a, noise, t, *x.stride(), *a.stride(), rows, width,
        rank, part, _dropout.threshold(p), _dropout.kept_scale(p),
        DROPS=noise is not None, PRECISION=exact, **tile.settings,
    )  # fmt: skip
    return added(t, dtype)  # [rows, rank]


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

    Two products by torch, since the one only writes dx and the other only reads x: a kernel for
    both would save no pass. With dropout one tensor of the size of x is needed at a time. Without
    `needs_a`, `x` may be empty: only its dtype is read.
    """
    if noise is None:
        return _low_rank_torch.shrink_backward(dt, x, a, p, None, needs_x, needs_a)
    left, scale = dt.reshape(-1, a.shape[0]).to(a.dtype), _dropout.kept_scale(p)  # [rows, rank]
    dx, da = x.new_empty(0), a.new_empty(0)
    # the sum is not read; alpha is applied before the result is rounded
    none = a.new_empty(1)
    if needs_x:
        whole = torch.addmm(none, left, a, beta=0, alpha=scale)  # [rows, d_in]
        dx = dropped(whole, p, noise, x.dtype).view(*dt.shape[:-1], a.shape[1])  # [*batch, d_in]
    if needs_a:
        kept = dropped(x.reshape(-1, a.shape[1]), p, noise, a.dtype)  # [rows, d_in]
        da = torch.addmm(none, left.T, kept, beta=0, alpha=scale)  # [rank, d_in]
    return dx, da


def dropped(x: Tensor, p: float, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Return mask · x of rows `[rows, width]` in a dtype; the kept features are not scaled."""
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    programs = triton.cdiv(rows, DROP_TILE.rows) * triton.cdiv(width, DROP_TILE.columns)
    launch(
        drop_kernel, (programs,), x, noise, out, *x.stride(), rows, width, _dropout.threshold(p),
        **DROP_TILE.settings,
    )  # fmt: skip
    return out


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
