"""The composition of a rescaled layer in Triton: gain ∘ (y + s · t bᵀ − bias) + bias, one pass.

The backward reads dy and y once and computes all five gradients: the program of a block of rows
writes dy ∘ gain, keeps dt, and writes its parts of the sums over rows, which a reduction then adds.
There are no atomics: the same operands give the same bits.

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

from ._compose_torch import divisor
from ._launch import launch
from ._tiles_triton import FEW, Tile, added, cut, is_small, loaded, parted, precision, product

# above this, the parts of dyᵀ t are more bytes than reading dy twice
_WIDEST_RANK = 64


# the tiles are the largest that spill no register on sm_80, sm_90 and sm_100


def compose_tile(rows: int, rank: int, dtype: torch.dtype) -> Tile:
    """Return the configuration for rows, rank (0: no update) and the dtype of the products."""
    if not rank:
        return Tile(16, 256, 16, 4, 2)
    if dtype is torch.float32:
        return Tile(16 if rows <= FEW else 64, 64, 32, 4, 2)
    return Tile(16 if rows <= FEW else 64, 128, cut(rank), 4, 2)


def compose_backward_tile(rows: int, rank: int, dtype: torch.dtype, small: bool = False) -> Tile:
    """Return the configuration of the backward; see `compose_tile`, and `is_small` for `small`."""
    if not rank:
        return Tile(16 if rows <= FEW else 64, 64, 16, 4, 2)
    if dtype is torch.float32:
        return Tile(16, 32, 32, 4, 2) if rows <= FEW else Tile(32 if small else 64, 32, 32, 8, 2)
    if rows <= FEW:
        return Tile(16, 64, cut(rank), 4, 2)
    # few tall blocks: each writes a whole part of dyᵀ t
    return Tile(128, 64 if rank <= 16 else 32, cut(rank), 8, 2)


@triton.jit(do_not_specialize=["rows"])
def compose_kernel(
    y, gain, bias, t, b, out, y_row, y_col, t_row, t_col, b_row, b_col, rows, width, rank, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, UPDATES: tl.constexpr,
    BIASED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out = gain ∘ (y + scaling · t bᵀ − bias) + bias."""
    tiles = tl.cdiv(width, COLUMNS)
    row = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    n = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (n < width)[None, :]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if UPDATES:
        for low in range(0, rank, RANK):
            r = low + tl.arange(0, RANK)
            left = loaded(t, row, t_row, rows, r, t_col, rank)
            factor = loaded(b, r, b_col, rank, n, b_row, width)
            if WIDE:
                left, factor = left.to(tl.float32), factor.to(tl.float32)
            acc = product(left, factor, acc, PRECISION)
    whole = loaded(y, row, y_row, rows, n, y_col, width).to(tl.float32)
    if UPDATES:
        whole += scaling * acc
    factors = tl.load(gain + n, n < width, other=0.0).to(tl.float32)[None, :]
    if BIASED:
        # not (whole − bias) · gain + bias, so that a gain of 1 keeps the bits
        own = tl.load(bias + n, n < width, other=0.0).to(tl.float32)[None, :]
        whole = whole * factors + (1.0 - factors) * own
    else:
        whole *= factors
    here = out + row.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(here, whole.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows"])
def compose_backward_kernel(
    dy, y, gain, bias, t, b, of_y, of_t, of_b, dots, sums, dy_row, dy_col, y_row, y_col, t_row,
    t_col, b_row, b_col, rows, width, rank, part, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, BIASED: tl.constexpr,
    WIDE: tl.constexpr, NEEDS_Y: tl.constexpr, NEEDS_T: tl.constexpr, NEEDS_B: tl.constexpr,
    NEEDS_DOTS: tl.constexpr, NEEDS_SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of rows and the features of part p, if needed.

    of_y = dy ∘ gain, of_t[p] = scaling · of_y b, of_b[block] = dyᵀ t,
    dots[block] = Σ dy ∘ (y − bias) and sums[block] = Σ dy.
    """
    tiles = tl.cdiv(rank, RANK)
    block = tl.program_id(0) // tiles
    row = block * ROWS + tl.arange(0, ROWS)
    # only the first of the programs that share a block of rows computes what has no rank
    first_tile = tl.program_id(0) % tiles == 0
    r = (tl.program_id(0) % tiles) * RANK + tl.arange(0, RANK)
    p = tl.program_id(1)
    within = (row < rows)[:, None] & (r < rank)[None, :]
    y_rows = y + row.to(tl.int64)[:, None] * y_row
    of_rows = of_y + row.to(tl.int64)[:, None] * width
    if NEEDS_B:
        right = loaded(t, row, t_row, rows, r, t_col, rank)
        if WIDE:
            right = right.to(tl.float32)
    if NEEDS_T:
        acc = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(p * part, min(width, (p + 1) * part), COLUMNS):
        n = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (n < width)[None, :]
        of_block = block.to(tl.int64) * width + n
        tile = loaded(dy, row, dy_row, rows, n, dy_col, width)
        factors = tl.load(gain + n, n < width, other=0.0).to(tl.float32)[None, :]
        scaled = (tile.to(tl.float32) * factors).to(of_y.dtype.element_ty)
        if NEEDS_Y:
            tl.store(of_rows + n[None, :], scaled, inside & first_tile)
        if NEEDS_DOTS:
            before = tl.load(y_rows + n.to(tl.int64)[None, :] * y_col, inside, other=0.0)
            before = before.to(tl.float32)
            if BIASED:
                before -= tl.load(bias + n, n < width, other=0.0).to(tl.float32)[None, :]
            dot = tl.sum(tile.to(tl.float32) * before, 0)
            tl.store(dots + of_block, dot, (n < width) & first_tile)
        if NEEDS_SUMS:
            tl.store(sums + of_block, tl.sum(tile.to(tl.float32), 0), (n < width) & first_tile)
        of_factor = (n < width)[:, None] & (r < rank)[None, :]
        if NEEDS_T:
            factor = loaded(b, n, b_row, width, r, b_col, rank)
            if WIDE:
                factor = factor.to(tl.float32)
            acc = product(scaled.to(factor.dtype), factor, acc, PRECISION)
        if NEEDS_B:
            none = tl.zeros((COLUMNS, RANK), tl.float32)
            own = product(tl.trans(tile.to(right.dtype)), right, none, PRECISION)
            tl.store(of_b + of_block[:, None] * rank + r[None, :], own, of_factor)
    if NEEDS_T:
        here = of_t + (p.to(tl.int64) * rows + row)[:, None] * rank + r[None, :]
        tl.store(here, (scaling * acc).to(of_t.dtype.element_ty), within)


def compose(
    y: Tensor, gain: Tensor, bias: Tensor | None, t: Tensor | None, b: Tensor | None, scaling: float
) -> Tensor:
    """Return the sum gain ∘ (y + scaling · t bᵀ − bias) + bias, rounded once.

    `y` `[*batch, d_out]`, `gain` and `bias` `[d_out]`, `t` `[*batch, rank]`, `b` `[d_out, rank]`
    → shape and dtype of `y`.
    """
    width = y.shape[-1]
    flat = y.reshape(-1, width)  # [rows, d_out]
    rows = flat.shape[0]
    left, rank, dtype = _update(t, b)
    tile = compose_tile(rows, rank, dtype)
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    launch(
        compose_kernel, (triton.cdiv(rows, tile.rows) * triton.cdiv(width, tile.columns),), flat,
        gain.contiguous(), _contiguous(bias), left, b, out, *flat.stride(), *_strides(left),
        *_strides(b), rows, width, rank, scaling,
        UPDATES=rank > 0, BIASED=bias is not None, WIDE=dtype is torch.float32,
        PRECISION=precision(dtype), **tile.settings,
    )  # fmt: skip
    return out


def compose_backward(
    dy: Tensor,
    kept: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    t: Tensor | None,
    b: Tensor | None,
    scaling: float,
    tells: bool,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of y, gain, bias, t and b; empty if not needed.

    `kept` is y or, with `tells`, the output. Without `needs_gain` it may be empty.
    """
    needs_y, needs_gain, needs_bias, needs_t, needs_b = needs
    of_y, of_gain, of_bias, of_t, of_b = (gain.new_empty(0) for _ in range(5))
    updates = t is not None and b is not None
    fused = b is not None and b.shape[1] <= _WIDEST_RANK
    # the output includes the update, y does not
    hidden = needs_gain and updates and not tells
    scaled, dots, sums, dt, dyt = _one_pass(
        dy, kept, gain, bias, t if fused else None, b if fused else None, scaling,
        needs_y or (needs_t and updates and not fused), needs_gain,
        needs_bias and bias is not None, needs_t, needs_b or hidden,
    )  # fmt: skip
    of_y = scaled if needs_y else of_y
    if needs_gain:
        of_gain = dots / divisor(gain, kept.dtype, bias is not None) if tells else dots
    if needs_bias and bias is not None:
        of_bias = (sums * (1 - gain)).to(bias.dtype)
    if t is not None and b is not None:
        if not fused:
            dt, dyt = _products(dy, scaled, t, b, scaling, needs_t, needs_b or hidden)
        if needs_t:
            of_t = dt.to(t.dtype).view(t.shape)  # [*batch, rank]
        if hidden:
            of_gain = of_gain + scaling * (dyt * b).sum(-1)
        if needs_b:
            of_b = (scaling * gain.unsqueeze(-1) * dyt).to(b.dtype)  # [d_out, rank]
    return of_y, of_gain, of_bias, of_t, of_b


def _one_pass(
    dy: Tensor,
    kept: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    t: Tensor | None,
    b: Tensor | None,
    scaling: float,
    needs_y: bool,
    needs_dots: bool,
    needs_sums: bool,
    needs_t: bool,
    needs_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the sums of the kernel's parts; without t and b, dt and dyᵀ t are empty."""
    width = dy.shape[-1]
    flat = dy.reshape(-1, width)  # [rows, d_out]
    before = kept.reshape(-1, width) if needs_dots else flat  # [rows, d_out]
    rows = flat.shape[0]
    left, rank, dtype = _update(t, b)
    needs_t, needs_b = needs_t and rank > 0, needs_b and rank > 0
    tile = compose_backward_tile(rows, rank, dtype, is_small(dy))
    blocks = triton.cdiv(rows, tile.rows)
    programs = blocks * max(triton.cdiv(rank, tile.rank), 1)
    parts, part = parted(width, tile.columns, programs)

    def room(needed: bool, *shape: int) -> Tensor:
        return torch.empty(shape if needed else 0, dtype=torch.float32, device=dy.device)

    of_y = dy.new_empty(dy.shape if needs_y else 0)
    dt, dyt = room(needs_t, parts, rows, rank), room(needs_b, blocks, width, rank)
    dots, sums = room(needs_dots, blocks, width), room(needs_sums, blocks, width)
    launch(
        compose_backward_kernel, (programs, parts), flat, before, gain.contiguous(),
        _contiguous(bias), left, b, of_y, dt, dyt, dots, sums, *flat.stride(), *before.stride(),
        *_strides(left), *_strides(b), rows, width, max(rank, 1), part, scaling,
        BIASED=bias is not None, WIDE=dtype is torch.float32, NEEDS_Y=needs_y, NEEDS_T=needs_t,
        NEEDS_B=needs_b, NEEDS_DOTS=needs_dots, NEEDS_SUMS=needs_sums, PRECISION=precision(dtype),
        **tile.settings,
    )  # fmt: skip
    dots, sums, dt, dyt = (
        added(v, torch.float32) if v.dim() > 1 else v for v in (dots, sums, dt, dyt)
    )
    return of_y, dots, sums, dt, dyt


def _products(
    dy: Tensor, scaled: Tensor, t: Tensor, b: Tensor, scaling: float, needs_t: bool, needs_b: bool
) -> tuple[Tensor, Tensor]:
    """Return dt `[*batch, rank]` and dyᵀ t `[d_out, rank]` in float32, for a large rank."""
    dtype = torch.promote_types(t.dtype, b.dtype)
    dt = dyt = b.new_empty(0)
    if needs_t:
        dt = scaled.to(dtype) @ b.to(dtype) * scaling  # [*batch, rank]
    if needs_b:
        flat = dy.reshape(-1, dy.shape[-1]).to(dtype)  # [rows, d_out]
        dyt = (flat.T @ t.reshape(-1, t.shape[-1]).to(dtype)).to(torch.float32)  # [d_out, rank]
    return dt, dyt


def _update(t: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, int, torch.dtype]:
    """Return `t` as `[rows, rank]`, the rank (0: no update) and the dtype of products."""
    if t is None or b is None:
        return None, 0, torch.float16
    return t.reshape(-1, b.shape[1]), b.shape[1], torch.promote_types(t.dtype, b.dtype)


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
