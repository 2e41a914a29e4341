"""Cayley transforms folded to one rotation per chunk, in torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from .butterfly import fold, without
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
        found = torch.zeros_like(Q) if of_Q is None else of_Q
        if grad is not None:
            found = found + _unfolded(grad, Q)
        if dropped is not None:
            found = found.masked_fill(dropped[..., None, None], 0.0)
        return cayley_backward(found, Q)


def _unfolded(grad: Tensor, Q: Tensor) -> Tensor:
    """Return the gradient of the factors from that of their product `[*lead, chunks, C, C]`."""
    m, _, b = Q.shape[-4:-1]
    if m == 1:
        return grad.unsqueeze(-4)  # [*lead, 1, blocks, b, b]
    per_chunk = 1 << (m - 1)
    orders = [_order(i, m, b, Q.device) for i in range(m)]
    dense = []
    for i, order in enumerate(orders):
        blocks = Q[..., i, :, :, :].unflatten(-3, (-1, per_chunk))  # [*lead, chunks, n, b, b]
        eye = torch.eye(per_chunk, device=Q.device, dtype=Q.dtype).view(per_chunk, 1, per_chunk, 1)
        apart = blocks.unsqueeze(-2) * eye  # [*lead, chunks, n, b, n, b]
        sorted_ = apart.flatten(-4, -3).flatten(-2)  # [*lead, chunks, C, C]
        back = order.argsort()
        dense.append(sorted_[..., back, :][..., back])
    found = []
    for i, order in enumerate(orders):
        own = grad
        for j in reversed(range(i + 1, m)):
            own = dense[j].mT @ own
        for j in range(i):
            own = own @ dense[j].mT
        own = own[..., order, :][..., order]  # [*lead, chunks, C, C]
        parts = own.view(*own.shape[:-2], *(per_chunk, b) * 2)  # [*lead, chunks, n, b, n, b]
        own = parts.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [*lead, chunks, n, b, b]
        found.append(own.flatten(-4, -3))  # [*lead, blocks, b, b]
    return torch.stack(found, -4)  # [*lead, m, blocks, b, b]


def _order(i: int, m: int, b: int, device: torch.device) -> Tensor:
    """Return the features of a chunk, block after block of factor i."""
    chunk = torch.arange(b << (m - 1), device=device)
    if not i:
        return chunk
    return chunk.view(-1, 2, 1 << i, b // 2).transpose(1, 2).flatten()  # [.., 2ⁱ, 2, b / 2]
