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

from . import butterfly, ops
from .ops import launch
from .tiles_triton import FEW, Tile, added, is_small, precision, product

# wider chunks do not fit the registers; cuBLAS is fast for them
_WIDEST = 128
# for the backward on GPUs with little shared memory; see `is_small`
_WIDEST_SMALL = 64
# narrower chunks share a tile: its rows of 128 bytes in half precision are whole memory requests
_NARROWEST = 64
# programs that keep the multiprocessors of a large GPU busy, several on each
_PROGRAMS = 512


# the tiles are the largest that spill no register on sm_80, sm_90 and sm_100


def rotate_tile(rows: int, width: int, sums: bool = False) -> Tile:
    """Return the configuration for rows and chunk width; it has no rank.

    Its columns hold as many whole chunks as fit, at least one. `sums`: over rows, as in a backward.
    """
    columns = max(_NARROWEST, triton.next_power_of_2(width))
    warps = 8 if columns == 128 else 4
    if sums and columns == 128:
        return Tile(32, columns, 0, warps, 3)
    return Tile(16, columns, 0, warps, 2) if rows <= FEW else Tile(64, columns, 0, warps, 3)


@triton.jit
def covered(own, k, used, total, ALONE: tl.constexpr):
    """Return which columns of a tile are features; `ALONE`: the tile is one chunk."""
    if ALONE:
        return k < used
    return (k < used) & (own * used + k < total)


@triton.jit
def addresses(own, k, used, width, of_chunk, of_row, of_col, total, ALONE: tl.constexpr):
    """Return the offsets of a tile's block-diagonal matrix in `blocks`, and its elements' mask."""
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
    x, other, blocks, y, sums, x_expert, x_row, x_col, other_expert, other_row, other_col,
    of_expert, of_chunk, of_row, of_col, rows, experts, width, tiles, used, total, part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, ALONE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write y = x · blockdiag(blocks) of one tile's chunks, and sums[p] = otherᵀ x of part p.

    A result is left out if y or the other is None. A backward rotates dy back, and the other is
    the input of its forward.
    """
    expert, own = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    p = tl.program_id(1)
    k = tl.arange(0, COLUMNS)
    column = own * used + k
    valid = covered(own, k, used, total, ALONE)
    x_columns = x + expert * x_expert + column.to(tl.int64)[None, :] * x_col
    # an integer of 1 is a number at compile time
    wide = tl.cast(total, tl.int64)
    if y is not None:
        y_columns = y + expert * rows * wide + column[None, :]
        at, same = addresses(own, k, used, width, of_chunk, of_row, of_col, total, ALONE)
        rotation = tl.load(blocks + expert * of_expert + at, same, other=0.0).to(x.dtype.element_ty)
    if other is not None:
        other_columns = other + expert * other_expert + column.to(tl.int64)[:, None] * other_col
        acc = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    for first in tl.range(p * part, min(rows, (p + 1) * part), ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & valid[None, :]
        tile = tl.load(x_columns + row.to(tl.int64)[:, None] * x_row, inside, other=0.0)
        if y is not None:
            none = tl.zeros((ROWS, COLUMNS), tl.float32)
            rotated = product(tile, rotation, none, PRECISION)
            here = y_columns + row.to(tl.int64)[:, None] * wide
            tl.store(here, rotated.to(y.dtype.element_ty), inside)
        if other is not None:
            # a transposed tile would be loaded to registers
            at_left = other_columns + row.to(tl.int64)[None, :] * other_row
            left = tl.load(at_left, valid[:, None] & (row < rows)[None, :], other=0.0)
            acc = product(left, tile, acc, PRECISION)
    if other is not None:
        # only the chunks themselves, not the elements between them
        at, same = addresses(own, k, used, width, width * width, width, 1, total, ALONE)
        here = sums + (p.to(tl.int64) * experts + expert) * wide * width
        tl.store(here + at, acc, same)


def rotate(x: Tensor, blocks: Tensor) -> Tensor:
    """Return the product x · blockdiag(blocks).

    `x` `[*experts, *batch, d_in]`, `blocks` `[*experts, chunks, width, width]` → shape and dtype
    of `x`.
    """
    if not _takes(x, blocks, _WIDEST):
        return butterfly.rotate(x, blocks)
    return _rotate(x, blocks, None)[0]


def rotate_backward(
    dy: Tensor, x: Tensor, blocks: Tensor, needs_x: bool = True, needs_blocks: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of blocks; empty if not needed.

    Without `needs_blocks`, `x` may be empty: only its dtype is read.
    """
    if not _takes(x, blocks, _WIDEST_SMALL if is_small(dy) else _WIDEST):
        return butterfly.rotate_backward(dy, x, blocks, needs_x, needs_blocks)
    return _rotate(dy.to(x.dtype), blocks.mT, x if needs_blocks else None, needs_x)


def _takes(x: Tensor, blocks: Tensor, widest: int) -> bool:
    """Return whether the kernel computes a product; on a GPU, not in float32."""
    return blocks.shape[-1] <= widest and (ops.INTERPRETED or x.dtype is not torch.float32)


def _rotate(
    x: Tensor, blocks: Tensor, other: Tensor | None, needs_y: bool = True
) -> tuple[Tensor, Tensor]:
    """Return x · blockdiag(blocks), and the chunks of otherᵀ x; empty if not needed."""
    flat, own = _shaped(x, blocks)
    left = None if other is None else _shaped(other, blocks)[0]
    experts, chunks, width, _ = own.shape
    rows = flat.shape[1]
    tile = rotate_tile(rows, width, left is not None)
    together = min(chunks, tile.columns // width)
    tiles, used = triton.cdiv(chunks, together), together * width
    parts, part = _parts(rows, tile.rows, experts * tiles)
    y = x.new_empty(x.shape) if needs_y else None
    sums = None if left is None else x.new_empty((parts, *blocks.shape), dtype=torch.float32)
    launch(
        rotate_kernel, (experts * tiles, parts), flat, left, own, y, sums, *flat.stride(),
        *(flat if left is None else left).stride(), *own.stride(), rows, experts, width, tiles,
        used, chunks * width, part,
        ALONE=used == width, PRECISION=precision(x.dtype), **tile.pipelined,
    )  # fmt: skip
    return (
        x.new_empty(0) if y is None else y,
        blocks.new_empty(0) if sums is None else added(sums, blocks.dtype),
    )


def _shaped(x: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` as `[experts, rows, d_in]`, `blocks` as `[experts, chunks, width, width]`."""
    own = blocks.reshape(-1, *blocks.shape[-3:])  # [experts, chunks, width, width]
    return x.reshape(own.shape[0], -1, x.shape[-1]), own  # [experts, rows, d_in]


def _parts(rows: int, tall: int, programs: int) -> tuple[int, int]:
    """Return the number of parts of the rows that keeps the GPU busy, and the rows of each."""
    tiles = triton.cdiv(rows, tall)
    parts = max(1, min(triton.cdiv(_PROGRAMS, programs), tiles))
    part = triton.cdiv(max(tiles, 1), parts) * tall
    return max(1, triton.cdiv(rows, part)), part
