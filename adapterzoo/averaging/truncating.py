"""Low-rank factors of a change of a weight: exact ones, or those of a truncated SVD.

Eckart & Young 1936: no matrix of rank r is nearer to a matrix with the singular values σ than the
one with the r largest of them; the distance is √Σ σᵢ² over the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Truncated(NamedTuple):
    """Factors of a change.

    Attributes:
        a: `[*experts, rank, d_in]`.
        b: `[*experts, d_out, rank]`.
        is_exact: whether B A is the change by algebra, without an SVD.
    """

    a: Tensor
    b: Tensor
    is_exact: bool


def truncated(
    change: Tensor,
    factors: tuple[Tensor, Tensor] | None,
    rank: int | None,
    energy: float | None,
    precision: float,
) -> Truncated:
    """Return the factors of a change, exact ones where they exist and are small enough.

    Args:
        change: `[*experts, d_out, d_in]`.
        factors: A and B with B A = change; None: not known.
        rank: the largest rank; None: not limited.
        energy: the share of Σ σ² to keep, above 0 to 1; None: all of it. Experts have one rank.
        precision: relative size of singular values that count as zero.
    """
    limit = min(change.shape[-2:])
    if factors is not None:
        # columns of zeros add nothing
        used = factors[1].flatten(0, -2).ne(0).any(0)  # [rank]
        factors = factors[0][..., used, :], factors[1][..., used]
        count = factors[0].shape[-2]
        if energy is None and count <= min(limit, rank or limit):
            return Truncated(*factors, is_exact=True)
        factors = factors if count < limit else None
    u, s, v = torch.linalg.svd(change, full_matrices=False) if factors is None else _svd(*factors)
    kept = (s > precision * s[..., :1]).sum(-1)  # [*experts]
    if energy is not None:
        # Σ σ² of the values from the i-th on
        tails = s.square().flip(-1).cumsum(-1).flip(-1)  # [*experts, values]
        kept = kept.minimum((tails > (1 - energy) * tails[..., :1]).sum(-1))
    count = min(int(kept.max()), rank or limit)
    return Truncated(v[..., :count, :], u[..., :count] * s[..., None, :count], is_exact=False)


def _svd(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the SVD of B A from that of a matrix `[rank, rank]`."""
    q_in, r_in = torch.linalg.qr(a.mT)
    q_out, r_out = torch.linalg.qr(b)
    u, s, v = torch.linalg.svd(r_out @ r_in.mT)
    return q_out @ u, s, v @ q_in.mT
