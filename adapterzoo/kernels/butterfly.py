"""Block butterfly rotations of features, without permutation matrices or dense rotations.

Paper: Liu et al. 2023, arXiv:2311.06243, §4. Rot = M_{m−1} ⋯ M_0 with M_i = P_i diag(Q_i) P_iᵀ:
a block of factor i mixes two halves of b / 2 features, 2ⁱ halves apart. So no factor leaves its
chunk of b · 2^(m−1) features, and permutations are views.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from .exact import exactly

# products of narrower blocks waste a matrix unit, and a batch of them costs more than its FLOPs
_NARROWEST = 16
# from here on m products with blocks of b cost less than one with chunks of b · 2^(m−1)
_WIDEST = 256


def butterfly_reference(x: Tensor, Q: Tensor, transposed: bool = False) -> Tensor:
    """The definition, factor by factor: x · Rot, or x · Rotᵀ.

    Args:
        x: `[*batch, d_in]`, or `[*experts, *batch, d_in]` where Q has experts.
        Q: `[*experts, m, d_in / b, b, b]`; for m > 1, b is even and b · 2^(m−1) divides d_in.
        transposed: whether to multiply by Rotᵀ, which undoes Rot.

    Returns:
        Shape and dtype of x.
    """
    m, blocks, b = Q.shape[-4:-1]
    y = x.reshape(*Q.shape[:-4], -1, blocks * b)  # [*experts, rows, d_in]
    for i in range(m) if transposed else reversed(range(m)):
        factor = Q[..., i, :, :, :].to(x.dtype)  # [*experts, blocks, b, b]
        if i:
            y = _swapped(y, blocks >> i, 2, 1 << i)
        y = _rotated(y, factor.mT if transposed else factor)
        if i:
            y = _swapped(y, blocks >> i, 1 << i, 2)
    return y.reshape(x.shape)


def butterfly(x: Tensor, Q: Tensor, transposed: bool = False) -> Tensor:
    """`butterfly_reference` with all factors folded into one: a single pass over x.

    Args:
        x: `[*batch, d_in]`, or `[*experts, *batch, d_in]` where Q has experts.
        Q: `[*experts, m, d_in / b, b, b]`, best in float32 also where x is narrower.
        transposed: whether to multiply by Rotᵀ.

    Returns:
        Shape and dtype of x; under autocast its dtype.
    """
    return butterfly_reference(x, folded(Q), transposed)


def folded(Q: Tensor) -> Tensor:
    """The same rotation in one factor, or in all m where one is too wide to pay.

    A layer saves x and these blocks for the backward, `d_in · b · 2^(m−1)` numbers.

    Args:
        Q: `[*experts, m, d_in / b, b, b]`.

    Returns:
        `[*experts, 1, chunks, width, width]`, or Q itself.
    """
    m, _, b = Q.shape[-4:-1]
    return Q if m > 1 and b << (m - 1) > _WIDEST else fold(Q).unsqueeze(-4)


def fold(Q: Tensor) -> Tensor:
    """The m factors as one block-diagonal rotation, in the dtype of Q.

    Args:
        Q: `[*experts, m, d_in / b, b, b]`.

    Returns:
        `[*experts, chunks, width, width]`; the width is a multiple of b · 2^(m−1).
    """
    m, blocks, b = Q.shape[-4:-1]
    chunk = b << (m - 1)
    # neighbours share one wider block, whose other parts are zero
    width = chunk * gcd(blocks * b // chunk, max(1, _NARROWEST // chunk))
    if m == 1:
        together = width // b
        own = torch.eye(together, device=Q.device, dtype=Q.dtype).view(together, 1, together, 1)
        grouped = Q.reshape(*Q.shape[:-4], -1, together, b, 1, b)
        return (grouped * own).flatten(-4, -3).flatten(-2)  # [*experts, chunks, width, width]
    eye = torch.eye(width, device=Q.device, dtype=Q.dtype)
    rows = eye.repeat(1, blocks * b // width).expand(*Q.shape[:-4], -1, -1)  # [.., width, d_in]
    with exactly(Q.device):
        turned = butterfly_reference(rows, Q)  # [*experts, width, d_in]
    chunks: Tensor = turned.unflatten(-1, (-1, width))  # [*experts, width, chunks, width]
    return chunks.transpose(-3, -2)


def _rotated(y: Tensor, blocks: Tensor) -> Tensor:
    """`y` `[*experts, rows, d_in]` by `blocks` `[*experts, blocks, b, b]` along the diagonal."""
    parts = y.unflatten(-1, blocks.shape[-3:-1]).transpose(-3, -2)  # [*experts, blocks, rows, b]
    turned: Tensor = parts @ blocks
    return turned.transpose(-3, -2).flatten(-2)  # [*experts, rows, d_in]


def _swapped(y: Tensor, chunks: int, outer: int, inner: int) -> Tensor:
    """`y` `[.., d_in]`: each chunk's half-blocks, an `[outer, inner]` table, read by columns."""
    table: Tensor = y.unflatten(-1, (chunks, outer, inner, -1))  # [.., chunks, outer, inner, b/2]
    return table.transpose(-3, -2).flatten(-4)  # [.., d_in]
