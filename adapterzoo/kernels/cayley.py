"""The Cayley transform, from unconstrained square matrices to rotations, and its series.

Source: Cayley 1846; Liu et al. 2023, arXiv:2311.06243, §3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapterzoo.contracts import compute_dtype, widest

from . import mode
from ._ops import below, check, register
from .exact import exactly


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
    if mode.is_reference():
        return cayley_reference(R)
    Q: Tensor = _cayley(R)
    return Q


def cayley_neumann(S: Tensor, terms: int) -> Tensor:
    """Return a sum of n terms for (I + S) (I − S)⁻¹ = I + 2 S + 2 S² + …, as PEFT truncates it.

    The inverse of what `cayley` makes of S. The sum is I + 2 S + … + 2 Sⁿ⁻² + Sⁿ⁻¹, for n = 3 the
    one for n = 4, and I + 2 S for n = 2. It is orthogonal only up to the terms left out, so that S
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


def _fake(R: Tensor) -> Tensor:
    square = R.dim() > 1 and R.shape[-1] == R.shape[-2]
    check("cayley", "R's rows", "R's columns", {"R": R}, square, "R is [*batch, b, b]")
    return R.new_empty(R.shape)


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


_cayley = register("cayley(Tensor R) -> Tensor", cayley_reference, _fake, _Cayley)
