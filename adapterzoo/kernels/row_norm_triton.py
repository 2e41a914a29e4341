"""DoRA's norms and gains in Triton, in one pass over w: ‖w + s · b a‖ without storing the sum.

‖w + s · b a‖² = ‖w‖² + 2 s · rowsum(b ∘ (w aᵀ + s/2 · b a aᵀ)): the squares and the product with
aᵀ share the pass, and a aᵀ is `[rank, rank]`. All sums are float32, and products are float32 even
if torch is set to round them, because the layer's whole output is divided by the norm.

If a row of the sum is less than half as long as the row of w, the terms cancel and digits are lost.
The program that finds such rows computes them again from the sum itself.
"""

# functions under triton.jit have no types to declare
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .low_rank_triton import shrunk
from .ops import launch
from .tiles_triton import Tile, is_small, product, product_float32, writes_float32

# a program cannot keep a larger rank
_WIDEST_RANK = 64
# up to this many rows, tall tiles would leave multiprocessors idle
_MANY = 4096


# the tiles are the largest that spill no register on sm_80, sm_90 and sm_100


def row_norm_tile(rows: int, rank: int, dtype: torch.dtype, small: bool = False) -> Tile:
    """Return the configuration for rows of w, the rank and the dtype of the products.

    `small`: see `is_small`.
    """
    # with 64 rows the compiler fails on sm_100, and the kernel is bound by memory anyway
    tall = 32 if rows > _MANY or rank > 16 else 16
    fused = rank <= _WIDEST_RANK
    columns = 32 if dtype is torch.float32 else 64 if fused and rank > 16 else 128
    if fused and rank > 16:
        if columns == 32:
            return Tile(16, columns, 64, 8 if small else 4, 2)
        return Tile(32, columns, 64, 8, 4)
    if fused:
        return Tile(tall, columns, 16, 4, 3)
    # without products, only w is loaded ahead
    return Tile(tall, max(64, columns), 16, 8 if small else 4, 4)


@triton.jit(do_not_specialize=["rows"])
def row_norm_kernel(
    w, a, b, gram, dots, m, norm, inverse, w_row, w_col, a_row, a_col, b_row, b_col, rows, width,
    rank, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ‖w + scaling · b a‖, or, with m, m divided by it and its inverse.

    Without gram = a aᵀ, dots = rowsum(b ∘ (w aᵀ + scaling/2 · b · gram)) is given.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RANK)
    w_rows = w + row.to(tl.int64)[:, None] * w_row
    b_rows = b + row.to(tl.int64)[:, None] * b_row
    if gram is not None:
        within = (row < rows)[:, None] & (r < rank)[None, :]
        left = tl.load(b_rows + r.to(tl.int64)[None, :] * b_col, within, other=0.0).to(tl.float32)
        square = (r < rank)[:, None] & (r < rank)[None, :]
        own = tl.load(gram + r[:, None] * rank + r[None, :], square, other=0.0)
        none = tl.zeros((ROWS, RANK), tl.float32)
        acc = product(left, own, none, "tf32x3") * (0.5 * scaling)
    squares = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, width, COLUMNS, num_stages=STAGES):
        k = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (k < width)[None, :]
        tile = tl.load(w_rows + k.to(tl.int64)[None, :] * w_col, inside, other=0.0)
        wide = tile.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        if gram is not None:
            factor = tl.load(
                a + k.to(tl.int64)[:, None] * a_col + r.to(tl.int64)[None, :] * a_row,
                (k < width)[:, None] & (r < rank)[None, :],
                other=0.0,
            )
            if WIDE:
                acc = product(wide, factor.to(tl.float32), acc, PRECISION)
            else:
                acc = product(tile, factor, acc, PRECISION)
    if gram is not None:
        left = tl.load(b_rows + r.to(tl.int64)[None, :] * b_col, within, other=0.0).to(tl.float32)
        dot = tl.sum(left * acc, 1)
    else:
        dot = tl.load(dots + row, row < rows, other=0.0)
    total = squares + 2.0 * scaling * dot
    cancels = squares > 4.0 * total
    if tl.max(cancels.to(tl.int32), 0) > 0:
        again = tl.zeros((ROWS,), tl.float32)
        for first in range(0, width, COLUMNS):
            k = first + tl.arange(0, COLUMNS)
            inside = (row < rows)[:, None] & (k < width)[None, :]
            update = tl.zeros((ROWS, COLUMNS), tl.float32)
            for low in range(0, rank, RANK):
                s = low + tl.arange(0, RANK)
                rows_of_b = tl.load(
                    b_rows + s.to(tl.int64)[None, :] * b_col,
                    (row < rows)[:, None] & (s < rank)[None, :],
                    other=0.0,
                )
                rows_of_a = tl.load(
                    a + s.to(tl.int64)[:, None] * a_row + k.to(tl.int64)[None, :] * a_col,
                    (s < rank)[:, None] & (k < width)[None, :],
                    other=0.0,
                )
                if WIDE:
                    rows_of_b, rows_of_a = rows_of_b.to(tl.float32), rows_of_a.to(tl.float32)
                update = product(rows_of_b, rows_of_a, update, PRECISION)
            tile = tl.load(w_rows + k.to(tl.int64)[None, :] * w_col, inside, other=0.0)
            whole = tile.to(tl.float32) + scaling * update
            again += tl.sum(whole * whole, 1)
        total = tl.where(cancels, again, total)
    length = tl.sqrt(total)
    if m is not None:
        zero = length == 0.0
        wide = tl.load(m + row, row < rows, other=0.0).to(tl.float32)
        # rounded correctly: a new gain is exactly one
        length = tl.where(zero, 1.0, length)
        tl.store(norm + row, tl.where(zero, 1.0, tl.div_rn(wide, length)), row < rows)
        tl.store(inverse + row, tl.where(zero, 0.0, 1.0 / length), row < rows)
    else:
        tl.store(norm + row, length, row < rows)


def row_norm(w: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """‖w + scaling · b a‖ over `d_in`.

    `w` `[*experts, d_out, d_in]`, `a` `[*experts, rank, d_in]`, `b` `[*experts, d_out, rank]` →
    `[*experts, d_out]` in float32.
    """
    out = torch.empty(w.shape[:-1], dtype=torch.float32, device=w.device)
    if not w.shape[-1]:
        return out.zero_()
    for own_w, own_a, own_b, norm in _by_expert(w, a, b, out):
        _write(own_w, own_a, own_b, scaling, None, norm, None)
    return out


def row_gain(w: Tensor, a: Tensor, b: Tensor, m: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Gains m / ‖w + scaling · b a‖, and 1 / ‖w + scaling · b a‖; 1 and 0 for a row of zeros.

    Shapes as for `row_norm`, and `m` `[*experts, d_out]`.
    """
    out = torch.empty(w.shape[:-1], dtype=torch.float32, device=w.device)
    inverse = torch.empty_like(out)
    if not w.shape[-1]:
        return out.fill_(1.0), inverse.zero_()
    for own_w, own_a, own_b, *rest in _by_expert(w, a, b, m.contiguous(), out, inverse):
        _write(own_w, own_a, own_b, scaling, *rest)
    return out, inverse


def _by_expert(w: Tensor, *others: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Return the tensors of each expert."""
    return [(w, *others)] if w.dim() == 2 else zip(w, *others, strict=True)


def _write(
    w: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float,
    m: Tensor | None,
    out: Tensor,
    inverse: Tensor | None,
) -> None:
    """Write the norms of one matrix, or with `m` the gains."""
    (rows, width), rank = w.shape, a.shape[0]
    dtype = torch.promote_types(torch.promote_types(w.dtype, a.dtype), b.dtype)
    fused = rank <= _WIDEST_RANK
    gram = _product(a, a)  # [rank, rank]
    dots = None
    if not fused:
        # w is read twice
        inner = torch.add(_product(w, a.to(dtype)), _product(b, gram), alpha=scaling / 2)
        dots = (inner * b).sum(-1)  # [d_out]
    tile = row_norm_tile(rows, rank, dtype, is_small(w))
    launch(
        row_norm_kernel, (triton.cdiv(rows, tile.rows),), w, a, b, gram if fused else None, dots,
        m, out, inverse, *w.stride(), *a.stride(), *b.stride(), rows, width, rank, scaling,
        WIDE=dtype is torch.float32, PRECISION="tf32x3", **tile.pipelined,
    )  # fmt: skip


def _product(x: Tensor, a: Tensor) -> Tensor:
    """Return the product x aᵀ `[rows, rank]` in float32; x is cast to the dtype of a."""
    if writes_float32(a):
        return product_float32(x.to(a.dtype), a.T)
    return shrunk(x, a, 0.0, None, torch.float32, "tf32x3")
