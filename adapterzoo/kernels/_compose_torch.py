"""The composition of a rescaled layer in torch operations."""

from __future__ import annotations

import torch
from torch import Tensor, lerp
from torch.nn.functional import hardshrink, linear

from . import mode
from ._low_rank_torch import is_small, rows_of

# rows that are multiplied at a time
_SLICE = 128


def compose(
    y: Tensor, gain: Tensor, bias: Tensor | None, t: Tensor | None, b: Tensor | None, scaling: float
) -> Tensor:
    """Return the sum gain ∘ (y + scaling · t bᵀ − bias) + bias, rounded once.

    `y` `[*batch, d_out]`, `gain` and `bias` `[d_out]`, `t` `[*batch, rank]`, `b` `[d_out, rank]`
    → shape and dtype of `y`.
    """
    wide = y.to(gain.dtype)
    if t is not None and b is not None and is_small(y):
        wide = torch.add(wide, linear(t.to(gain.dtype), b.to(gain.dtype)), alpha=scaling)
        t = None
    out = wide * gain if bias is None else lerp(bias.to(gain.dtype), wide, gain)
    if t is not None and b is not None:
        # apply the gain of each output feature to its row of b
        b = gain.unsqueeze(-1) * b.to(gain.dtype)  # [d_out, rank]
        out = rows_of(out).addmm_(rows_of(t).to(gain.dtype), b.T, alpha=scaling)  # [rows, d_out]
    return out.view(y.shape).to(y.dtype)  # [*batch, d_out]


def compose_backward(
    dy: Tensor,
    kept: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    t: Tensor | None,
    b: Tensor | None,
    scaling: float,
    tells: bool,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of y, gain, bias, t and b; empty if not needed.

    Differentiable again. `kept` is y or, with `tells`, the output, from which y + scaling · t bᵀ is
    recovered by dividing by the gain. Without `needs_gain` it may be empty.
    """
    needs_y, needs_gain, needs_bias, needs_t, needs_b = needs
    wide = rows_of(dy).to(gain.dtype)  # [rows, d_out]
    of_y, of_gain, of_bias, of_t, of_b = (gain.new_empty(0) for _ in range(5))
    if needs_y:
        of_y = (wide * gain).view(dy.shape).to(dy.dtype)  # [*batch, d_out]
    if needs_gain:
        of_gain = gain_backward(wide, kept, gain, bias, tells)
    if needs_bias and bias is not None:
        of_bias = (wide.sum(0) * (1 - gain)).to(bias.dtype)
    if t is not None and b is not None:
        s = scaling * gain.unsqueeze(-1)  # [d_out, 1]
        # [rank, rows] is several times as fast as [rows, rank]
        if needs_t:
            of_t = ((s * b.to(s.dtype)).T @ wide.T).T.to(t.dtype).contiguous().view(t.shape)
        # y lacks the update: Σ dy ∘ (t bᵀ) = rowsum((dyᵀ t) ∘ b)
        hidden = needs_gain and not tells
        if needs_b or hidden:
            dyt = (rows_of(t).T.to(wide.dtype) @ wide).T  # [d_out, rank]
        if hidden:
            of_gain = of_gain + scaling * (dyt * b).sum(-1)
        if needs_b:
            of_b = (dyt * s).to(b.dtype).contiguous()
    return of_y, of_gain, of_bias, of_t, of_b


def gain_backward(
    dy: Tensor, kept: Tensor, gain: Tensor, bias: Tensor | None, tells: bool
) -> Tensor:
    """Return the gradient of the gain `[d_out]`, without that of an update which `kept` lacks.

    `dy` and `kept` `[*batch, d_out]`; see `compose_backward`.
    """
    found = dots(rows_of(kept), rows_of(dy), bias)
    return found / divisor(gain, kept.dtype, bias is not None) if tells else found


def divisor(gain: Tensor, dtype: torch.dtype, has_bias: bool) -> Tensor:
    """Return the gain `[d_out]` to divide by; 0 where the output has no digit of the value before.

    Only on a GPU: there the forward decides by the gains of earlier steps.

    Args:
        gain: of each output feature.
        dtype: of the output.
        has_bias: whether a bias was added after the gain.
    """
    if not mode.asks_triton(gain):
        return gain
    return hardshrink(gain, least_gain(dtype, has_bias))


def least_gain(dtype: torch.dtype, has_bias: bool) -> float:
    """Return the gain up to which the output has no digit of the value before; see `divisor`."""
    info = torch.finfo(dtype)
    # rounding errors of the bias, or products that underflow
    return info.eps / 2 if has_bias else max(info.smallest_normal, 2.0**-72)


def dots(kept: Tensor, dy: Tensor, bias: Tensor | None) -> Tensor:
    """Return Σ (kept − bias) ∘ dy over the rows, `[d_out]`."""
    plain = kept.is_cpu and kept.dtype is dy.dtype and not torch.is_grad_enabled()
    if not plain or kept.shape[0] <= _SLICE:
        return ((kept if bias is None else kept - bias) * dy).sum(0)
    # slices stay in the cache, unlike a product as large as dy
    sums = dy.new_zeros(_SLICE, dy.shape[1])
    for own, of_own in zip(kept.split(_SLICE), dy.split(_SLICE), strict=True):
        sums[: len(own)].addcmul_(own if bias is None else own - bias, of_own)
    return sums.sum(0)
