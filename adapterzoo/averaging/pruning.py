"""Prune a tensor before it is joined with others.

Keeping the largest: TIES, Yadav et al. 2023, arXiv:2306.01708, §3.1 "trim".
Keeping at random: DARE, Yu et al. 2023, arXiv:2311.03099, eq. 2 and 3.
"""

from __future__ import annotations

import torch
from torch import Tensor


def largest(tensor: Tensor, density: float) -> Tensor:
    """Keep the ⌊density · n⌋ of n entries with the largest magnitude; set the others to zero.

    Args:
        tensor: of any shape; all experts of a stack are pruned together.
        density: share of the entries to keep, above 0 to 1.
    """
    flat = tensor.reshape(-1)  # [n]
    kept = flat.abs().topk(int(density * flat.numel())).indices
    pruned = torch.zeros_like(flat)
    pruned[kept] = flat[kept]
    return pruned.view(tensor.shape)  # [*shape]


def random(tensor: Tensor, density: float, source: torch.Generator | None = None) -> Tensor:
    """Return m ⊙ δ / density with m ~ Bernoulli(density); its mean over m is δ.

    Args:
        tensor: of any shape.
        density: probability of keeping an entry, above 0 to 1.
        source: on the CPU, so that all devices draw the same; None: torch's default generator.
    """
    shares = torch.full(tensor.shape, density, dtype=tensor.dtype, device="cpu")
    mask = torch.bernoulli(shares, generator=source)
    return tensor * mask.to(tensor.device) / density
