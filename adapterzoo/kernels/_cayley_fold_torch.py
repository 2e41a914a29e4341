"""Cayley transforms folded to one rotation per chunk, in torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from .butterfly import by_pairs, fold, from_pairs, products, without
from .cayley import cayley_backward, cayley_reference
from .exact import exactly


def cayley_fold(R: Tensor, dropped: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the folded rotations, and the factors; these are empty if there is one factor.

    `R` `[*lead, m, blocks, b, b]`, `dropped` `[*lead, m, blocks]`
    → `[*lead, chunks, b · 2^(m−1), b · 2^(m−1)]` and the shape of `R`, in the dtype of `R`.
    """
    Q = cayley_reference(R) if dropped is None else without(cayley_reference(R), dropped)
    if R.shape[-4] == 1:
        return Q.squeeze(-4).contiguous(), Q.new_empty(0)
    return fold(Q, 1).contiguous(), Q.contiguous()


def cayley_fold_backward(
    grad: Tensor | None,
    whole: Tensor,
    Q: Tensor,
    dropped: Tensor | None,
    of_Q: Tensor | None = None,
) -> Tensor:
    """Return the gradient of R from those of both outputs; differentiable again.

    `grad` and `whole` `[*lead, chunks, width, width]`, `Q` and `of_Q` `[*lead, m, blocks, b, b]`.
    """
    with exactly(Q.device):
        found = torch.zeros_like(Q) if grad is None else _unfolded(grad, Q)
        if of_Q is not None:
            found = found + of_Q
        if dropped is not None:
            found = found.masked_fill(dropped[..., None, None], 0.0)
        return cayley_backward(found, Q)


def _unfolded(grad: Tensor, Q: Tensor) -> Tensor:
    """Return the gradient of the factors from that of their product `[*lead, chunks, C, C]`."""
    if Q.shape[-4] == 1:
        return grad.unsqueeze(-4)  # [*lead, 1, blocks, b, b]
    before = products(Q[..., :-1, :, :, :])
    found = []
    for i in reversed(range(1, Q.shape[-4])):
        pairs = before[i - 1].unflatten(-3, (-1, 2))  # [*lead, chunks, 2, width / 2, width / 2]
        # by halves of its columns, [*lead, chunks, 2, width, width / 2]
        of_pairs = grad.unflatten(-1, (2, -1)).transpose(-3, -2)
        found.append(from_pairs(of_pairs @ pairs.mT, Q.shape[-1]))
        grad = (by_pairs(Q[..., i, :, :, :], i).mT @ of_pairs).flatten(-4, -3)
    return torch.stack([grad, *reversed(found)], -4)  # [*lead, m, blocks, b, b]
