"""The gradients of the composition of a rescaled layer, in torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from ._low_rank_torch import rows_of

# that limit the share of the bias in the error to that of the dtype below, and to twice its own
_LEAST_GAIN = 1 / 16
_LEAST_GAIN_OF_HALF = 1 / 2
# without a bias: products of smaller ones may be below the smallest normal number
_LEAST_FACTOR = 2.0**-64
_LEAST_FACTOR_OF_FLOAT16 = 1 / 16


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
        if needs_t:
            of_t = (wide @ (s * b.to(s.dtype))).to(t.dtype).view(t.shape)  # [*batch, rank]
        # y lacks the update: Σ dy ∘ (t bᵀ) = rowsum((dyᵀ t) ∘ b)
        hidden = needs_gain and not tells
        if needs_b or hidden:
            dyt = wide.T @ rows_of(t).to(wide.dtype)  # [d_out, rank]
        if hidden:
            of_gain = of_gain + scaling * (dyt * b).sum(-1)
        if needs_b:
            of_b = (dyt * s).to(b.dtype)
    return of_y, of_gain, of_bias, of_t, of_b


def gain_backward(
    dy: Tensor, kept: Tensor, gain: Tensor, bias: Tensor | None, tells: bool
) -> Tensor:
    """Return the gradient of the gain `[d_out]`, without that of an update which `kept` lacks.

    `dy` and `kept` `[*batch, d_out]`; see `compose_backward`.
    """
    found = dots(rows_of(kept), rows_of(dy), bias)
    if not tells:
        return found
    # of smaller ones `few_backward` makes the gradient
    small = gain.detach().abs() < least(kept.dtype, bias is not None)
    return found / gain.masked_fill(small, 1.0)


def few_backward(
    dy: Tensor,
    columns: Tensor,
    of_gain: Tensor,
    bias: Tensor | None,
    t: Tensor | None,
    b: Tensor | None,
    scaling: float,
    few: Tensor,
) -> Tensor:
    """Return the gradient of the gain, with that of the features `few` made from y itself.

    Differentiable again. For the other arguments see `compose_backward`.

    Args:
        dy: of the output.
        columns: these features of y, `[*batch, few]`.
        of_gain: the gradient of the gain so far.
        bias: see `compose_backward`.
        t: see `compose_backward`.
        b: see `compose_backward`.
        scaling: see `compose_backward`.
        few: the numbers of the features.
    """
    dtype = of_gain.dtype
    own = rows_of(dy).index_select(1, few).to(dtype)  # [rows, few]
    bias = None if bias is None else bias.index_select(0, few).to(dtype)
    found = dots(rows_of(columns).to(dtype), own, bias)
    if t is not None and b is not None:
        dyt = own.T @ rows_of(t).to(dtype)  # [few, rank]
        found = found + scaling * (dyt * b.index_select(0, few)).sum(-1)
    return of_gain.index_copy(0, few, found)


def least(dtype: torch.dtype, has_bias: bool) -> float:
    """Return the smallest |gain| for which the output tells the value before; see `compose`.

    Args:
        dtype: of the output.
        has_bias: whether a bias was added after the gain.
    """
    if has_bias:
        return _LEAST_GAIN_OF_HALF if dtype.itemsize < 4 else _LEAST_GAIN
    return _LEAST_FACTOR_OF_FLOAT16 if dtype is torch.float16 else _LEAST_FACTOR


def dots(kept: Tensor, dy: Tensor, bias: Tensor | None) -> Tensor:
    """Return Σ (kept − bias) ∘ dy over the rows, `[d_out]`."""
    return ((kept if bias is None else kept - bias) * dy).sum(0)
