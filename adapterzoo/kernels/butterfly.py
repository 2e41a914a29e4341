"""Block butterfly rotations of features, without permutation matrices or dense rotations.

Paper: Liu et al. 2023, arXiv:2311.06243, §4. Rot = M_{m−1} ⋯ M_0 with M_i = P_i diag(Q_i) P_iᵀ:
a block of factor i mixes two halves of b / 2 features, 2ⁱ halves apart. So each factor mixes only
features within chunks of b · 2^(m−1), and permutations are views.
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd, prod
from typing import cast

import torch
from torch import Tensor

from . import ops
from .ops import exactly, product

# narrower blocks waste matrix units, and a batch of their products costs more than its FLOPs
_NARROWEST = 16
# for wider chunks, m products with blocks of b cost less than one with chunks of b · 2^(m−1)
_WIDEST = 256


def butterfly_reference(x: Tensor, Q: Tensor, transposed: bool = False) -> Tensor:
    """Return the definition, factor by factor: x · Rot, or x · Rotᵀ.

    Args:
        x: `[*batch, d_in]`, or `[*experts, *batch, d_in]` where Q has experts.
        Q: `[*experts, m, d_in / b, b, b]`; for m > 1, b is even and b · 2^(m−1) divides d_in.
        transposed: whether to multiply by Rotᵀ, which undoes Rot.

    Returns:
        Shape and dtype of x.
    """
    m, blocks, b = Q.shape[-4:-1]
    rows = prod(x.shape[Q.dim() - 4 : -1])
    y = x.reshape(*Q.shape[:-4], rows, blocks * b)  # [*experts, rows, d_in]
    for i in range(m) if transposed else reversed(range(m)):
        factor = Q[..., i, :, :, :].to(x.dtype)  # [*experts, blocks, b, b]
        if i:
            y = _swapped(y, blocks >> i, 2, 1 << i)
        y = rotate(y, factor.mT if transposed else factor)
        if i:
            y = _swapped(y, blocks >> i, 1 << i, 2)
    return y.reshape(x.shape)  # [*experts, *batch, d_in]


def butterfly(x: Tensor, Q: Tensor, transposed: bool = False) -> Tensor:
    """Return `butterfly_reference` with all factors folded into one: a single pass over x.

    Args:
        x: `[*batch, d_in]`, or `[*experts, *batch, d_in]` where Q has experts.
        Q: `[*experts, m, d_in / b, b, b]`, preferably in float32 even if x is narrower.
        transposed: whether to multiply by Rotᵀ.

    Returns:
        Shape and dtype of x; under autocast its dtype.
    """
    return rotated(x, folded(Q), transposed)


def rotated(x: Tensor, Q: Tensor, transposed: bool = False) -> Tensor:
    """Return `butterfly_reference`, which for a single factor is one pass over x.

    Args:
        x: `[*batch, d_in]`, or `[*experts, *batch, d_in]` where Q has experts.
        Q: `[*experts, m, chunks, width, width]`, from `folded`.
        transposed: whether to multiply by Rotᵀ.

    Returns:
        Shape and dtype of x; under autocast its dtype.

    Raises:
        KernelError: the mode is `"triton"`, and Triton cannot take the operands.
    """
    if Q.shape[-4] > 1:
        return butterfly_reference(x, Q, transposed)
    blocks = Q.squeeze(-4)  # [*experts, chunks, width, width]
    # autograd over the torch form saves no more than the operator, and runs faster
    run = _rotate if ops.asks_triton(x) and not ops.is_reference() else rotate
    out: Tensor = run(x, blocks.mT if transposed else blocks)  # [*experts, *batch, d_in]
    return out


def folded(Q: Tensor) -> Tensor:
    """Return the same rotation as one factor, or as all m if one would be too wide to be faster.

    A layer saves x and these blocks for the backward: `d_in · b · 2^(m−1)` numbers.

    Args:
        Q: `[*experts, m, d_in / b, b, b]`.

    Returns:
        `[*experts, 1, chunks, width, width]`, or Q itself.
    """
    if not folds(Q):
        return Q
    # the kernels pack narrow chunks themselves
    packs = ops.asks_triton(Q) and Q.dtype is not torch.float64
    return fold(Q, 1 if packs else _NARROWEST).unsqueeze(-4)


def folds(Q: Tensor) -> bool:
    """Return whether `folded` would return one factor."""
    m, _, b = Q.shape[-4:-1]
    return m == 1 or b << (m - 1) <= _WIDEST


def fold(Q: Tensor, narrowest: int = _NARROWEST) -> Tensor:
    """Return the m factors as one block-diagonal rotation, in the dtype of Q.

    Args:
        Q: `[*experts, m, d_in / b, b, b]`.
        narrowest: narrower chunks are merged into wider ones of at most this width.

    Returns:
        `[*experts, chunks, width, width]`; the width is a multiple of b · 2^(m−1).
    """
    return widened(products(Q)[-1], narrowest)


def rotate(x: Tensor, blocks: Tensor) -> Tensor:
    """Return the product x · blockdiag(blocks).

    `x` `[*experts, *batch, d_in]`, `blocks` `[*experts, chunks, width, width]` → shape and dtype
    of `x`; under autocast its dtype.
    """
    # `matmul` of three dimensions is the same product after two more views
    product = torch.bmm if blocks.dim() == 3 else torch.matmul
    rotated = product(_parts(x, blocks), blocks.to(x.dtype))  # [*experts, chunks, rows, width]
    return rotated.transpose(-3, -2).reshape(x.shape)  # [*experts, *batch, d_in]


def rotate_backward(
    dy: Tensor, x: Tensor, blocks: Tensor, needs_x: bool = True, needs_blocks: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of blocks; empty if not needed.

    Differentiable again. Without `needs_blocks`, `x` may be empty: only its dtype is read.
    """
    dx, dblocks = x.new_empty(0), blocks.new_empty(0)
    if needs_x:
        dx = rotate(dy, blocks.mT).to(x.dtype).contiguous()
    if needs_blocks:
        dblocks = dots(x, dy, blocks).to(blocks.dtype)
    return dx, dblocks


def dots(x: Tensor, y: Tensor, blocks: Tensor) -> Tensor:
    """Return xᵀ y of each chunk, in the shape of `blocks`.

    `x` and `y` `[*experts, *batch, d_in]`, `blocks` `[*experts, chunks, width, width]`.
    """
    return _parts(x, blocks).mT @ _parts(y, blocks)


def _parts(x: Tensor, blocks: Tensor) -> Tensor:
    """Return `x` `[*experts, *batch, d_in]` as `[*experts, chunks, rows, width]`."""
    *experts, chunks, width, _ = blocks.shape
    rows = prod(x.shape[len(experts) : -1])
    # [*experts, rows, chunks, width] before the transposition
    return x.reshape(*experts, rows, chunks, width).transpose(-3, -2)


def in_layout_of(y: Tensor, x: Tensor, Q: Tensor) -> Tensor:
    """Return `y` with the strides of `x`, so that a layer computes both with the same operations.

    A linear layer rounds differently for an input with other strides: a rotation by the identity
    would change the last bits of its output.

    Args:
        y: `[*experts, *batch, d_in]`, x rotated by Q.
        x: same shape; an expanded row (stride 0) is copied once, and not at all if y needs a
            gradient, since that differs by position.
        Q: `[*experts, m, chunks, width, width]`.
    """
    if y.stride() == x.stride():
        return y
    if any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)):
        # the values of y are equal along a row that was expanded, but not between experts or
        # features, and their gradients are not equal
        own = [*range(Q.dim() - 4), -1]
        differ = any(x.shape[i] > 1 and not x.stride(i) for i in own)
        if differ or (y.requires_grad and torch.is_grad_enabled()):
            return y
    steps = sorted((step, n) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1 and step)
    # overlapping windows hold fewer numbers than y
    if any(wider < step * n for (step, n), (wider, _) in pairwise(steps)):
        return y
    once = tuple(slice(None) if step else slice(1) for step in x.stride())
    out = y.new_empty_strided(y[once].shape, x.stride())
    return out.copy_(y[once]).expand(x.shape)  # [*batch, d_in]


def products(Q: Tensor) -> list[Tensor]:
    """Return M_i ⋯ M_0 for each factor i, by chunks: `[*experts, d_in / width, width, width]`.

    The width is b · 2ⁱ: factor i multiplies pairs of neighbors among the chunks before it.

    Args:
        Q: `[*experts, m, d_in / b, b, b]`.
    """
    found = [Q[..., 0, :, :, :]]
    with exactly(Q.device):
        for i in range(1, Q.shape[-4]):
            pairs = found[-1].unflatten(-3, (-1, 2))  # [*experts, chunks, 2, width / 2, width / 2]
            factor = by_pairs(Q[..., i, :, :, :], i)  # [*experts, chunks, 2, width, width / 2]
            made = factor @ pairs  # [*experts, chunks, 2, width, width / 2]
            found.append(made.transpose(-3, -2).flatten(-2))
    return found


def by_pairs(factor: Tensor, i: int) -> Tensor:
    """Return factor i by chunks, each split by the two earlier chunks that it multiplies.

    Args:
        factor: `[*experts, d_in / b, b, b]`.
        i: number of the factor, from 1.

    Returns:
        `[*experts, d_in / width, 2, width, width / 2]`, the width being b · 2ⁱ.
    """
    n, half = 1 << i, factor.shape[-1] // 2
    parts = factor.unflatten(-3, (-1, n)).unflatten(-2, (2, half)).unflatten(-1, (2, half))
    # [*experts, chunks, n, 2, half, 2, half] to [*experts, chunks, 2, 2, n, half, half]
    parts = parts.movedim((-2, -4, -5), (-5, -4, -3))
    own = torch.eye(n, device=factor.device, dtype=factor.dtype).view(n, 1, n, 1)
    whole = parts.unsqueeze(-2) * own  # [*experts, chunks, 2, 2, n, half, n, half]
    return cast("Tensor", whole.flatten(-5, -3).flatten(-2))


def from_pairs(whole: Tensor, b: int) -> Tensor:
    """Return the blocks `[*experts, d_in / b, b, b]` from which `by_pairs` built this."""
    half = b // 2
    n = whole.shape[-1] // half
    # as in `by_pairs`, [*experts, chunks, 2, 2, n, half, n, half]
    parts = whole.unflatten(-1, (n, half)).unflatten(-3, (2, n, half))
    own = parts.diagonal(dim1=-4, dim2=-2)  # [*experts, chunks, 2, 2, half, half, n]
    blocks = own.movedim((-1, -4, -3, -5), (-5, -4, -3, -2))
    # [*experts, chunks, n, 2, half, 2, half] until here
    return cast("Tensor", blocks.flatten(-2).flatten(-3, -2).flatten(-4, -3))


def widened(chunks: Tensor, narrowest: int = _NARROWEST) -> Tensor:
    """Return neighboring chunks as one wider chunk, whose other parts are zero.

    Args:
        chunks: `[*experts, chunks, chunk, chunk]`.
        narrowest: see `fold`.

    Returns:
        `[*experts, d_in / width, width, width]`.
    """
    n, chunk, _ = chunks.shape[-3:]
    together = gcd(n, max(1, narrowest // chunk))
    if together == 1:
        return chunks
    own = torch.eye(together, device=chunks.device, dtype=chunks.dtype)
    shape = *chunks.shape[:-3], -1, together, chunk, 1, chunk
    parts = chunks.reshape(shape) * own.view(together, 1, together, 1)
    return parts.flatten(-4, -3).flatten(-2)  # [*experts, d_in / width, width, width]


def without(Q: Tensor, dropped: Tensor) -> Tensor:
    """Return the factors `[*lead, m, blocks, b, b]` with the identity for the dropped blocks.

    `dropped` `[*lead, m, blocks]`.
    """
    eye = torch.eye(Q.shape[-1], device=Q.device, dtype=Q.dtype)
    return torch.where(dropped[..., None, None], eye, Q)


def _swapped(y: Tensor, chunks: int, outer: int, inner: int) -> Tensor:
    """Return `y` `[.., d_in]` with the `[outer, inner]` half-blocks of each chunk transposed."""
    table: Tensor = y.unflatten(-1, (chunks, outer, inner, -1))  # [.., chunks, outer, inner, b/2]
    return table.transpose(-3, -2).flatten(-4)  # [.., d_in]


_rotate, _rotate_backward = product(
    "rotate(Tensor x, Tensor blocks) -> Tensor",
    "butterfly_triton.rotate",
    (rotate, rotate_backward),
    lambda x, blocks: x.new_empty(x.shape),
    narrows=(0,),
    width=lambda blocks: blocks.shape[-3] * blocks.shape[-1],
)
