"""Functions of all Triton kernels: products of any dtype, dropout from a seed, sizes of tiles.

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

from . import _launch

_INTERPRETED = tl.constexpr(_launch.INTERPRETED)
# rows of a decoding step
FEW = 64
# shared memory of a program on an A100; GPUs of sm 86, 89 and 120 have 101,376
_LARGE = 166_912
# programs that keep the multiprocessors of a large GPU busy: three or four on each
_PROGRAMS = 512
# tiles that a program of a loop takes at least, so that it loads one while it computes another
_TILES = 4
# whether torch can ask cuBLAS for the sums of a product of half precision, since 2.8
_WRITES_FLOAT32 = hasattr(torch.ops.aten.mm, "dtype")


class Tile(NamedTuple):
    """One configuration of a kernel.

    Attributes:
        rows: of a program's tile.
        columns: features read or written at a time.
        rank: of the factors at a time; the true rank is padded to it or split into it.
        warps: of 32 threads.
        stages: how many tiles are loaded ahead.
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

        Of loops that do not, Triton loads only the operands of products ahead.
        """
        return {**self.settings, "STAGES": self.stages}


def precision(dtype: torch.dtype) -> str:
    """Return the precision of products of a dtype; for float32 it follows torch's setting.

    "tf32x3" adds the products of the rounding errors and differs from float32 in the last two bits.
    """
    return "tf32x3" if dtype is torch.float32 and not _is_tf32() else "tf32"


def _is_tf32() -> bool:
    """Return whether torch may round the operands of products in float32 to TF32 on CUDA."""
    matmul = torch.backends.cuda.matmul
    # since 2.9 both of torch's ways to set it change this, and the older way to read it may raise
    if hasattr(matmul, "fp32_precision"):
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def is_small(x: Tensor) -> bool:
    """Return whether `x` is on a GPU of sm 86, 89 or 120: less shared memory, sooner spills."""
    return shared_memory(x.device) < _LARGE


@cache
def shared_memory(device: torch.device) -> int:
    """Return how many bytes one program may use on a CUDA device; the interpreter has no limit."""
    if device.type != "cuda":
        return 1 << 30
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def cut(rank: int) -> int:
    """Return how much of the rank a program takes at a time; matrix units need at least 16."""
    return 16 if rank <= 16 else 64


def parted(width: int, columns: int, programs: int, most: int = _PROGRAMS) -> tuple[int, int]:
    """Return into how many parts to split the features to keep the GPU busy, and their width.

    Args:
        width: number of features.
        columns: of a tile.
        programs: that share the work of each part.
        most: programs in all.
    """
    tiles = triton.cdiv(width, columns)
    parts = max(1, min(most // max(programs, 1), tiles // _TILES))
    part = triton.cdiv(tiles, parts) * columns
    return triton.cdiv(width, part), part


def added(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the first dimension, always in the same order."""
    return (parts.sum(0) if parts.shape[0] != 1 else parts.squeeze(0)).to(dtype)


def product_float32(left: Tensor, right: Tensor) -> Tensor:
    """Return a product of operands of one dtype in float32; cuBLAS can write its own sums."""
    if left.is_cuda and left.dtype is not torch.float32 and _WRITES_FLOAT32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(torch.float32)


@triton.jit
def loaded(x, row, of_row, rows, column, of_column, columns):
    """Return a tile of x, 0 beyond its `rows` and `columns`."""
    at = x + row.to(tl.int64)[:, None] * of_row + column.to(tl.int64)[None, :] * of_column
    return tl.load(at, (row < rows)[:, None] & (column < columns)[None, :], other=0.0)


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
