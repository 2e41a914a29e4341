"""Rotation of features by chunks in Triton: y = x · blockdiag(blocks), by index arithmetic alone.

A program takes one chunk, or as many narrow ones as fill its tile, and keeps their rotations on the
multiprocessor while it loops over blocks of rows. The forward reads x once and writes y; the
backward reads x and dy once for both gradients and sums that of the rotation in registers, so that
only a few rotations are left to reduce. There are no atomics: the same operands give the same bits.

Products are in the dtype of x, as in the definition; sums are float32.
"""

# functions under triton.jit have no types to declare
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _butterfly_torch
from ._launch import launch
from ._tiles_triton import FEW, Tile, added, is_small, precision, product

# wider chunks do not fit the registers; cuBLAS is fast for them
_WIDEST = 128
# for the backward in float32, whose products split both operands in two parts
_WIDEST_FLOAT32 = 32
# on GPUs with little shared memory for the forward in float32 and the backward; see `is_small`
_WIDEST_SMALL = 64
# narrower chunks share a tile: its rows of 128 bytes in half precision are whole memory requests
_NARROWEST = 64
# programs that keep the multiprocessors of a large GPU busy, several on each
_PROGRAMS = 512


# the tiles are the largest that spill no register on sm_80, sm_90 and sm_100


def rotate_tile(rows: int, width: int, dtype: torch.dtype) -> Tile:
    """Return the configuration for rows, chunk width and dtype; it has no rank.

    Its columns hold as many whole chunks as fit, at least one.
    """
    columns = max(_NARROWEST, triton.next_power_of_2(width))
    warps = 8 if columns == 128 or dtype is torch.float32 else 4
    if rows <= FEW:
        return Tile(16, columns, 0, warps, 2)
    tall = 32 if columns == 128 and dtype is torch.float32 else 64
    return Tile(tall, columns, 0, warps, 2 if warps == 8 and dtype is torch.float32 else 3)


def rotate_backward_tile(rows: int, width: int, dtype: torch.dtype) -> Tile:
    """Return the configuration of the backward; see `rotate_tile`."""
    narrowest = _WIDEST_FLOAT32 if dtype is torch.float32 else _NARROWEST
    columns = max(narrowest, triton.next_power_of_2(width))
    warps = 8 if columns in (32, 128) else 4
    if rows <= FEW:
        return Tile(16, columns, 0, warps, 2)
    return Tile(64, columns, 0, warps, 1 if columns == 128 else 2)


@triton.jit
def covered(own, k, used, total, ALONE: tl.constexpr):
    """Return which columns of a tile are features; `ALONE`: it is one chunk."""
    if ALONE:
        return k < used
    return (k < used) & (own * used + k < total)


@triton.jit
def addresses(own, k, used, width, of_chunk, of_row, of_col, total, ALONE: tl.constexpr):
    """Return where a tile's block-diagonal matrix lies in `blocks`, and what of it is there."""
    valid = covered(own, k, used, total, ALONE)
    square = valid[:, None] & valid[None, :]
    if ALONE:
        at = own.to(tl.int64) * of_chunk + k.to(tl.int64)[:, None] * of_row
        return at + k.to(tl.int64)[None, :] * of_col, square
    chunk, place = (own * used + k) // width, ((own * used + k) % width).to(tl.int64)
    at = chunk.to(tl.int64)[:, None] * of_chunk + place[:, None] * of_row + place[None, :] * of_col
    return at, square & (chunk[:, None] == chunk[None, :])


@triton.jit(do_not_specialize=["rows"])
def rotate_kernel(
    x, blocks, y, x_expert, x_row, x_col, of_expert, of_chunk, of_row, of_col, rows, width, tiles,
    used, total, part, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALONE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write y = x · blockdiag(blocks) of one tile's chunks and the rows of part p."""
    expert, own = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    p = tl.program_id(1)
    k = tl.arange(0, COLUMNS)
    column = own * used + k
    valid = covered(own, k, used, total, ALONE)
    at, same = addresses(own, k, used, width, of_chunk, of_row, of_col, total, ALONE)
    rotation = tl.load(blocks + expert * of_expert + at, same, other=0.0).to(x.dtype.element_ty)
    x_columns = x + expert * x_expert + column.to(tl.int64)[None, :] * x_col
    # an integer of 1 is a number at compile time
    wide = tl.cast(total, tl.int64)
    y_columns = y + expert * rows * wide + column[None, :]
    for first in range(p * part, min(rows, (p + 1) * part), ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & valid[None, :]
        tile = tl.load(x_columns + row.to(tl.int64)[:, None] * x_row, inside, other=0.0)
        none = tl.zeros((ROWS, COLUMNS), tl.float32)
        rotated = product(tile, rotation, none, PRECISION)
        here = y_columns + row.to(tl.int64)[:, None] * wide
        tl.store(here, rotated.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def rotate_backward_kernel(
    dy, x, blocks, dx, dblocks, dy_expert, dy_row, dy_col, x_expert, x_row, x_col, of_expert,
    of_chunk, of_row, of_col, rows, experts, width, tiles, used, total, part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NEEDS_X: tl.constexpr, NEEDS_BLOCKS: tl.constexpr,
    ALONE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dx = dy · blockdiag(blocks)ᵀ of one tile's chunks, and dblocks[p] = xᵀ dy of p."""
    expert, own = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    p = tl.program_id(1)
    k = tl.arange(0, COLUMNS)
    column = own * used + k
    valid = covered(own, k, used, total, ALONE)
    dtype = dx.dtype.element_ty
    if NEEDS_X:
        at, same = addresses(own, k, used, width, of_chunk, of_col, of_row, total, ALONE)
        rotated = tl.load(blocks + expert * of_expert + at, same, other=0.0).to(dtype)
    x_columns = x + expert * x_expert + column.to(tl.int64)[None, :] * x_col
    dy_columns = dy + expert * dy_expert + column.to(tl.int64)[None, :] * dy_col
    wide = tl.cast(total, tl.int64)
    dx_columns = dx + expert * rows * wide + column[None, :]
    acc = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    for first in range(p * part, min(rows, (p + 1) * part), ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & valid[None, :]
        of_row_y = tl.load(dy_columns + row.to(tl.int64)[:, None] * dy_row, inside, other=0.0)
        of_row_y = of_row_y.to(dtype)
        if NEEDS_X:
            none = tl.zeros((ROWS, COLUMNS), tl.float32)
            back = product(of_row_y, rotated, none, PRECISION)
            tl.store(dx_columns + row.to(tl.int64)[:, None] * wide, back.to(dtype), inside)
        if NEEDS_BLOCKS:
            tile = tl.load(x_columns + row.to(tl.int64)[:, None] * x_row, inside, other=0.0)
            acc = product(tl.trans(tile), of_row_y, acc, PRECISION)
    if NEEDS_BLOCKS:
        # only the chunks themselves, not what is between them
        at, same = addresses(own, k, used, width, width * width, width, 1, total, ALONE)
        here = dblocks + (p.to(tl.int64) * experts + expert) * wide * width
        tl.store(here + at, acc, same)


def widest(x: Tensor) -> int:
    """Return the widest chunk whose product with `x` the forward takes."""
    return _WIDEST_SMALL if x.dtype is torch.float32 and is_small(x) else _WIDEST


def rotate(x: Tensor, blocks: Tensor) -> Tensor:
    """Return the product x · blockdiag(blocks).

    `x` `[*experts, *batch, d_in]`, `blocks` `[*experts, chunks, width, width]` → shape and dtype
    of `x`.
    """
    flat, own = _shaped(x, blocks)
    if own.shape[-1] > widest(x):
        return _butterfly_torch.rotate(x, blocks)
    experts, chunks, width, _ = own.shape
    rows = flat.shape[1]
    tile = rotate_tile(rows, width, x.dtype)
    tiles, used = _shared(chunks, width, tile.columns)
    parts, part = _parts(rows, tile.rows, experts * tiles)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        rotate_kernel, (experts * tiles, parts), flat, own, y, *flat.stride(), *own.stride(),
        rows, width, tiles, used, chunks * width, part,
        ALONE=used == width, PRECISION=precision(x.dtype), **tile.settings,
    )  # fmt: skip
    return y


def rotate_backward(
    dy: Tensor, x: Tensor, blocks: Tensor, needs_x: bool = True, needs_blocks: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of blocks; empty if not needed.

    Without `needs_blocks`, `x` may be empty: only its dtype is read.
    """
    left, own = _shaped(dy, blocks)
    half = _WIDEST_SMALL if is_small(dy) else _WIDEST
    if own.shape[-1] > (_WIDEST_FLOAT32 if x.dtype is torch.float32 else half):
        return _butterfly_torch.rotate_backward(dy, x, blocks, needs_x, needs_blocks)
    flat = _shaped(x, blocks)[0] if needs_blocks else left
    experts, chunks, width, _ = own.shape
    rows = left.shape[1]
    tile = rotate_backward_tile(rows, width, x.dtype)
    tiles, used = _shared(chunks, width, tile.columns)
    parts, part = _parts(rows, tile.rows, experts * tiles)
    dx = x.new_empty(dy.shape if needs_x else 0)
    dblocks = x.new_empty((parts, *blocks.shape) if needs_blocks else 0, dtype=torch.float32)
    launch(
        rotate_backward_kernel, (experts * tiles, parts), left, flat, own, dx, dblocks,
        *left.stride(), *flat.stride(), *own.stride(), rows, experts, width, tiles, used,
        chunks * width, part,
        ALONE=used == width, NEEDS_X=needs_x, NEEDS_BLOCKS=needs_blocks,
        PRECISION=precision(x.dtype), **tile.settings,
    )  # fmt: skip
    return dx, added(dblocks, blocks.dtype) if needs_blocks else blocks.new_empty(0)


def _shaped(x: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` as `[experts, rows, d_in]`, `blocks` as `[experts, chunks, width, width]`."""
    own = blocks.reshape(-1, *blocks.shape[-3:])  # [experts, chunks, width, width]
    return x.reshape(own.shape[0], -1, x.shape[-1]), own  # [experts, rows, d_in]


def _shared(chunks: int, width: int, columns: int) -> tuple[int, int]:
    """Return how many tiles the chunks take, and the features of each."""
    together = min(chunks, columns // width)
    return triton.cdiv(chunks, together), together * width


def _parts(rows: int, tall: int, programs: int) -> tuple[int, int]:
    """Return into how many parts to split the rows to keep the GPU busy, and the rows of each."""
    tiles = triton.cdiv(rows, tall)
    parts = max(1, min(triton.cdiv(_PROGRAMS, programs), tiles))
    part = triton.cdiv(max(tiles, 1), parts) * tall
    return max(1, triton.cdiv(rows, part)), part
