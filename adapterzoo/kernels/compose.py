"""The composition of a rescaled layer: gain ∘ (y + s · t Bᵀ − bias) + bias.

This is DoRA's output (Liu et al. 2024, arXiv:2402.09353, eq. 5), with gain = magnitude / norm. BOFT
uses it without the low-rank part, with its scale as the gain. For the backward it keeps one large
tensor: its own output, which the next operation of a model often keeps anyway; and the features of
y whose gain is too small to recover them from it. On a GPU the host waits for the gain.

An output o with gain g has a rounding error of u |o|, where u is half the distance of two numbers
of its dtype around 1, and a |o| of at most |g z| + |bias| for the value z before the gain. So
(o - bias) / g has an error of at most u (|z| + |bias| / |g|): without a bias it is as exact as a
rounded y, whatever the gain, except near the smallest number of the dtype; with a bias, a gain of
1/2 doubles the share of the bias. That error is what `least` limits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, lerp
from torch.nn.functional import linear

from adapterzoo.errors import KernelError

from . import ops
from .low_rank import rows_of
from .ops import below, computed, exactly, register

# that limit the share of the bias in the error to that of the dtype below, and to twice its own
_LEAST_GAIN = 1 / 16
_LEAST_GAIN_OF_HALF = 1 / 2
# without a bias: products of smaller ones may be below the smallest normal number
_LEAST_FACTOR = 2.0**-64
_LEAST_FACTOR_OF_FLOAT16 = 1 / 16


def compose_reference(
    y: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    t: Tensor | None = None,
    b: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """Return the definition: `gain · (y + scaling · t bᵀ − bias) + bias`.

    Computed in the dtype of `gain` and returned in that of `y`, with the bits of `y` where `gain`
    is 1 and `t` or `b` 0.

    Args:
        y: `[*batch, d_out]`, the layer's output.
        gain: `[d_out]`, float32 or float64.
        bias: `[d_out]`, the part of `y` that is not scaled; None without one.
        t: `[*batch, rank]`; None without an update.
        b: `[d_out, rank]`, given with `t`.
        scaling: the factor s.
    """
    dtype = gain.dtype
    whole = y.to(dtype)
    if t is not None and b is not None:
        whole = torch.add(whole, linear(t.to(dtype), b.to(dtype)), alpha=scaling)  # [*batch, d_out]
    out = whole * gain if bias is None else lerp(bias.to(dtype), whole, gain)
    return out.to(y.dtype)


def compose(
    y: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    t: Tensor | None = None,
    b: Tensor | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """Return `compose_reference`, with few saved tensors.

    Compiled and captured code, which cannot read the gain, keeps `y`.

    Args:
        y: `[*batch, d_out]`, the layer's output.
        gain: `[d_out]`, float32 or float64.
        bias: `[d_out]`, the part of `y` that is not scaled; None without one.
        t: `[*batch, rank]`, x Aᵀ from `low_rank.shrink`; None without an update.
        b: `[d_out, rank]`, given with `t`.
        scaling: the factor s.

    Returns:
        Shape and dtype of `y`.
    """
    if ops.is_reference():
        return compose_reference(y, gain, bias, t, b, scaling)
    # the host reads the gain, but not in compiled or captured code
    reads = torch.is_grad_enabled() and gain.requires_grad and not torch.compiler.is_compiling()
    reads = reads and type(gain) in ops.ORIGINAL and not (gain.is_meta or ops.is_captured())
    if reads or ops.asks_triton(y):
        small = columns = None
        if reads:
            found = (gain.detach().abs() < least(y.dtype, bias is not None)).nonzero().flatten()
            if found.numel():
                small, columns = found, y.index_select(-1, found)  # [*batch, small]
        out: Tensor = _compose(y, gain, bias, t, b, scaling, reads, small, columns)
        return out
    # the same operations, so that a forward has the same bits with and without gradients
    with exactly(y.device):
        return compose_reference(y, gain, bias, t, b, scaling)


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
        of_gain = dots(rows_of(kept), wide, bias)
        if tells:
            # for smaller gains, `small_gain_backward` computes the gradient
            small = gain.detach().abs() < least(kept.dtype, bias is not None)
            of_gain = of_gain / gain.masked_fill(small, 1.0)
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


def small_gain_backward(
    dy: Tensor,
    columns: Tensor,
    of_gain: Tensor,
    bias: Tensor | None,
    t: Tensor | None,
    b: Tensor | None,
    scaling: float,
    small: Tensor,
) -> Tensor:
    """Return the gradient of the gain, computed from y itself for the features `small`.

    Differentiable again. For the other arguments see `compose_backward`.

    Args:
        dy: gradient of the output.
        columns: these features of y, `[*batch, small]`.
        of_gain: the gradient of the gain so far.
        bias: see `compose_backward`.
        t: see `compose_backward`.
        b: see `compose_backward`.
        scaling: see `compose_backward`.
        small: the numbers of the features.
    """
    dtype = of_gain.dtype
    own = rows_of(dy).index_select(1, small).to(dtype)  # [rows, small]
    bias = None if bias is None else bias.index_select(0, small).to(dtype)
    found = dots(rows_of(columns).to(dtype), own, bias)
    if t is not None and b is not None:
        dyt = own.T @ rows_of(t).to(dtype)  # [small, rank]
        found = found + scaling * (dyt * b.index_select(0, small)).sum(-1)
    return of_gain.index_copy(0, small, found)


def least(dtype: torch.dtype, has_bias: bool) -> float:
    """Return the smallest |gain| for which the output tells the value before; see `compose`.

    Args:
        dtype: dtype of the output.
        has_bias: whether a bias was added after the gain.
    """
    if has_bias:
        return _LEAST_GAIN_OF_HALF if dtype.itemsize < 4 else _LEAST_GAIN
    return _LEAST_FACTOR_OF_FLOAT16 if dtype is torch.float16 else _LEAST_FACTOR


def dots(kept: Tensor, dy: Tensor, bias: Tensor | None) -> Tensor:
    """Return Σ (kept − bias) ∘ dy over the rows, `[d_out]`."""
    return ((kept if bias is None else kept - bias) * dy).sum(0)


def _shapes_of_backward(dy: Tensor, kept: Tensor, *args: Any) -> tuple[Tensor, ...]:
    gain, bias, t, b, _, _, *needs = args
    return tuple(
        gain.new_empty(0) if of is None else of.new_empty(of.shape if need else 0)
        for of, need in zip((dy, gain, bias, t, b), needs, strict=True)
    )


class _Compose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        out = below(_compose, *args)
        y, gain, bias, t, b, ctx.scaling, ctx.tells, small, columns = args
        kept = out if ctx.tells else y
        # only the gradient of the gain reads it
        kept = kept if ctx.needs_input_grad[1] else y.new_empty(0)
        ctx.save_for_backward(kept, gain, bias, t, b, small, columns)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = ctx.needs_input_grad[:5]
        try:
            kept, gain, bias, t, b, small, columns = ctx.saved_tensors
        except RuntimeError as error:
            # a checkpoint runs the model's own code here, which may raise anything
            if "modified by an inplace operation" not in str(error):
                raise
            raise KernelError(
                f"compose: the output of the layer was changed in place ({error}). "
                f"Write adapterzoo.kernels.use('reference'), or leave it out by exclude_modules."
            ) from error
        run = compose_backward if torch.is_grad_enabled() else _compose_backward
        of_y, of_gain, *rest = run(dy, kept, gain, bias, t, b, ctx.scaling, ctx.tells, *needs)
        if needs[1] and small is not None:
            last = bias, t, b, ctx.scaling, small
            of_gain = small_gain_backward(dy, columns, of_gain, *last)
        found = of_y, of_gain, *rest
        grads = (g if need else None for g, need in zip(found, needs, strict=True))
        return *grads, None, None, None, None


# the last three arguments are for the backward
_run = computed("compose_triton.compose", compose_reference, 5)


_compose = register(
    "compose(Tensor y, Tensor gain, Tensor? bias, Tensor? t, Tensor? b, float scaling, "
    "bool tells, Tensor? small, Tensor? columns) -> Tensor",
    lambda *args: _run(*args[:6]),
    lambda y, *rest: y.new_empty(y.shape),
    _Compose,
)


_compose_backward = register(
    "compose_backward(Tensor dy, Tensor kept, Tensor gain, Tensor? bias, Tensor? t, Tensor? b, "
    "float scaling, bool tells, bool needs_y, bool needs_gain, bool needs_bias, bool needs_t, "
    "bool needs_b) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    computed("compose_triton.compose_backward", compose_backward, 6),
    _shapes_of_backward,
)
