"""Low-rank factors of a change of a weight, and of a number."""

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
    """Return A = V_rᵀ and B = U_r Σ_r of the SVD: B A is the nearest matrix of rank r.

    Eckart & Young 1936. If the change has fewer singular values, the rest of A and B is zero.

    Args:
        change: `[*experts, d_out, d_in]`.
        rank: r.
        clamp: a quantile of all entries of A and B; larger magnitudes are cut to it.
        full_matrices: whether to compute unused singular vectors, as PEFT does.
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
    """Return factors for A and B with each weight as product: ±√|w| and √|w|, the sign on A."""
    roots = [math.sqrt(abs(weight)) for weight in weights]
    signed = [math.copysign(root, weight) for root, weight in zip(roots, weights, strict=True)]
    return signed, roots


def _quantile(values: Tensor, q: float) -> Tensor:
    """Compute `torch.quantile` without its limit of 16 million values."""
    ordered = values.sort().values
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], at - low)
