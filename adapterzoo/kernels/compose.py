"""The composition of a rescaled layer: gain ∘ (y + s · t Bᵀ − bias) + bias.

This is DoRA's output (Liu et al. 2024, arXiv:2402.09353, eq. 5), with gain = magnitude / norm. BOFT
uses it without the low-rank part, with its scale as the gain. For the backward it keeps one large
tensor. On a CPU this is its own output, which the next operation of a model often keeps anyway,
unless a gain is too small to recover the value before it; then autograd keeps y. On a GPU it is
always y, because reading the smallest gain would make the host wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapterzoo.errors import KernelError

from . import _compose_torch, mode
from ._ops import below, check, computed, register
from .exact import exactly

# the value before the gain can be recovered from the output only if the gain is not too small: the
# rounding error of the output grows by 1 / gain
_LEAST_GAIN = 1 / 16
_LEAST_GAIN_OF_HALF = 1 / 2
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
) -> Tensor:
    """Return `compose_reference` with the update t Bᵀ, in as few passes over y as possible.

    Args:
        y: `[*batch, d_out]`, the layer's output.
        gain: `[d_out]`, float32 or float64.
        bias: `[d_out]`, the part of `y` that is not scaled; None: there is none.
        t: `[*batch, rank]`, x Aᵀ from `low_rank.shrink`; None: there is no update.
        b: `[d_out, rank]`, given with `t`.
        scaling: the factor s.

    Returns:
        Shape and dtype of `y`.
    """
    if mode.is_reference():
        update = None if t is None or b is None else t.to(gain.dtype) @ b.to(gain.dtype).T
        return compose_reference(y, gain, bias, update, scaling)
    asks_gpu = mode.may_take_triton(y)
    if asks_gpu or (torch.is_grad_enabled() and _output_tells(gain, y.dtype)):
        out: Tensor = _compose(y, gain, bias, t, b, scaling, not asks_gpu)
        return out
    # the same operations, so that a forward has the same bits with and without gradients
    if mode.is_plain(y):
        return _compose_torch.compose(y, gain, bias, t, b, scaling)
    with exactly(y.device):
        return _compose_torch.compose(y, gain, bias, t, b, scaling)


def _output_tells(gain: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the backward can recover the value before the gain from the output.

    If it cannot, autograd keeps `y` too. This reads the gain, which is cheap on a CPU only; fake
    tensors have no values.
    """
    plain = type(gain) in (Tensor, torch.nn.Parameter) and gain.device.type == "cpu"
    if torch.compiler.is_compiling() or not plain or not gain.numel():
        return False
    least = _LEAST_GAIN_OF_HALF if dtype.itemsize < 4 else _LEAST_GAIN
    return bool(gain.detach().abs().min() >= least)


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
        y, gain, bias, t, b, ctx.scaling, ctx.tells = args
        kept = out if ctx.tells else y
        # only the gradient of the gain reads it
        kept = kept if ctx.needs_input_grad[1] else y.new_empty(0)
        ctx.save_for_backward(kept, gain, bias, t, b)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = ctx.needs_input_grad[:5]
        try:
            kept, gain, bias, t, b = ctx.saved_tensors
        except RuntimeError as error:
            raise KernelError(
                f"compose: its backward pass cannot read what its forward has kept ({error}). "
                f"If the model changes the output of this layer in place, write "
                f"adapterzoo.kernels.use('reference'), which keeps the layer's own output, or "
                f"leave the layer out by exclude_modules."
            ) from error
        run = _compose_torch.compose_backward if torch.is_grad_enabled() else _compose_backward
        found = run(dy, kept, gain, bias, t, b, ctx.scaling, ctx.tells, *needs)
        return *(g if need else None for g, need in zip(found, needs, strict=True)), None, None


_compose = register(
    "compose(Tensor y, Tensor gain, Tensor? bias, Tensor? t, Tensor? b, float scaling, "
    "bool tells) -> Tensor",
    # `tells` is for the backward
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
