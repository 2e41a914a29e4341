"""DoRA's product with a frozen weight, where the weight is smaller than the features.

Paper: Liu et al. 2024, arXiv:2402.09353, eq. 5.
y = x W'ᵀ + bias with W' = g ∘ (W + s · B A) and g = m / ‖W + s · B A‖, the norm taken over d_in for
each output row.

One node of autograd's graph, as `frozen.product`, that multiplies the weight by g instead of y and
its gradient. The norm needs W + s · B A anyway, so that W' is formed in its place. With dropout
before A, the weight is g ∘ W instead, and (s · g ∘ B) t is added to y. The backward pass always
multiplies by g ∘ W, because `low_rank.fork` adds the gradient of t = A x. Saves y, t and the norms,
besides the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import low_rank, mode
from ._compose_torch import dots
from ._low_rank_torch import rows_of
from ._ops import below
from .compose import least, saved_by
from .dora import TILE, direction_reference, divided, row_norm_reference

# elements of W + s · B A that are made at a time for its norms alone
_IN_CACHE = 1 << 17


def takes(x: Tensor, w: Tensor, *factors: Tensor) -> bool:
    """Return whether to change the weight: on a CPU, and without rounding it to half precision.

    Args:
        x: `[*batch, d_in]`.
        w: `[d_out, d_in]`, of a layer that `frozen.takes`.
        factors: a, b and m.
    """
    d_out, d_in = w.shape
    # passes over a larger weight cost more than those over x and y
    is_smaller = d_out * d_in <= min(x.numel() // d_in * (d_in + d_out), TILE)
    if not (is_smaller and x.is_cpu and x.dtype.itemsize >= 4 and w.is_contiguous()):
        return False
    plain = all(type(p) in mode.ORIGINAL and p.dtype is x.dtype for p in factors)
    return plain and mode.is_plain(x)


def product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    m: Tensor,
    t: Tensor,
    scaling: float,
    drops: bool,
) -> Tensor:
    """Return g (W x + s · B t) + bias; gradients treat the norm as a constant (§4.3).

    Only for operands that it `takes`. A gain of 1 and a b of zeros give the bits of the layer.

    Args:
        x: `[*batch, d_in]`, from `low_rank.fork`.
        w: `[d_out, d_in]`.
        bias: `[d_out]`; None: there is none.
        a: `[rank, d_in]`; its gradient is that of `t`.
        b: `[d_out, rank]`.
        m: `[d_out]`.
        t: `[*batch, rank]`, A x.
        scaling: the factor s.
        drops: whether features of x drop on the way to `t`.

    Returns:
        `[*batch, d_out]`, in the dtype of `x`.
    """
    y: Tensor = _Product.apply(x, w, bias, a, b, m, t, scaling, drops)
    return y


def merged(
    x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, gain: Tensor, scaling: float
) -> Tensor:
    """Return the bits of `product` for a known g `[d_out]`; without gradients and dropout."""
    weight = direction_reference(w, a, b, scaling).mul_(gain.unsqueeze(-1))  # [d_out, d_in]
    return linear(x, weight, bias)


def _added(
    x: Tensor, weight: Tensor, bias: Tensor | None, t: Tensor, b: Tensor, scaling: float
) -> Tensor:
    y = linear(x, weight, bias).contiguous()  # [*batch, d_out]
    rows_of(y).addmm_(rows_of(t), b.T, alpha=scaling)
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        x, w, bias, a, b, m, t, ctx.scaling, drops = args
        needs_m, needs_b = ctx.needs_input_grad[5], ctx.needs_input_grad[4]
        if drops:
            norm = row_norm_reference(w, a, b, ctx.scaling, _IN_CACHE)  # [d_out]
            gain = divided(m, norm)
            scale = gain.unsqueeze(-1)  # [d_out, 1]
            y = below(_added, x, w * scale, bias, t, scale * b, ctx.scaling)
        else:
            direction = direction_reference(w, a, b, ctx.scaling)  # [d_out, d_in]
            norm = torch.linalg.vector_norm(direction, dim=-1)
            gain = divided(m, norm)
            y = below(linear, x, direction.mul_(gain.unsqueeze(-1)), bias)
        few = _few(gain, bias)
        hides = needs_m and few.numel() > 0
        ctx.save_for_backward(
            *(w, bias, b, m, norm, y if needs_m else None),
            *(x if hides else None, t if needs_b or hides else t.new_empty(0)),
        )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        w, bias, b, m, norm, y, x, t = saved_by(ctx, "rescaled")
        needs_x, _, _, _, needs_b, needs_m, needs_t, _, _ = ctx.needs_input_grad
        flat, s = rows_of(dy), ctx.scaling  # [rows, d_out]
        gain = divided(m, norm)
        scale = gain.unsqueeze(-1)  # [d_out, 1]
        dx = db = dm = None
        if needs_x:
            rows = flat @ (w * scale) if w.numel() < flat.numel() else (flat * gain) @ w
            dx = rows.view(*dy.shape[:-1], w.shape[1])  # [*batch, d_in]
        dt, of_b = low_rank.expand_backward(dy, t, scale * b, s, needs_t, needs_b)
        if needs_b:
            db = of_b * scale
        if needs_m:
            few = _few(gain, bias)
            # Σ dy ∘ (W x + s · B t) over the rows
            of_gain = dots(rows_of(y), flat, bias) / gain.index_fill(0, few, 1.0)
            if few.numel():
                before = torch.addmm(rows_of(x) @ w[few].T, rows_of(t), b[few].T, alpha=s)
                of_gain = of_gain.index_copy(0, few, (flat[:, few] * before).sum(0))
            # a row of zeros keeps its gain of 1
            dm = of_gain / norm.masked_fill(norm == 0, torch.inf)
        return dx, None, None, None, db, dm, dt if needs_t else None, None, None


def _few(gain: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output features whose gain is too small to divide the output by."""
    return (gain.abs() < least(gain.dtype, bias is not None)).nonzero().flatten()
