"""Cayley transforms folded to one rotation per chunk in Triton, one kernel per direction.

A program takes one chunk, or as many narrow ones as fill its tile. It keeps each factor as a
block-diagonal matrix of the chunk's features, in the butterfly's order, so that the fold is a
product of m tiles and permutations are addresses.

I + S has the symmetric part I, so elimination needs no pivoting: all blocks of a tile go
through its b steps together. It is in float64, as the definition's solve is: in float32, Q Qᵀ = I
holds only to 5e-4 at 179 degrees and to nothing at 180. Products of factors are in float32.
"""

# functions under triton.jit have no types to declare
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import cayley
from .ops import launch
from .tiles_triton import Tile, is_small, product

# a program cannot keep wider chunks of a single factor, or of a product of several
_WIDEST, _WIDEST_PRODUCT = 64, 32
# GPUs with little shared memory are also slow in float64
_WIDEST_SMALL = 32


# the tiles are the largest that spill no register on sm_80, sm_90 and sm_100


def cayley_fold_tile(chunk: int) -> Tile:
    """Return the configuration for the features of a chunk; it has no rows and no rank."""
    columns = max(16, triton.next_power_of_2(chunk))
    # a single warp reduces without shared memory
    return Tile(columns, columns, 0, {16: 1, 32: 4}.get(columns, 8), 1)


def takes(R: Tensor) -> bool:
    """Return whether the kernels take chunks as wide as those of `R` `[.., m, blocks, b, b]`."""
    m, b = R.shape[-4], R.shape[-1]
    widest = _WIDEST if m == 1 else _WIDEST_PRODUCT
    return b << (m - 1) <= (min(widest, _WIDEST_SMALL) if is_small(R) else widest)


@triton.jit
def places(features, i, B: tl.constexpr, M: tl.constexpr):
    """Return the block of factor i that rotates each feature, and the feature's place in it."""
    # an odd block has no halves
    if M == 1:
        return features // B, features % B
    # two halves of b / 2 features, 2ⁱ halves apart
    HALF: tl.constexpr = B // 2
    block = ((features // B >> i) << i) + features // HALF % (1 << i)
    return block, (features // HALF >> i) % 2 * HALF + features % HALF


@triton.jit
def tile_of(width, COLUMNS: tl.constexpr, USED: tl.constexpr):
    """Return a program's features, of whole chunks, and which of them exist."""
    k = tl.arange(0, COLUMNS)
    features = tl.program_id(0) * USED + k
    return features, (k < USED) & (features < width)


@triton.jit
def within(block, inside):
    """Return which elements of a tile are in the same block."""
    return (block[:, None] == block[None, :]) & inside[:, None] & inside[None, :]


@triton.jit
def chunks_at(features, inside, width, WIDE: tl.constexpr):
    """Return the offsets of the chunks of WIDE features, and their elements."""
    at = tl.program_id(1).to(tl.int64) * width * WIDE + features.to(tl.int64)[:, None] * WIDE
    return at + (features % WIDE)[None, :], within(features // WIDE, inside)


@triton.jit
def factor_at(features, inside, width, i, B: tl.constexpr, M: tl.constexpr):
    """Return the offsets of factor i's blocks, the blocks, their elements, and places in them.

    The blocks are counted over all factors.
    """
    block, place = places(features, i, B, M)
    same = within(block, inside)
    block = (tl.program_id(1).to(tl.int64) * M + i) * (width // B) + block
    return block[:, None] * (B * B) + place[:, None] * B + place[None, :], block, same, place


@triton.jit
def inverse(matrix, same, place, B: tl.constexpr):
    """Return the inverse of each block by Gauss-Jordan elimination without pivoting.

    Args:
        matrix: float64, zero between blocks, except for ones on the diagonal outside the blocks.
        same: which elements are in a block.
        place: place of a row or column in its block, -1 outside the blocks.
        B: number of rows of a block.
    """
    for k in range(B):
        chosen = place == k
        row = tl.sum(tl.where(chosen[:, None], matrix, 0.0), 0)
        column = tl.sum(tl.where(chosen[None, :], matrix, 0.0), 1)
        # 1 / pivot, for all columns of the pivot's block
        inverted = tl.where(chosen, 1.0 / tl.where(chosen, column, 1.0), 0.0)
        scale = tl.sum(tl.where(same, inverted[:, None], 0.0), 0)
        row = tl.where(chosen, 1.0, row) * scale
        rest = tl.where(chosen[None, :], 0.0, matrix) - column[:, None] * row[None, :]
        matrix = tl.where(same, tl.where(chosen[:, None], row[None, :], rest), matrix)
    return matrix


@triton.jit
def cayley_fold_kernel(
    parameters, dropped, whole, factors, width,
    B: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, USED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write Q = 2 (I + S)⁻¹ − I of one tile's blocks, and the product of its factors."""
    features, inside = tile_of(width, COLUMNS, USED)
    k = tl.arange(0, COLUMNS)
    identity = tl.where(k[:, None] == k[None, :], 1.0, 0.0)
    folded = identity
    for j in range(M):
        here, block, same, place = factor_at(features, inside, width, M - 1 - j, B, M)
        transposed = block[:, None] * (B * B) + place[None, :] * B + place[:, None]
        upper = tl.load(parameters + here, same, other=0.0).to(tl.float64)
        lower = tl.load(parameters + transposed, same, other=0.0).to(tl.float64)
        matrix = (upper - lower) * 0.5 + identity
        matrix = inverse(matrix, same, tl.where(inside, place, -1), B)
        factor = (2.0 * matrix - identity).to(tl.float32)
        if dropped is not None:
            drops = tl.load(dropped + block, inside, other=1) != 0
            factor = tl.where(drops[:, None], identity, factor)
        if M > 1:
            tl.store(factors + here, factor, same)
            none = tl.zeros((COLUMNS, COLUMNS), tl.float32)
            folded = product(folded, factor, none, PRECISION)
        else:
            folded = factor
    at, square = chunks_at(features, inside, width, B << (M - 1))
    tl.store(whole + at, folded, square)


@triton.jit
def write_gradient(
    dR, here, dropped, block, of_factor, factor, same, inside, PRECISION: tl.constexpr
):  # fmt: skip
    """Write the gradient of one factor's R: −2 Xᵀ dQ Xᵀ, X = (Q + I) / 2, antisymmetrised."""
    of_factor = tl.where(same, of_factor, 0.0)
    if dropped is not None:
        drops = tl.load(dropped + block, inside, other=1) != 0
        of_factor = tl.where(drops[:, None], 0.0, of_factor)
    none = tl.zeros_like(of_factor)
    k = tl.arange(0, of_factor.shape[0])
    twice = tl.trans(factor + tl.where(k[:, None] == k[None, :], 1.0, 0.0))  # 2 Xᵀ
    of_S = product(product(twice, of_factor, none, PRECISION), twice, none, PRECISION)  # −2 dS
    of_R = (tl.trans(of_S) - of_S) * 0.25
    tl.store(dR + here, of_R.to(dR.dtype.element_ty), same)


@triton.jit
def cayley_fold_backward_kernel(
    grad, whole, factors, dropped, dR, width,
    B: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr, USED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of R of one tile's blocks."""
    features, inside = tile_of(width, COLUMNS, USED)
    at, square = chunks_at(features, inside, width, B << (M - 1))
    of_whole = tl.load(grad + at, square, other=0.0).to(tl.float32)
    if M > 1:
        none = tl.zeros((COLUMNS, COLUMNS), tl.float32)
        rest = tl.load(whole + at, square, other=0.0)
        for j in range(M - 1):
            here, block, same, _ = factor_at(features, inside, width, M - 1 - j, B, M)
            factor = tl.load(factors + here, same, other=0.0)
            # the factors are rotations: Qᵀ removes the leftmost one from the product
            rest = product(tl.trans(factor), rest, none, PRECISION)
            of_factor = product(of_whole, tl.trans(rest), none, PRECISION)
            write_gradient(dR, here, dropped, block, of_factor, factor, same, inside, PRECISION)
            of_whole = product(tl.trans(factor), of_whole, none, PRECISION)
    here, block, same, _ = factor_at(features, inside, width, 0, B, M)
    factor = tl.load(factors + here, same, other=0.0)
    write_gradient(dR, here, dropped, block, of_whole, factor, same, inside, PRECISION)


def cayley_fold(R: Tensor, dropped: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the folded rotations, and the factors; these are empty if there is one factor.

    `R` `[*lead, m, blocks, b, b]`, `dropped` `[*lead, m, blocks]`
    → `[*lead, chunks, b · 2^(m−1), b · 2^(m−1)]` and the shape of `R`, in the dtype of `R`.
    """
    m, blocks, b = R.shape[-4:-1]
    chunk = b << (m - 1)
    if not takes(R):
        return cayley.cayley_fold_torch(R, dropped)
    own = R.contiguous().view(-1, *R.shape[-4:])  # [lead, m, blocks, b, b]
    whole = R.new_empty((*R.shape[:-4], blocks * b // chunk, chunk, chunk))
    Q = R.new_empty(R.shape if m > 1 else 0)
    grid, settings = _launched(own)
    drops = None if dropped is None else dropped.contiguous()
    launch(
        cayley_fold_kernel, grid, own, drops, whole, Q, blocks * b, PRECISION="tf32x3", **settings
    )  # fmt: skip
    return whole, Q


def cayley_fold_backward(grad: Tensor, whole: Tensor, Q: Tensor, dropped: Tensor | None) -> Tensor:
    """Return the gradient of R from that of the folded rotations, and both outputs."""
    blocks, b = Q.shape[-3:-1]
    if not takes(Q):
        return cayley.cayley_fold_torch_backward(grad, whole, Q, dropped)
    dR = torch.empty(Q.shape, dtype=Q.dtype, device=Q.device)
    grid, settings = _launched(Q.reshape(-1, *Q.shape[-4:]))
    drops = None if dropped is None else dropped.contiguous()
    launch(
        cayley_fold_backward_kernel, grid, grad.contiguous(), whole.contiguous(), Q.contiguous(),
        drops, dR, blocks * b, PRECISION="tf32x3", **settings,
    )  # fmt: skip
    return dR


def _launched(R: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid for `R` `[lead, m, blocks, b, b]`, and the sizes that are constants."""
    lead, m, blocks, b, _ = R.shape
    chunk = b << (m - 1)
    tile = cayley_fold_tile(chunk)
    used = tile.columns // chunk * chunk
    sizes = {"B": b, "M": m, "COLUMNS": tile.columns, "USED": used}
    sizes |= {"num_warps": tile.warps, "num_stages": tile.stages}
    return (triton.cdiv(blocks * b, used), lead), sizes
