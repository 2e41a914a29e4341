"""The Cayley transform, from unconstrained square matrices to rotations, its series, and its fold.

Source: Cayley 1846; Liu et al. 2023, arXiv:2311.06243, §3 and §4. `cayley` turns the
parameters of a butterfly, and `folded` makes one factor of m; on a GPU one kernel does both, unless
chunks are wide. The host never waits, and all memory is torch's, as a captured graph requires.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapterzoo.contracts import compute_dtype, widest

from . import ops
from .butterfly import by_pairs, fold, folded, folds, from_pairs, products, widened, without
from .ops import below, computed, exactly, register


def cayley_reference(R: Tensor) -> Tensor:
    """Return the definition: Q = (I − S) (I + S)⁻¹ with S = (R − Rᵀ) / 2.

    Q is orthogonal with determinant 1, and exactly I if R is symmetric. I + S cannot be singular,
    because the eigenvalues of S are imaginary. Q Qᵀ = I holds to 1e-6 in float32 at every angle:
    the system is solved in float64 and rounded once. A solve in float32 is not faster, and loses
    digits in proportion to S, which is infinite at 180 degrees; on devices without float64,
    Q Qᵀ = I holds to 3e-6 up to 150 degrees.

    Args:
        R: `[*batch, b, b]`.

    Returns:
        Q `[*batch, b, b]`, in the dtype of R.
    """
    whole = R.to(widest(R.device))
    # solve_ex returns columns; for the transpose, Sᵀ = −S, these are the rows of the result for S
    St = (whole.mT - whole) / 2  # [*batch, b, b]
    eye = torch.eye(St.shape[-1], device=St.device, dtype=St.dtype)
    # (I − S) (I + S)⁻¹ = I − 2 (I + S)⁻¹ S: it has no product that autocast could round, and small
    # rotations are orthogonal to the last bits, unlike with 2 (I + S)⁻¹ − I; solve_ex does not wait
    # for a GPU to report whether I + S was singular
    half: Tensor = torch.linalg.solve_ex(eye + St, St).result.mT  # [*batch, b, b]
    return torch.sub(eye, half, alpha=2).to(R.dtype)


def cayley(R: Tensor) -> Tensor:
    """Return `cayley_reference`; keeps only Q for the backward.

    Args:
        R: `[*batch, b, b]`.

    Returns:
        Q `[*batch, b, b]`, in the dtype of R.
    """
    if ops.is_reference():
        return cayley_reference(R)
    Q: Tensor = _cayley(R)
    return Q


def cayley_neumann(S: Tensor, terms: int) -> Tensor:
    """Return a sum of n terms for (I + S) (I − S)⁻¹ = I + 2 S + 2 S² + …, as PEFT truncates it.

    The inverse of `cayley`'s rotation for S. The sum is I + 2 S + … + 2 Sⁿ⁻² + Sⁿ⁻¹, for n = 3 the
    one for n = 4, and I + 2 S for n = 2. It is orthogonal only up to the terms left out, so S
    must be small; for S = 0 it is exactly I. Source: Qiu et al. 2025, arXiv:2506.19847.

    Args:
        S: skew-symmetric, `[*batch, b, b]`.
        terms: n, from 2.

    Returns:
        `[*batch, b, b]`, in the dtype of S.
    """
    eye = torch.eye(S.shape[-1], device=S.device, dtype=S.dtype)
    if terms == 2:
        return torch.add(eye, S, alpha=2)
    with exactly(S.device):
        rest = 2 * eye + S
        for _ in range(max(terms, 4) - 3):
            rest = 2 * eye + S @ rest  # [*batch, b, b]
        return eye + S @ rest  # [*batch, b, b]


def cayley_fold(R: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Return the rotations of `cayley`, folded to one factor if that is faster.

    Args:
        R: `[*lead, m, d_in / b, b, b]`, in float32 or float64.
        dropped: blocks that become the identity, bool `[*lead, m, d_in / b]`; None: no blocks.

    Returns:
        `[*lead, 1, chunks, width, width]`, or with all m factors; see `butterfly.folded`.
    """
    in_triton = ops.asks_triton(R)
    if ops.is_reference() or not folds(R) or (in_triton and R.dtype is not torch.float32):
        Q = cayley(R)
        return folded(Q if dropped is None else without(Q, dropped))
    whole: Tensor = _cayley_fold(R, dropped)[0]  # [*lead, chunks, width, width]
    # the kernels pack narrow chunks themselves
    return (whole if in_triton else widened(whole)).unsqueeze(-4)


def cayley_backward(dQ: Tensor, Q: Tensor) -> Tensor:
    """Return the gradient of R: dS = −2 Xᵀ dQ Xᵀ, X = (I + S)⁻¹ = (Q + I) / 2; differentiable."""
    dtype = compute_dtype(Q.dtype)
    with exactly(Q.device):
        eye = torch.eye(Q.shape[-1], device=Q.device, dtype=dtype)
        twice = (Q.to(dtype) + eye).mT  # 2 Xᵀ [*batch, b, b]
        dS = twice @ dQ.to(dtype) @ twice  # −2 dS
        # S = (R − Rᵀ) / 2, so that R gets the antisymmetric part
        return ((dS.mT - dS) / 4).to(Q.dtype)


class _Cayley(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, R: Tensor) -> Any:
        Q = below(_cayley, R)
        ctx.save_for_backward(Q)
        return Q

    @staticmethod
    def backward(ctx: Any, dQ: Tensor) -> Any:
        (Q,) = ctx.saved_tensors
        return cayley_backward(dQ, Q)


_cayley = register(
    "cayley(Tensor R) -> Tensor", cayley_reference, lambda R: R.new_empty(R.shape), _Cayley
)


def cayley_fold_torch(R: Tensor, dropped: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the folded rotations, and the factors; these are empty if there is one factor.

    `R` `[*lead, m, blocks, b, b]`, `dropped` `[*lead, m, blocks]`
    → `[*lead, chunks, b · 2^(m−1), b · 2^(m−1)]` and the shape of `R`, in the dtype of `R`.
    """
    Q = cayley_reference(R) if dropped is None else without(cayley_reference(R), dropped)
    if R.shape[-4] == 1:
        return Q.squeeze(-4).contiguous(), Q.new_empty(0)
    return fold(Q, 1).contiguous(), Q.contiguous()


def cayley_fold_torch_backward(
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


def _shapes(R: Tensor, dropped: Tensor | None) -> tuple[Tensor, Tensor]:
    m, blocks, b = R.shape[-4:-1]
    n = 1 << (m - 1)
    whole = R.new_empty((*R.shape[:-4], blocks // n, b * n, b * n))
    return whole, R.new_empty(R.shape if m > 1 else 0)


class _CayleyFold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, R: Tensor, dropped: Tensor | None) -> Any:
        whole, Q = below(_cayley_fold, R, dropped)
        ctx.set_materialize_grads(False)
        ctx.single = R.shape[-4] == 1
        if ctx.single:
            ctx.mark_non_differentiable(Q)
        ctx.save_for_backward(whole, None if ctx.single else Q, dropped)
        return whole, Q

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_Q: Tensor | None) -> Any:
        whole, Q, dropped = ctx.saved_tensors
        Q = whole.unsqueeze(-4) if ctx.single else Q
        of_Q = None if ctx.single else of_Q
        if grad is None and of_Q is None:
            return None, None
        # only a second backward has a gradient of the factors
        if grad is None or of_Q is not None or torch.is_grad_enabled():
            return cayley_fold_torch_backward(grad, whole, Q, dropped, of_Q), None
        return _cayley_fold_backward(grad, whole, Q, dropped), None


_cayley_fold = register(
    "cayley_fold(Tensor R, Tensor? dropped) -> (Tensor, Tensor)",
    computed("cayley_fold_triton.cayley_fold", cayley_fold_torch, 1, single=True),
    _shapes,
    _CayleyFold,
)


_cayley_fold_backward = register(
    "cayley_fold_backward(Tensor grad, Tensor whole, Tensor Q, Tensor? dropped) -> Tensor",
    computed(
        "cayley_fold_triton.cayley_fold_backward",
        cayley_fold_torch_backward,
        3,
        single=True,
    ),
    lambda grad, whole, Q, dropped: Q.new_empty(Q.shape),
)
