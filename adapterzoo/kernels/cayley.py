"""The Cayley transform: square matrices without constraints to rotations.

Source: Cayley 1846; Liu et al. 2023, arXiv:2311.06243, §3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapterzoo.contracts import compute_dtype


def cayley_reference(R: Tensor) -> Tensor:
    """The definition: Q = (I − S) (I + S)⁻¹ with S = (R − Rᵀ) / 2.

    Q is orthogonal with determinant 1, and exactly I where R is symmetric. I + S cannot be
    singular: the eigenvalues of S are imaginary. In float32 Q Qᵀ = I holds to 4e-7 where the
    widest turn is a right angle, to 1e-6 at 150 degrees and b = 128, to 4e-6 at 170 degrees: the
    error grows with the size of S, which is infinite at 180.

    Args:
        R: `[*batch, b, b]`; float16 and bfloat16 are computed in float32.

    Returns:
        Q `[*batch, b, b]`, in the dtype of R.
    """
    wide = R.to(compute_dtype(R.dtype))
    S = (wide - wide.mT) / 2  # [*batch, b, b]
    eye = torch.eye(S.shape[-1], device=S.device, dtype=S.dtype)
    # (I − S) (I + S)⁻¹ = I − 2 (I + S)⁻¹ S: no product that autocast could round, and small
    # rotations, the usual ones, are orthogonal to the last bits, which 2 (I + S)⁻¹ − I is not;
    # solve_ex does not wait for a GPU to say whether I + S was singular
    half: Tensor = torch.linalg.solve_ex(eye + S, S).result  # [*batch, b, b]
    return (eye - 2 * half).to(R.dtype)
