"""DoRA's direction W + s · B A, and the norm of each of its rows; `compose` has the output.

Paper: Liu et al. 2024, arXiv:2402.09353, eq. 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapterzoo.contracts import compute_dtype

from .exact import exactly

# elements of W + s B A that exist at one time: 16 MiB in float32
TILE = 1 << 22


def direction_reference(w: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """The definition: `w + scaling · b a`, in float32, or float64 for a float64 `w`.

    Autocast does not reach it.

    Args:
        w: `[*experts, d_out, d_in]`.
        a: `[*experts, rank, d_in]`.
        b: `[*experts, d_out, rank]`.
        scaling: the factor s.
    """
    dtype = compute_dtype(w.dtype)
    add = torch.addmm if w.dim() == 2 else torch.baddbmm
    with exactly(w.device):
        return add(w.to(dtype), b.to(dtype), a.to(dtype), alpha=scaling)


def row_norm_reference(w: Tensor, a: Tensor, b: Tensor, scaling: float, tile: int = TILE) -> Tensor:
    """The definition: ‖w + scaling · b a‖ over `d_in`, in the dtype of `direction_reference`.

    Built and reduced some rows at a time, so that at most `tile` elements of the sum exist. The
    factored form ‖w‖² + 2 s · rowsum((w aᵀ) ∘ b) + s² · rowsum((b a aᵀ) ∘ b) reads `w` twice, is
    no faster and cancels where w ≈ −s · b a; here nothing cancels but the sum itself, and a `b`
    of zeros gives the bits of ‖w‖.

    Args:
        w: `[*experts, d_out, d_in]`.
        a: `[*experts, rank, d_in]`.
        b: `[*experts, d_out, rank]`.
        scaling: the factor s.
        tile: elements.

    Returns:
        `[*experts, d_out]`.
    """
    per_row = w.numel() // max(w.shape[-2], 1)
    rows = max(tile // max(per_row, 1), 1)
    norms = [
        torch.linalg.vector_norm(direction_reference(part, a, of_part, scaling), dim=-1)
        for part, of_part in zip(w.split(rows, -2), b.split(rows, -2), strict=True)
    ]
    return norms[0] if len(norms) == 1 else torch.cat(norms, -1)
