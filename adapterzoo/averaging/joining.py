"""Join tensors of several adapters into one.

Sum: task arithmetic, Ilharco et al. 2022, arXiv:2212.04089, §2.
Elected signs: TIES, Yadav et al. 2023, arXiv:2306.01708, §3.2 "elect" and §3.3 "disjoint merge".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σᵢ wᵢ τᵢ, added in the given order.

    Args:
        tensors: at least one, of one shape, dtype and device.
        weights: one for each.
    """
    total = weights[0] * tensors[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total + weight * tensor
    return total


def elected(
    tensors: Sequence[Tensor], weights: Sequence[float], majority_sign_method: str = "total"
) -> Tensor:
    """Return the elementwise weighted mean over the tensors that have the elected sign γ.

    With A = {i : sign τᵢ = γ} the result is Σ_{i ∈ A} wᵢ τᵢ / max(|A|, 1). As in PEFT, the election
    ignores the weights, a tie elects +, and the sum is divided by |A|, not by the weights.

    Args:
        tensors: at least one, of one shape, dtype and device.
        weights: one for each.
        majority_sign_method: "total": γ = sign Σ τᵢ; "frequency": γ = sign Σ sign τᵢ.
    """
    stacked = torch.stack(tuple(tensors))  # [n, *shape]
    signs = stacked.sign()
    votes = stacked if majority_sign_method == "total" else signs
    gamma = torch.where(votes.sum(0) >= 0, 1, -1)  # [*shape]
    agrees = signs == gamma
    one = [1] * (stacked.dim() - 1)
    factors = stacked.new_tensor(list(weights)).view(-1, *one)  # [n, 1, …]
    return (stacked * factors * agrees).sum(0) / agrees.sum(0).clamp(min=1)
