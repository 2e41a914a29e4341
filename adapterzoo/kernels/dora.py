"""DoRA's two steps: the norm of each row of W + s · B A, and the composition of the output.

Paper: Liu et al. 2024, arXiv:2402.09353, eq. 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapterzoo.contracts import compute_dtype

from ._exact import exactly

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


def compose_reference(
    y: Tensor, plain: Tensor, bias: Tensor | None, update: Tensor, gain: Tensor, scaling: float
) -> Tensor:
    """The definition: `y + (gain − 1) · (plain − bias) + gain · scaling · update`.

    Computed in the dtype of `gain` and given back in that of `y`; the bits of `y` where `gain` is
    1 and `update` 0.

    Args:
        y: `[*batch, d_out]`, the output that gets the change.
        plain: `[*batch, d_out]`, the untouched layer's; `y` itself where nothing acted before.
        bias: `[d_out]`, the part of `plain` that keeps its size; None: there is none.
        update: `[*batch, d_out]`, B A x.
        gain: `[d_out]`, magnitude over norm.
        scaling: the factor s.
    """
    dtype = gain.dtype
    # gain (plain + s update − bias) + bias: one tensor to keep for the backward pass
    whole = torch.add(plain.to(dtype), update.to(dtype), alpha=scaling)  # [*batch, d_out]
    out = whole * gain if bias is None else torch.addcmul((1 - gain) * bias, whole, gain)
    if plain is not y:
        out = y + (out - plain)
    return out.to(y.dtype)
