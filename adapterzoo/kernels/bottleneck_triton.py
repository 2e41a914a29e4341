"""The bottleneck in Triton: one pass forward with h on chip, one pass over dy in the backward.

A program of the forward takes a block of rows: it computes h from all features of x, then its part
of the result's features; programs with the same block compute the same h. The backward reads dy
once for the gradients of φ(h), of the up projection and of its bias; the two remaining products are
those of a low-rank update, by its kernels. There are no atomics: the same operands give the same
bits.

Products are in the dtype of the matrices, sums and φ are float32; h and φ(h) are rounded to that
dtype, as in the definition. Widths that a program cannot keep take the torch path; cuBLAS is fast
for products of that size.
"""

# functions under triton.jit have no types to declare
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import compose_triton, low_rank, low_rank_triton
from .bottleneck import DERIVATIVES, FUNCTIONS, bottleneck_torch, bottleneck_torch_backward, formula
from .ops import launch
from .tiles_triton import FEW, Tile, cut, parted, precision, product

# the widest h that a program keeps
_WIDEST, _WIDEST_OF_FLOAT32 = 256, 64
# all programs of a block of rows compute h
_PROGRAMS = 128


# the tiles are the largest that spill no register on sm_80, sm_90 and sm_100


def bottleneck_tile(rows: int, width: int, dtype: torch.dtype) -> Tile:
    """Return the configuration for a number of rows, a width and the dtype of the matrices."""
    few = rows <= FEW
    if dtype is torch.float32:
        return Tile(16 if few else 64, 32, 32 if width <= 32 else 64, 4 if few else 8, 3)
    kept = cut(width) if width <= 64 else triton.next_power_of_2(width)
    return Tile(16 if few else 64, 64, kept, 4 if kept <= 64 else 8, 3 if kept <= 128 else 2)


@triton.jit
def phi(h, PHI: tl.constexpr):
    """Return the activation of a float32 tile."""
    if PHI == "relu":
        # NaN stays NaN
        h = tl.where(h < 0.0, 0.0, h)
    elif PHI == "leaky_relu":
        h = tl.where(h < 0.0, 0.01 * h, h)
    elif PHI == "sigmoid":
        h = tl.sigmoid(h)
    elif PHI == "silu":
        h = h * tl.sigmoid(h)
    elif PHI == "quick_gelu":
        h = h * tl.sigmoid(1.702 * h)
    elif PHI == "tanh":
        square = h * h
        series = h * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
        small = tl.exp(-2.0 * tl.abs(h))
        far = (1.0 - small) / (1.0 + small)
        # far from zero 1 − e⁻²ʰ does not cancel; near it, the next term of the series is 6e-9
        h = tl.where(square < 0.0225, series, tl.where(h < 0.0, -far, far))
    elif PHI == "gelu":
        h = 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476))
    elif PHI == "gelu_tanh":
        # (1 + tanh z) / 2 = σ(2 z)
        h = h * tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
    return h


@triton.jit(do_not_specialize=["rows"])
def bottleneck_kernel(
    to, x, down, down_bias, up, up_bias, out, h, to_row, to_col, x_row, x_col, down_row, down_col,
    up_row, up_col, rows, d_model, width, part, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, STAGES: tl.constexpr,
    PHI: tl.constexpr, KEEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write h and, for features p · part to (p + 1) · part, to + scaling · (φ(h) upᵀ + up_bias)."""
    p = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RANK)
    dtype = down.dtype.element_ty
    x_rows = x + row.to(tl.int64)[:, None] * x_row
    down_rows = down + r.to(tl.int64)[None, :] * down_row
    acc = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(0, d_model, COLUMNS):
        k = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (k < d_model)[None, :]
        tile = tl.load(x_rows + k.to(tl.int64)[None, :] * x_col, inside, other=0.0).to(dtype)
        factor = tl.load(
            down_rows + k.to(tl.int64)[:, None] * down_col,
            (k < d_model)[:, None] & (r < width)[None, :],
            other=0.0,
        )
        acc = product(tile, factor, acc, PRECISION)
    bias = tl.load(down_bias + r, r < width, other=0.0).to(tl.float32)[None, :]
    inner = (acc + bias).to(dtype)
    if KEEPS:
        here = h + row.to(tl.int64)[:, None] * width + r[None, :]
        tl.store(here, inner, (row < rows)[:, None] & (r < width)[None, :] & (p == 0))
    # φ of the padding is multiplied by zeros of up
    left = phi(inner.to(tl.float32), PHI).to(dtype)
    to_rows = to + row.to(tl.int64)[:, None] * to_row
    up_cols = up + r.to(tl.int64)[:, None] * up_col
    out_rows = out + row.to(tl.int64)[:, None] * d_model
    for first in tl.range(p * part, min(d_model, (p + 1) * part), COLUMNS, num_stages=STAGES):
        n = first + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (n < d_model)[None, :]
        factor = tl.load(
            up_cols + n.to(tl.int64)[None, :] * up_row,
            (r < width)[:, None] & (n < d_model)[None, :],
            other=0.0,
        )
        update = product(left, factor, tl.zeros((ROWS, COLUMNS), tl.float32), PRECISION)
        update += tl.load(up_bias + n, n < d_model, other=0.0).to(tl.float32)[None, :]
        whole = tl.load(to_rows + n.to(tl.int64)[None, :] * to_col, inside, other=0.0)
        whole = whole.to(tl.float32) + scaling * update
        tl.store(out_rows + n[None, :], whole.to(out.dtype.element_ty), inside)


def bottleneck(
    to: Tensor,
    x: Tensor | None,
    down: Tensor,
    down_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    scaling: float,
    activation: str,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """Return the sum `[*batch, d_model]` of the definition, and h `[*batch, width]`.

    `to` and `x` (None: `to`) `[*batch, d_model]`, `down` `[width, d_model]`, `up`
    `[d_model, width]`. Without `keeps` h is empty.
    """
    width, d_model = down.shape
    widest = _WIDEST_OF_FLOAT32 if down.dtype is torch.float32 else _WIDEST
    if width > widest:
        return bottleneck_torch(to, x, down, down_bias, up, up_bias, scaling, activation, keeps)
    flat = to.reshape(-1, d_model)  # [rows, d_model]
    read = flat if x is None else x.reshape(-1, d_model)  # [rows, d_model]
    rows = flat.shape[0]
    tile = bottleneck_tile(rows, width, down.dtype)
    blocks = triton.cdiv(rows, tile.rows)
    parts, part = parted(d_model, tile.columns, blocks, _PROGRAMS)
    out = torch.empty(to.shape, dtype=to.dtype, device=to.device)
    h = down.new_empty((*to.shape[:-1], width) if keeps else 0)
    launch(
        bottleneck_kernel, (blocks, parts), flat, read, down, down_bias.contiguous(), up,
        up_bias.contiguous(), out, h if keeps else None, *flat.stride(), *read.stride(),
        *down.stride(), *up.stride(), rows, d_model, width, part, scaling,
        PHI=formula(activation), KEEPS=keeps, PRECISION=precision(down.dtype), **tile.pipelined,
    )  # fmt: skip
    return out, h


def bottleneck_backward(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    down: Tensor,
    up: Tensor,
    scaling: float,
    activation: str,
    adds: bool,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (plus `dy` with `adds`), down, bias, up, bias; empty: not needed.

    Without `needs_down`, `x` may be empty: only its dtype is read.
    """
    needs_x, needs_down, needs_down_bias, needs_up, needs_up_bias = needs or (True,) * 5
    width = down.shape[0]
    if width > compose_triton._WIDEST_RANK:
        return bottleneck_torch_backward(dy, x, h, down, up, scaling, activation, adds, *needs)
    needs_h = needs_x or needs_down or needs_down_bias
    u = FUNCTIONS[activation](h) if needs_up else h  # [*batch, width]
    # only the dtype and the length of the bias matter
    bias = up.new_empty(up.shape[0]) if needs_up_bias else None
    needs = False, False, needs_up_bias, needs_h, needs_up
    _, _, of_up_bias, du, of_up = compose_triton.compose_backward(
        dy, dy, None, bias, u, up, scaling, False, *needs
    )
    dx, of_down, of_down_bias = x.new_empty(0), h.new_empty(0), h.new_empty(0)
    if needs_h:
        dh = DERIVATIVES[formula(activation)](du, h)  # [*batch, width]
    if needs_down_bias:
        of_down_bias = dh.reshape(-1, width).sum(0)  # [width]
    if needs_x and adds:
        dx = low_rank_triton.expand(dy, dh, down.T, 1.0)  # [*batch, d_model]
    of_x = needs_x and not adds
    if of_x or needs_down:
        alone, of_down = low_rank.shrink_torch_backward(dh, x, down, 0.0, None, of_x, needs_down)
        dx = alone if of_x else dx
    return dx, of_down, of_down_bias, of_up, of_up_bias
