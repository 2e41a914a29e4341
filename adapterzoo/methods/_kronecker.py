"""Products with a Kronecker product w1 ⊗ w2 that is not built.

(w1 ⊗ w2) x = w1 X w2ᵀ, flattened, with w1 `[p, m]`, w2 `[q, n]` and X `[m, n]` the parts of x; each
of w1 and w2 may be given as two matrices of which it is the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def divided(width: int, factor: int) -> tuple[int, int]:
    """Return two numbers with the product `width`: the factor, if it divides, or the next below.

    Args:
        width: to divide.
        factor: from 1; or −1: the first number is the largest divisor up to the square root.
    """
    if factor > 0 and not width % factor:
        return factor, width // factor
    most = math.isqrt(width) if factor < 0 else min(factor, math.isqrt(width))
    first = next(d for d in range(most, 0, -1) if not width % d)
    return first, width // first


def product(matrices: Sequence[Tensor]) -> Tensor:
    """Return one matrix, or the product of two."""
    return matrices[0] if len(matrices) == 1 else matrices[0] @ matrices[1]


def kronecker(w1: Tensor, w2: Tensor) -> Tensor:
    """Return w1 ⊗ w2 `[*batch, p q, m n]` of `[*batch, p, m]` and `[*batch, q, n]`."""
    parts = w1[..., :, None, :, None] * w2[..., None, :, None, :]  # [*batch, p, q, m, n]
    return parts.flatten(-4, -3).flatten(-2)  # [*batch, p q, m n]


def times_kronecker(x: Tensor, w1: Sequence[Tensor], w2: Sequence[Tensor]) -> Tensor:
    """Return (w1 ⊗ w2) x, by the cheaper of the two orders.

    Args:
        x: `[rows, tokens, m n]`.
        w1: `[rows, p, m]`, or two matrices with that product.
        w2: `[rows, q, n]`, or two matrices with that product.

    Returns:
        `[rows, tokens, p q]`.
    """
    rows, tokens = x.shape[:2]
    p, q, m, n = w1[0].shape[1], w2[0].shape[1], w1[-1].shape[2], w2[-1].shape[2]
    left, right = (sum(math.prod(t.shape[1:]) for t in matrices) for matrices in (w1, w2))
    parts = x.reshape(rows, tokens, m, n)
    if m * right + q * left <= n * left + p * right:
        parts = _times(parts, w2)  # [rows, tokens, m, q]
        parts = _times(parts.mT, w1).mT  # [rows, tokens, p, q]
    else:
        parts = _times(parts.mT, w1).mT  # [rows, tokens, p, n]
        parts = _times(parts, w2)  # [rows, tokens, p, q]
    return parts.reshape(rows, tokens, p * q)


def _times(parts: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return parts wᵀ, `[rows, tokens, count, d]` → `[rows, tokens, count, e]`."""
    rows, tokens, count, d = parts.shape
    flat = parts.reshape(rows, tokens * count, d)
    for matrix in reversed(matrices):
        flat = flat @ matrix.mT  # [rows, tokens · count, r or e]
    return flat.reshape(rows, tokens, count, flat.shape[-1])
