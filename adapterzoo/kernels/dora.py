"""DoRA's direction W + s · B A, and the norm of each of its rows; `compose` computes the output.

Paper: Liu et al. 2024, arXiv:2402.09353, eq. 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapterzoo.contracts import compute_dtype

from . import ops
from .ops import below, computed, exactly, register

# elements of W + s · B A in memory at one time: 16 MiB in float32
TILE = 1 << 22


def direction_reference(w: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return the definition: `w + scaling · b a`, in float32, or float64 for a float64 `w`.

    Autocast does not affect it.

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
    """Return ‖w + scaling · b a‖ over `d_in`, by definition; dtype as `direction_reference`.

    Computed some rows at a time, so that at most `tile` elements of the sum exist at once. The
    factored form ‖w‖² + 2 s · rowsum((w aᵀ) ∘ b) + s² · rowsum((b a aᵀ) ∘ b) reads `w` twice, is
    not faster, and cancels if w ≈ −s · b a. Here only the sum itself can cancel, and a `b` of zeros
    gives the bits of ‖w‖.

    Args:
        w: `[*experts, d_out, d_in]`.
        a: `[*experts, rank, d_in]`.
        b: `[*experts, d_out, rank]`.
        scaling: the factor s.
        tile: elements.

    Returns:
        `[*experts, d_out]`.
    """
    if w.numel() <= tile:
        norm: Tensor = torch.linalg.vector_norm(direction_reference(w, a, b, scaling), dim=-1)
        return norm
    # at least one row at a time
    rows = max(tile * w.shape[-2] // w.numel(), 1)
    norms = [
        torch.linalg.vector_norm(direction_reference(part, a, of_part, scaling), dim=-1)
        for part, of_part in zip(w.split(rows, -2), b.split(rows, -2), strict=True)
    ]
    return torch.cat(norms, -1)  # [*experts, d_out]


def row_norm(w: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """`row_norm_reference`; on CUDA without building the sum, where no gradients are needed.

    Args:
        w: `[*experts, d_out, d_in]`.
        a: `[*experts, rank, d_in]`.
        b: `[*experts, d_out, rank]`.
        scaling: the factor s.

    Returns:
        `[*experts, d_out]`, in float32, or float64 for a float64 `w`.
    """
    differentiated = torch.is_grad_enabled() and any(v.requires_grad for v in (w, a, b))
    if differentiated or not ops.asks_triton(w) or ops.is_reference():
        return row_norm_reference(w, a, b, scaling)
    norm: Tensor = _row_norm(w, a, b, scaling)
    return norm


def row_gain(w: Tensor, a: Tensor, b: Tensor, m: Tensor, scaling: float) -> Tensor:
    """Return m / ‖w + scaling · b a‖, with 1 for a row of zeros; gradients reach only m (§4.3).

    On CUDA the kernel of the norms divides too.

    Args:
        w: `[*experts, d_out, d_in]`.
        a: `[*experts, rank, d_in]`.
        b: `[*experts, d_out, rank]`.
        m: `[*experts, d_out]`.
        scaling: the factor s.

    Returns:
        `[*experts, d_out]`, in float32, or float64 for a float64 `w`.
    """
    if not ops.asks_triton(w) or ops.is_reference():
        with torch.no_grad():
            norm = row_norm_reference(w, a, b, scaling)  # [*experts, d_out]
        return divided(m, norm)
    gain: Tensor = _row_gain(w, a, b, m, scaling)[0]
    return gain


def divided(m: Tensor, norm: Tensor) -> Tensor:
    """Return m / norm in the dtype of the norm; 1 for a norm of 0, whose row has no direction."""
    zero = norm == 0
    return torch.where(zero, 1.0, m.to(norm.dtype) / norm.masked_fill(zero, 1.0))


def weight_norm(w: Tensor) -> Tensor:
    """Return ‖w‖ over `d_in`, with the bits that `row_norm` gives for an update of zeros.

    Without gradients.

    Args:
        w: `[*experts, d_out, d_in]`.

    Returns:
        `[*experts, d_out]`, in float32, or float64 for a float64 `w`.
    """
    a, b = w.new_zeros((*w.shape[:-2], 1, w.shape[-1])), w.new_zeros((*w.shape[:-1], 1))
    return row_norm(w.detach(), a, b, 1.0)


def _fake(w: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    return w.new_empty(w.shape[:-1], dtype=compute_dtype(w.dtype))


_row_norm = register(
    "row_norm(Tensor w, Tensor a, Tensor b, float scaling) -> Tensor",
    # under autocast weights stay float32
    computed("row_norm_triton.row_norm", row_norm_reference, 3, single=True),
    _fake,
)


def _gain(w: Tensor, a: Tensor, b: Tensor, m: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    norm = row_norm_reference(w, a, b, scaling)
    return divided(m, norm), torch.where(norm == 0, 0.0, 1 / norm)


class _RowGain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        gain, inverse = below(_row_gain, *args)
        ctx.mark_non_differentiable(inverse)
        ctx.save_for_backward(inverse)
        ctx.set_materialize_grads(False)
        ctx.dtype = args[3].dtype
        return gain, inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None) -> Any:
        (inverse,) = ctx.saved_tensors
        needed = grad is not None and ctx.needs_input_grad[3]
        of_m = (grad * inverse).to(ctx.dtype) if needed else None
        return None, None, None, of_m, None


_row_gain = register(
    "row_gain(Tensor w, Tensor a, Tensor b, Tensor m, float scaling) -> (Tensor, Tensor)",
    computed("row_norm_triton.row_gain", _gain, 4, single=True),
    lambda w, a, b, m, scaling: (_fake(w, a, b, scaling), _fake(w, a, b, scaling)),
    _RowGain,
)
