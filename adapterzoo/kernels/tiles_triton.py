"""Functions for all Triton kernels: products in any dtype, dropout from a seed, tile sizes.

Addresses are computed in 64 bits, because row · stride can exceed 2³¹.
"""

# functions under triton.jit have no types to declare
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from . import ops
from .grouped import CHUNK, chunk_rows

_INTERPRETED = tl.constexpr(ops.INTERPRETED)
_CHUNK = tl.constexpr(CHUNK)
# number of rows of a decoding step
FEW = 64
# shared memory of a program on an A100; GPUs of sm 86, 89 and 120 have 101,376
_LARGE = 166_912
# programs that keep the multiprocessors of a large GPU busy: three or four on each
_PROGRAMS = 512
# minimum number of tiles per program with a loop, so that one loads while another is computed
_TILES = 4
# whether torch can ask cuBLAS for the sums of a product of half precision, since 2.8
_WRITES_FLOAT32 = hasattr(torch.ops.aten.mm, "dtype")


class Tile(NamedTuple):
    """One configuration of a kernel.

    Attributes:
        rows: number of rows of a program's tile.
        columns: number of features read or written at a time.
        rank: rank of the factors at a time; the true rank is padded to it or split into it.
        warps: number of warps, of 32 threads each.
        stages: number of tiles loaded ahead.
    """

    rows: int
    columns: int
    rank: int
    warps: int
    stages: int

    @property
    def settings(self) -> dict[str, int]:
        """The keyword arguments of a launch; without `RANK` for kernels without ranks."""
        sizes = {"ROWS": self.rows, "COLUMNS": self.columns}
        sizes |= {"RANK": self.rank} if self.rank else {}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}

    @property
    def pipelined(self) -> dict[str, int]:
        """Settings of a kernel whose loop names its stages.

        In other loops, Triton loads only the operands of products ahead.
        """
        return {**self.settings, "STAGES": self.stages}


class RowPlan(NamedTuple):
    """The rows of a mixed batch by adapter; see `grouped.plan_of`.

    Attributes:
        values: int32.
        batch: number of rows of the batch.
        tokens: number of tokens of each row.
        adapters: number of adapters.
    """

    values: Tensor
    batch: int
    tokens: int
    adapters: int

    @property
    def tall(self) -> int:
        """Maximum number of rows of a chunk."""
        return chunk_rows(self.tokens)

    @property
    def head(self) -> int:
        """The offset of the chunks."""
        return self.batch + self.adapters + 1

    @property
    def chunks(self) -> int:
        """The number of chunks; 0 without tokens."""
        return (self.values.shape[0] - self.head) // CHUNK if self.tokens else 0


def tall(rows: int) -> int:
    """Return the number of rows per program, given the number of all rows."""
    return 16 if rows <= FEW else 64


def precision(dtype: torch.dtype) -> str:
    """Return the precision of products of a dtype; for float32 it follows torch's setting.

    "tf32x3" adds the products of the rounding errors and differs from float32 in the last two bits.
    """
    matmul = torch.backends.cuda.matmul
    # since 2.9 both of torch's ways to set it change this, and the older way to read it may raise
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    rounds = getattr(matmul, name) in ("tf32", True)
    return "tf32x3" if dtype is torch.float32 and not rounds else "tf32"


def is_small(x: Tensor) -> bool:
    """Return whether `x` is on a GPU of sm 86, 89 or 120: less shared memory, sooner spills."""
    return shared_memory(x.device) < _LARGE


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes that one program may use on a CUDA device; the interpreter has no limit."""
    if device.type != "cuda":
        return 1 << 30
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def cut(rank: int) -> int:
    """Return the part of the rank that a program takes at a time; matrix units need at least 16."""
    return 16 if rank <= 16 else 64


def parted(width: int, columns: int, programs: int, most: int = _PROGRAMS) -> tuple[int, int]:
    """Return the number of parts of the features that keeps the GPU busy, and their width.

    Args:
        width: number of features.
        columns: number of columns of a tile.
        programs: number of programs that share the work of each part.
        most: maximum number of programs.
    """
    tiles = triton.cdiv(width, columns)
    parts = max(1, min(most // max(programs, 1), tiles // _TILES))
    part = triton.cdiv(tiles, parts) * columns
    return triton.cdiv(width, part), part


def added(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the first dimension, always in the same order."""
    return (parts.sum(0) if parts.shape[0] != 1 else parts.squeeze(0)).to(dtype)


def update_tile(rows: int, rank: int, dtype: torch.dtype, small: bool = False) -> Tile:
    """Return the configuration of an update for the rows of a tile; see `compose_triton`."""
    if dtype is torch.float32:
        return Tile(rows, 64, 32, 8 if small and rows > 16 else 4, 2)
    return Tile(rows, 64 if small and rank > 16 else 128, cut(rank), 4, 2)


def update_of(t: Tensor | None, b: Tensor | None) -> tuple[int, torch.dtype]:
    """Return the rank (0: no update) and the dtype of products."""
    if t is None or b is None:
        return 0, torch.float16
    return b.shape[-1], torch.promote_types(t.dtype, b.dtype)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor without gaps; None stays None."""
    return None if tensor is None else tensor.contiguous()


def strides(tensor: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a matrix; 0 for None."""
    return (0, 0) if tensor is None else tensor.stride()


def stacked_strides(factor: Tensor | None) -> tuple[int, ...]:
    """Return the strides of factors `[n, rows, columns]`, or 0 and those of one factor."""
    if factor is None:
        return 0, 0, 0
    return factor.stride() if factor.dim() == 3 else (0, *factor.stride())


def writes_float32(x: Tensor) -> bool:
    """Return whether cuBLAS can write its own sums, in float32, for operands like `x`."""
    return x.is_cuda and x.dtype is not torch.float32 and _WRITES_FLOAT32


def product_float32(left: Tensor, right: Tensor) -> Tensor:
    """Return a product of operands of one dtype in float32, rounded once if possible."""
    if writes_float32(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(torch.float32)


@triton.jit
def loaded(x, row, of_row, rows, column, of_column, columns):
    """Return a tile of x, 0 beyond its `rows` and `columns`."""
    at = x + row.to(tl.int64)[:, None] * of_row + column.to(tl.int64)[None, :] * of_column
    return tl.load(at, (row < rows)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def rows_at(plan, place, end, rows, tokens):
    """Return the rows at some positions of a mixed batch's order, and `rows` beyond the end.

    Without a plan (None) the rows are in order.
    """
    row = place
    if plan is not None:
        row = tl.load(plan + place // tokens, place < end, other=0) * tokens + place % tokens
    return tl.where(place < end, row, rows)


@triton.jit
def rows_of(plan, head, block, rows, tokens, ROWS: tl.constexpr):
    """Return the adapter of a block of rows (-1: none) and its rows, `rows` where there is none.

    With a plan the block is one of its chunks; without (None), all rows are in order.
    """
    adapter, row = 0, block * ROWS + tl.arange(0, ROWS)
    if plan is not None:
        chunk = plan + head + block * _CHUNK
        place = tl.load(chunk + 1) + tl.arange(0, ROWS)
        adapter, row = tl.load(chunk), rows_at(plan, place, tl.load(chunk + 2), rows, tokens)
    return adapter, row


@triton.jit
def product(left, right, acc, PRECISION: tl.constexpr):
    """Add a product: acc + left · right, accumulated in float32; both operands of one dtype."""
    # the interpreter multiplies bfloat16 as if it were integers
    if _INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc)
    return tl.dot(left, right, acc, input_precision=PRECISION)


@triton.jit
def keep(seed, rows, first, COLUMNS: tl.constexpr, threshold):
    """Return which features of a tile dropout keeps, from seed, row and column alone.

    Philox4x32 with 7 rounds (Salmon et al. 2011, table 2), 16 bits for each feature, so that one
    call draws eight of them.

    Args:
        seed: int64.
        rows: numbers of the rows, `[ROWS]`, below 2³².
        first: number of the first column, a multiple of 8.
        COLUMNS: a power of 2, at least 8.
        threshold: how many of 2¹⁶ equally likely numbers drop a feature.
    """
    groups = first // 8 + tl.arange(0, COLUMNS // 8)
    row = rows.to(tl.uint32)[:, None] + tl.zeros_like(groups).to(tl.uint32)[None, :]
    group = tl.zeros_like(row) + groups.to(tl.uint32)[None, :]
    zero = tl.zeros_like(row)
    w0, w1, w2, w3 = tl.philox(seed, row, group, zero, zero, n_rounds=7)
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # [ROWS, COLUMNS / 8, 2, 2]
    halves = tl.join(words & 0xFFFF, words >> 16)  # [ROWS, COLUMNS / 8, 2, 2, 2]
    return halves.reshape(rows.shape[0], COLUMNS) >= threshold
