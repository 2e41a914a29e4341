"""Low-rank factors for a change of a weight, and for a weight of their product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def split(
    change: Tensor,
    rank: int,
    clamp: float | None = None,
    full_matrices: bool = False,
    driver: str | None = None,
) -> tuple[Tensor, Tensor]:
    """A = V_rᵀ and B = U_r Σ_r of the singular value decomposition: B A is the nearest of rank r.

    Eckart & Young 1936. Where the change has fewer singular values the rest of A and B is zero.

    Args:
        change: `[*experts, d_out, d_in]`.
        rank: r.
        clamp: a quantile of all entries of A and B; what is larger is cut to it, on both sides.
        full_matrices: whether singular vectors are computed that nobody reads, as PEFT does.
        driver: of cuSOLVER, see `torch.linalg.svd`.

    Returns:
        A `[*experts, rank, d_in]` and B `[*experts, d_out, rank]`.
    """
    u, s, v = torch.linalg.svd(change, full_matrices=full_matrices, driver=driver)
    count = min(rank, s.shape[-1])
    b = u[..., :count] * s[..., None, :count]  # [*experts, d_out, count]
    a = v[..., :count, :]  # [*experts, count, d_in]
    if clamp is not None:
        high = _quantile(torch.cat([b.reshape(-1), a.reshape(-1)]), clamp)  # [entries]
        a, b = a.clamp(-high, high), b.clamp(-high, high)
    missing = rank - count
    return pad(a, (0, 0, 0, missing)), pad(b, (0, missing))  # to `rank`


def signed_roots(weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """Factors for A and for B whose product is each weight: ±√|w| and √|w|, the sign on A."""
    roots = [math.sqrt(abs(weight)) for weight in weights]
    signed = [math.copysign(root, weight) for root, weight in zip(roots, weights, strict=True)]
    return signed, roots


def _quantile(values: Tensor, q: float) -> Tensor:
    """`torch.quantile`, which takes no more than 16 million values, without that limit."""
    ordered = values.sort().values
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], at - low)
