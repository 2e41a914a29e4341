"""The composition of a rescaled layer in Triton: gain ∘ (y + s · t bᵀ − bias) + bias, one pass.

Without a gain this is the update of a low-rank adapter, y + s · t bᵀ, and its backward is also that
of a bottleneck's up projection.

The backward reads dy and y once and computes all five gradients: the program of a block of rows
writes dy ∘ gain and its parts of dt and of the sums over rows. A second kernel adds the parts and
makes the gradients of them. There are no atomics: the same operands give the same bits.

It reads the output, from which the gain's gradient follows by a division, or, where a gain is too
small for that, y from before the gain. Then the share of t bᵀ in the gain's gradient follows from
dyᵀ t, which b needs anyway: Σ dy ∘ (t bᵀ) = rowsum((dyᵀ t) ∘ b).

The gain, sums and intermediate values are float32; products are in the wider dtype of the factors.
"""

# functions under triton.jit have no types to declare
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import low_rank
from .compose import least
from .ops import launch
from .tiles_triton import (
    FEW,
    RowPlan,
    Tile,
    contiguous,
    is_small,
    keep,
    loaded,
    parted,
    precision,
    product,
    product_float32,
    rows_of,
    stacked_strides,
    strides,
    tall,
    update_of,
    update_tile,
)

# above this, the parts of dyᵀ t are as many bytes as reading dy twice, and cuBLAS wins
_WIDEST_RANK = 32
# numbers of dt that a program of the second kernel adds
_NUMBERS = 1024


# the tiles spill no register on sm_80, sm_90 and sm_100, and `small` ones on sm_86, sm_89 and
# sm_120; those of the backward have enough bytes on their way to keep the memory busy


def compose_tile(rows: int, rank: int, dtype: torch.dtype, small: bool = False) -> Tile:
    """Return the configuration for rows, rank (0: no update) and the dtype of the products.

    `small`: see `is_small`.
    """
    if not rank:
        return Tile(16, 256, 16, 4, 2)
    if rank > 64 and rows > FEW and dtype is not torch.float32:
        # each program reads t and b again
        return Tile(128, 128, 64, 8, 2)
    return update_tile(tall(rows), rank, dtype, small)


def compose_backward_tile(
    rows: int, rank: int, dtype: torch.dtype, alone: bool = False, needs_b: bool = True
) -> Tile:
    """Return the configuration of the backward, with the whole rank or none; see `compose_tile`.

    `alone`: nothing is read but dy and the factors. `needs_b`: dyᵀ t is written.
    """
    fused = 0 < rank <= _WIDEST_RANK
    padded = max(16, triton.next_power_of_2(rank)) if fused else 16
    if fused and dtype is torch.float32:
        # wider products would wait for dy
        return Tile(32, 32, max(32, padded), 4, 3)
    if rows <= FEW:
        return Tile(16, 32, padded, 4, 3)
    columns = 64 if alone else 32
    if fused and not alone and not needs_b:
        # one warp group: Triton lets a second one overwrite what the first still multiplies
        return Tile(64, columns, padded, 4, 3)
    # few tall blocks: each writes a whole part of dyᵀ t
    return Tile(128, columns, padded, 8, 3)


def finish_tile(rank: int) -> Tile:
    """Return the configuration of the second kernel; its rows are blocks of rows."""
    padded = min(64, max(16, triton.next_power_of_2(rank)))
    return Tile(128 // padded, 32, padded, 4, 3)


@triton.jit(do_not_specialize=["rows", "head", "tokens", "threshold"])
def compose_kernel(
    y, gain, bias, t, b, scales, seed, plan, out, y_row, y_col, t_row, t_col, b_each, b_row, b_col,
    rows, width, rank, head, tokens, threshold, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out = mask ∘ (gain ∘ (y + s · t bᵀ − bias) + bias); what is None is left out.

    With a plan, t bᵀ is left out of rows without an adapter.
    """
    tiles = tl.cdiv(width, COLUMNS)
    adapter, row = rows_of(plan, head, tl.program_id(0) // tiles, rows, tokens, ROWS)
    first = (tl.program_id(0) % tiles) * COLUMNS
    n = first + tl.arange(0, COLUMNS)
    if y is not None:
        # before the product, which then does not wait for it
        whole = loaded(y, row, y_row, rows, n, y_col, width).to(tl.float32)
    if t is not None:
        end = rank
        if plan is not None:
            b += adapter.to(tl.int64) * b_each
            end = tl.where(adapter < 0, 0, rank)
        if scales is not None:
            scaling = tl.load(scales + adapter, adapter >= 0, other=0.0)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for low in range(0, end, RANK):
            r = low + tl.arange(0, RANK)
            left = loaded(t, row, t_row, rows, r, t_col, rank)
            factor = loaded(b, r, b_col, rank, n, b_row, width)
            if WIDE:
                left, factor = left.to(tl.float32), factor.to(tl.float32)
            acc = product(left, factor, acc, PRECISION)
        acc *= scaling
        if y is None:
            whole = acc
        elif plan is None:
            whole += acc
        else:
            # a sum with 0 would lose the sign of a zero
            whole = tl.where(adapter < 0, whole, whole + acc)
    if gain is not None:
        factors = tl.load(gain + n, n < width, other=0.0).to(tl.float32)[None, :]
        whole *= factors
    if bias is not None:
        # not (whole − bias) · gain + bias, so that a gain of 1 keeps the bits
        own = tl.load(bias + n, n < width, other=0.0).to(tl.float32)[None, :]
        whole += (1.0 - factors) * own
    if seed is not None:
        whole = tl.where(keep(tl.load(seed), row, first, COLUMNS, threshold), whole, 0.0)
    here = out + row.to(tl.int64)[:, None] * width + n[None, :]
    inside = (row < rows)[:, None] & (n < width)[None, :]
    tl.store(here, whole.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def compose_backward_kernel(
    dy, y, gain, bias, t, b, of_y, of_t, of_b, dots, sums, dy_row, dy_col, y_row, y_col, t_row,
    t_col, b_row, b_col, rows, width, rank, part, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr, NEEDS_Y: tl.constexpr, NEEDS_T: tl.constexpr, NEEDS_B: tl.constexpr,
    NEEDS_DOTS: tl.constexpr, NEEDS_SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what is needed of a block of rows and the features of part p.

    of_y = dy ∘ gain, of_t[p] = scaling · of_y b, of_b[block] = tᵀ dy,
    dots[block] = Σ dy ∘ (y − bias) and sums[block] = Σ dy.
    """
    block, p = tl.program_id(0), tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RANK)
    if NEEDS_B:
        left = tl.trans(loaded(t, row, t_row, rows, r, t_col, rank))
        if WIDE:
            left = left.to(tl.float32)
    if NEEDS_T:
        acc = tl.zeros((ROWS, RANK), tl.float32)
    for first in tl.range(p * part, min(width, (p + 1) * part), COLUMNS, num_stages=STAGES):
        n = first + tl.arange(0, COLUMNS)
        of_block = block.to(tl.int64) * width + n
        tile = loaded(dy, row, dy_row, rows, n, dy_col, width)
        scaled = tile
        if gain is not None:
            factors = tl.load(gain + n, n < width, other=0.0).to(tl.float32)[None, :]
            scaled = (tile.to(tl.float32) * factors).to(of_y.dtype.element_ty)
        if NEEDS_Y:
            here = of_y + row.to(tl.int64)[:, None] * width + n[None, :]
            tl.store(here, scaled, (row < rows)[:, None] & (n < width)[None, :])
        if NEEDS_DOTS:
            before = loaded(y, row, y_row, rows, n, y_col, width).to(tl.float32)
            if bias is not None:
                before -= tl.load(bias + n, n < width, other=0.0).to(tl.float32)[None, :]
            tl.store(dots + of_block, tl.sum(tile.to(tl.float32) * before, 0), n < width)
        if NEEDS_SUMS:
            tl.store(sums + of_block, tl.sum(tile.to(tl.float32), 0), n < width)
        if NEEDS_T:
            factor = loaded(b, n, b_row, width, r, b_col, rank)
            if WIDE:
                factor = factor.to(tl.float32)
            acc = product(scaled.to(factor.dtype), factor, acc, PRECISION)
        if NEEDS_B:
            none = tl.zeros((RANK, COLUMNS), tl.float32)
            own = product(left, tile.to(left.dtype), none, PRECISION)
            here = of_b + (block.to(tl.int64) * rank + r)[:, None] * width + n[None, :]
            tl.store(here, own, (r < rank)[:, None] & (n < width)[None, :])
    if NEEDS_T:
        here = of_t + (p.to(tl.int64) * rows + row)[:, None] * rank + r[None, :]
        within = (row < rows)[:, None] & (r < rank)[None, :]
        tl.store(here, (scaling * acc).to(of_t.dtype.element_ty), within)


@triton.jit(do_not_specialize=["parts_of_t", "parts_of_b", "parts_of_sums"])
def finish_kernel(
    of_t, of_b, dots, sums, gain, b, dt, db, dgain, dbias, b_row, b_col, numbers, width, rank,
    parts_of_t, parts_of_b, parts_of_sums, scaling, least,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, STAGES: tl.constexpr,
    NUMBERS: tl.constexpr, TELLS: tl.constexpr, HIDDEN: tl.constexpr, NEEDS_T: tl.constexpr,
    NEEDS_B: tl.constexpr, NEEDS_DOTS: tl.constexpr, NEEDS_SUMS: tl.constexpr,
):  # fmt: skip
    """Add the parts: the first programs write some numbers of dt, the others some rows of the rest.

    dt = Σ of_t, db = scaling · gain ∘ Σ of_b, dbias = (1 − gain) ∘ Σ sums (scaling · Σ sums without
    a gain), and dgain = Σ dots; HIDDEN: + scaling · rowsum(Σ of_b ∘ b); TELLS: divided by the gain,
    or by 1 below `least`. `parts_of_sums` are those of dots and sums.
    """
    flat = 0
    if NEEDS_T:
        flat = tl.cdiv(numbers, NUMBERS)
    if tl.program_id(0) < flat:
        i = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
        total = tl.zeros((NUMBERS,), tl.float32)
        here = of_t + i
        for _ in range(parts_of_t):
            total += tl.load(here, i < numbers, other=0.0)
            here += numbers
        tl.store(dt + i, total.to(dt.dtype.element_ty), i < numbers)
        return
    n = (tl.program_id(0) - flat) * COLUMNS + tl.arange(0, COLUMNS)
    there = n < width
    if gain is not None:
        factors = tl.load(gain + n, there, other=0.0).to(tl.float32)
    dot, own = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    if NEEDS_DOTS or NEEDS_SUMS:
        for first in tl.range(0, parts_of_sums, ROWS, num_stages=STAGES):
            block = first + tl.arange(0, ROWS)
            if NEEDS_DOTS:
                dot += tl.sum(loaded(dots, block, width, parts_of_sums, n, 1, width), 0)
            if NEEDS_SUMS:
                own += tl.sum(loaded(sums, block, width, parts_of_sums, n, 1, width), 0)
    if NEEDS_B or HIDDEN:
        for low in range(0, rank, RANK):
            r = low + tl.arange(0, RANK)
            total = tl.zeros((RANK, COLUMNS), tl.float32)
            for first in tl.range(0, parts_of_b, ROWS, num_stages=STAGES):
                block = first + tl.arange(0, ROWS)
                at = (block.to(tl.int64)[:, None] * rank + r[None, :])[:, :, None] * width
                inside = (block < parts_of_b)[:, None] & (r < rank)[None, :]
                each = tl.load(
                    of_b + at + n[None, None, :],
                    inside[:, :, None] & there[None, None, :],
                    other=0.0,
                )  # [ROWS, RANK, COLUMNS]
                total += tl.sum(each, 0)
            if HIDDEN:
                factor = loaded(b, r, b_col, rank, n, b_row, width).to(tl.float32)
                dot += scaling * tl.sum(total * factor, 0)
            if NEEDS_B:
                total *= scaling
                if gain is not None:
                    total *= factors[None, :]
                here = db + n.to(tl.int64)[None, :] * rank + r[:, None]
                within = (r < rank)[:, None] & there[None, :]
                tl.store(here, total.to(db.dtype.element_ty), within)
    if NEEDS_DOTS:
        if TELLS:
            dot /= tl.where(tl.abs(factors) < least, 1.0, factors)
        tl.store(dgain + n, dot, there)
    if NEEDS_SUMS:
        own *= scaling if gain is None else 1.0 - factors
        tl.store(dbias + n, own.to(dbias.dtype.element_ty), there)


def compose(
    y: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    t: Tensor | None,
    b: Tensor | None,
    scaling: float,
) -> Tensor:
    """Return the sum gain ∘ (y + scaling · t bᵀ − bias) + bias, rounded once.

    `y` `[*batch, d_out]`, `gain` (None: ones) and `bias` `[d_out]`, `t` `[*batch, rank]`, `b`
    `[d_out, rank]` → shape and dtype of `y`.
    """
    left = None if t is None else t.reshape(-1, t.shape[-1])  # [rows, rank]
    return write(y.new_empty(y.shape), y.reshape(-1, y.shape[-1]), left, b, scaling, gain, bias)


def write(
    out: Tensor,
    y: Tensor | None,
    t: Tensor | None = None,
    b: Tensor | None = None,
    scaling: float | Tensor = 1.0,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.0,
    noise: Tensor | None = None,
    plan: RowPlan | None = None,
) -> Tensor:
    """Write `compose` of rows `[rows, …]` into a contiguous `out`, without what is None.

    With `noise`, features are dropped from the result, and the others are not scaled. With a plan,
    `b` is `[n, d_out, rank]` and `scaling` may be `[n]`; rows without an adapter keep their bits.
    """
    width, (rank, dtype) = out.shape[-1], update_of(t, b)
    rows = out.numel() // max(width, 1)
    small, of = is_small(out), (rank, dtype)
    tile = update_tile(plan.tall, *of, small) if plan else compose_tile(rows, *of, small)
    blocks = plan.chunks if plan else triton.cdiv(rows, tile.rows)
    each = scaling if isinstance(scaling, Tensor) else None
    launch(
        compose_kernel, (blocks * triton.cdiv(width, tile.columns),), y, contiguous(gain),
        contiguous(bias), t, b, each, noise, plan and plan.values, out, *strides(y), *strides(t),
        *stacked_strides(b), rows, width, rank, plan.head if plan else 0,
        plan.tokens if plan else 1, low_rank.dropout_threshold(p),
        1.0 if each is not None else scaling,
        WIDE=dtype is torch.float32, PRECISION=precision(dtype), **tile.settings,
    )  # fmt: skip
    return out


def compose_backward(
    dy: Tensor,
    kept: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    t: Tensor | None,
    b: Tensor | None,
    scaling: float,
    tells: bool,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of y, gain, bias, t and b; empty if not needed.

    `kept` is y or, with `tells`, the output. Without `needs_gain` it may be empty, and without
    `needs_b` and `needs_gain` so may `t`: only its dtype is read. Without a gain, `bias` is only
    added: its gradient is scaling · Σ dy.
    """
    needs_y, needs_gain, needs_bias, needs_t, needs_b = needs
    width = dy.shape[-1]
    flat = dy.reshape(-1, width)  # [rows, d_out]
    before = kept.reshape(-1, width) if needs_gain else flat  # [rows, d_out]
    rows = flat.shape[0]
    left = None if t is None or b is None else t.reshape(-1, b.shape[1])  # [rows, rank]
    rank, dtype = update_of(t, b)
    needs_bias = needs_bias and bias is not None
    needs_t, needs_b = needs_t and rank > 0, needs_b and rank > 0
    # the output includes the update, y does not
    hidden = needs_gain and rank > 0 and not tells
    fused = rank <= _WIDEST_RANK
    of = {
        "NEEDS_Y": gain is not None and (needs_y or (needs_t and not fused)),
        "NEEDS_T": needs_t and fused,
        "NEEDS_B": (needs_b or hidden) and fused,
        "NEEDS_DOTS": needs_gain,
        "NEEDS_SUMS": needs_bias,
    }
    tile = compose_backward_tile(rows, rank, dtype, gain is None, of["NEEDS_B"])
    blocks = triton.cdiv(rows, tile.rows)
    parts, part = parted(width, tile.columns, blocks)

    def room(needed: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape if needed else 0, dtype=dtype, device=dy.device)

    of_y = room(of["NEEDS_Y"], *dy.shape, dtype=dy.dtype)
    of_t, of_b = room(of["NEEDS_T"], parts, rows, rank), room(of["NEEDS_B"], blocks, rank, width)
    dots, sums = room(needs_gain, blocks, width), room(needs_bias, blocks, width)
    launch(
        compose_backward_kernel, (blocks, parts if any(of.values()) else 0), flat, before,
        contiguous(gain), contiguous(bias), left, b, of_y, of_t, of_b, dots, sums,
        *flat.stride(), *before.stride(), *strides(left), *strides(b), rows, width, rank, part,
        scaling,
        WIDE=dtype is torch.float32, PRECISION=precision(dtype), **of, **tile.pipelined,
    )  # fmt: skip
    if left is not None and b is not None and not fused:
        if needs_t:
            scaled = flat if gain is None else of_y.view(rows, width)
            of_t = product_float32(scaled.to(dtype), b.to(dtype)).mul_(scaling).unsqueeze(0)
        if needs_b or hidden:
            of_b = product_float32(left.T.to(dtype), flat.to(dtype)).unsqueeze(0)
    dt = room(needs_t, *dy.shape[:-1], rank, dtype=dy.dtype if t is None else t.dtype)
    db = room(needs_b, width, rank, dtype=dy.dtype if b is None else b.dtype)
    dgain = room(needs_gain, width)
    dbias = room(needs_bias, width, dtype=dy.dtype if bias is None else bias.dtype)
    tile = finish_tile(rank)
    programs = triton.cdiv(dt.numel(), _NUMBERS)
    programs += triton.cdiv(width, tile.columns) if needs_b or needs_gain or needs_bias else 0
    launch(
        finish_kernel, (programs,), of_t, of_b, dots, sums, contiguous(gain), b, dt, db, dgain,
        dbias, *strides(b), dt.numel(), width, rank, of_t.shape[0], of_b.shape[0], blocks, scaling,
        least(dy.dtype, bias is not None),
        NUMBERS=_NUMBERS, TELLS=tells, HIDDEN=hidden, NEEDS_T=needs_t, NEEDS_B=needs_b,
        NEEDS_DOTS=needs_gain, NEEDS_SUMS=needs_bias, **tile.pipelined,
    )  # fmt: skip
    return of_y if needs_y else room(False, dtype=dy.dtype), dgain, dbias, dt, db
