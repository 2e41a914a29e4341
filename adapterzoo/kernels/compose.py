"""The composition of a rescaled layer: gain ∘ (y + s · t Bᵀ − bias) + bias.

This is DoRA's output (Liu et al. 2024, arXiv:2402.09353, eq. 5), with gain = magnitude / norm. BOFT
uses it without the low-rank part, with its scale as the gain. For the backward it keeps one large
tensor: its own output, which the next operation of a model often keeps anyway, or, if a gain is too
small to recover the value before it, y. On a GPU the host decides by the gains of the step before
(`SmallestGain`), so that it need not wait.

An output o with gain g has a rounding error of u |o|, where u is half the distance of two numbers
of its dtype around 1, and a |o| of at most |g z| + |bias| for the value z before the gain. So
(o - bias) / g has an error of at most u (|z| + |bias| / |g|): without a bias it is as exact as a
rounded y, whatever the gain, except near the smallest number of the dtype; with a bias, a gain of
1/2 doubles the share of the bias. That error is what `least` limits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapterzoo.errors import KernelError

from . import _compose_torch, mode
from ._ops import below, check, computed, register
from .exact import exactly
from .gains import SmallestGain

# that limit the share of the bias in the error to that of the dtype below, and to twice its own
_LEAST_GAIN = 1 / 16
_LEAST_GAIN_OF_HALF = 1 / 2
# without a bias: products of smaller ones may be below the smallest normal number
_LEAST_FACTOR = 2.0**-64
_LEAST_FACTOR_OF_FLOAT16 = 1 / 16
_LEGAL = "y is [*batch, d_out], gain and bias [d_out], t [*batch, rank], b [d_out, rank]"


def compose_reference(
    y: Tensor, gain: Tensor, bias: Tensor | None, update: Tensor | None, scaling: float
) -> Tensor:
    """Return the definition: `gain · (y + scaling · update − bias) + bias`.

    Computed in the dtype of `gain` and returned in that of `y`, with the bits of `y` where `gain`
    is 1 and `update` 0.

    Args:
        y: `[*batch, d_out]`, the layer's output.
        gain: `[d_out]`, float32 or float64.
        bias: `[d_out]`, the part of `y` that is not scaled; None: there is none.
        update: `[*batch, d_out]`, t Bᵀ; None: there is none.
        scaling: the factor s.
    """
    whole = y.to(gain.dtype)
    if update is not None:
        whole = torch.add(whole, update.to(gain.dtype), alpha=scaling)  # [*batch, d_out]
    out = whole * gain if bias is None else torch.addcmul((1 - gain) * bias, whole, gain)
    return out.to(y.dtype)


def compose(
    y: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    t: Tensor | None = None,
    b: Tensor | None = None,
    scaling: float = 1.0,
    smallest: SmallestGain | None = None,
) -> Tensor:
    """Return `compose_reference` with the update t Bᵀ, in as few passes over y as possible.

    On a GPU the decision of what to keep depends on gains from some steps before. If a gain has
    become so small since then that no digit of the value before it is left, its gradient is inf or
    NaN, never a wrong number; for this it must fall from `least` to the limit in
    `_compose_torch.divisor` within these steps.

    Args:
        y: `[*batch, d_out]`, the layer's output.
        gain: `[d_out]`, float32 or float64.
        bias: `[d_out]`, the part of `y` that is not scaled; None: there is none.
        t: `[*batch, rank]`, x Aᵀ from `low_rank.shrink`; None: there is no update.
        b: `[d_out, rank]`, given with `t`.
        scaling: the factor s.
        smallest: of the site; None: on a GPU, keep `y`.

    Returns:
        Shape and dtype of `y`.
    """
    if mode.is_reference():
        update = None if t is None or b is None else t.to(gain.dtype) @ b.to(gain.dtype).T
        return compose_reference(y, gain, bias, update, scaling)
    asks_gpu = mode.may_take_triton(y)
    told = None
    if torch.is_grad_enabled():
        told = _from_output(y, gain, bias, smallest if asks_gpu else None, asks_gpu)
    if asks_gpu or told is _OUTPUT:
        # on a CPU the gain alone decides, so that `told` need not be saved
        how = (False, told) if asks_gpu else (True, None)
        out: Tensor = _compose(y, gain, bias, t, b, scaling, *how)
        return out
    # the same operations, so that a forward has the same bits with and without gradients
    if mode.is_plain(y):
        return _compose_torch.compose(y, gain, bias, t, b, scaling)
    with exactly(y.device):
        return _compose_torch.compose(y, gain, bias, t, b, scaling)


# What is kept, as a tensor that is saved with it. A checkpoint repeats the forward in the backward,
# which may decide otherwise; the backward then gets the saved tensors of the repetition, but the
# other attributes of the first forward.
_Y, _OUTPUT = torch.tensor(False), torch.tensor(True)


def _from_output(
    y: Tensor, gain: Tensor, bias: Tensor | None, smallest: SmallestGain | None, asks_gpu: bool
) -> Tensor | None:
    """Return from what the backward recovers the value before the gain; None: always from y.

    On a CPU this reads the gain, which is cheap there; fake tensors have no values.
    """
    if asks_gpu:
        # only the gradient of the gain reads what is kept
        known = None if smallest is None or not gain.requires_grad else smallest.of(gain)
        if known is None:
            return None
        return _OUTPUT if known >= least(y.dtype, bias is not None) else _Y
    plain = type(gain) in mode.ORIGINAL and gain.device.type == "cpu"
    if torch.compiler.is_compiling() or not plain or not gain.numel():
        return None
    return _OUTPUT if tells(gain, y.dtype, bias is not None) else None


def tells(gain: Tensor, dtype: torch.dtype, has_bias: bool) -> bool:
    """Return whether the output tells the value before the gain exactly enough; reads the gain.

    Args:
        gain: `[d_out]`, not empty.
        dtype: of the output.
        has_bias: whether a bias was added after the gain.
    """
    return bool(gain.detach().abs().min() >= least(dtype, has_bias))


def saved_by(ctx: Any, kernel: str) -> tuple[Any, ...]:
    """Return the saved tensors of a node that keeps its own output.

    Args:
        ctx: of the node.
        kernel: its name, for the message.

    Raises:
        KernelError: the output was changed in place.
    """
    try:
        found: tuple[Any, ...] = ctx.saved_tensors
    except RuntimeError as error:
        # a checkpoint runs the model's own code here, which may raise anything
        if "modified by an inplace operation" not in str(error):
            raise
        raise KernelError(
            f"{kernel}: its backward pass cannot read what its forward has kept ({error}). "
            f"If the model changes the output of this layer in place, write "
            f"adapterzoo.kernels.use('reference'), which keeps the layer's own output, or "
            f"leave the layer out by exclude_modules."
        ) from error
    return found


def least(dtype: torch.dtype, has_bias: bool) -> float:
    """Return the smallest |gain| with which the output is kept; see the module."""
    if has_bias:
        return _LEAST_GAIN_OF_HALF if dtype.itemsize < 4 else _LEAST_GAIN
    return _LEAST_FACTOR_OF_FLOAT16 if dtype is torch.float16 else _LEAST_FACTOR


def _shapes(y: Tensor, gain: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    operands = {"y": y, "gain": gain, "bias": bias, "t": rest[0], "b": rest[1]}
    check("compose", "y", "gain", operands, y.shape[-1:] == gain.shape, _LEGAL)
    return y.new_empty(y.shape)


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
        y, gain, bias, t, b, ctx.scaling, ctx.tells, told = args
        kept = out if ctx.tells or (told is not None and told) else y
        # only the gradient of the gain reads it
        kept = kept if ctx.needs_input_grad[1] else y.new_empty(0)
        ctx.save_for_backward(kept, gain, bias, t, b, told)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = ctx.needs_input_grad[:5]
        kept, gain, bias, t, b, told = saved_by(ctx, "compose")
        run = _compose_torch.compose_backward if torch.is_grad_enabled() else _compose_backward
        tells = ctx.tells or (told is not None and bool(told))
        found = run(dy, kept, gain, bias, t, b, ctx.scaling, tells, *needs)
        grads = (g if need else None for g, need in zip(found, needs, strict=True))
        return *grads, None, None, None


_compose = register(
    "compose(Tensor y, Tensor gain, Tensor? bias, Tensor? t, Tensor? b, float scaling, "
    "bool tells, Tensor? told) -> Tensor",
    # the last two are for the backward
    computed("compose", "compose_triton", _compose_torch.compose, 5, prepare=lambda _, x: x[:6]),
    _shapes,
    _Compose,
)
_compose_backward = register(
    "compose_backward(Tensor dy, Tensor kept, Tensor gain, Tensor? bias, Tensor? t, Tensor? b, "
    "float scaling, bool tells, bool needs_y, bool needs_gain, bool needs_bias, bool needs_t, "
    "bool needs_b) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    computed("compose", "compose_triton", _compose_torch.compose_backward, 6),
    _shapes_of_backward,
)
