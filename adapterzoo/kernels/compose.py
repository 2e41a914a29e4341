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

from . import _compose_torch, _launch, mode
from ._compose_torch import least
from ._ops import below, check, computed, register
from .exact import exactly

_LEGAL = "y is [*batch, d_out], gain and bias [d_out], t [*batch, rank], b [d_out, rank]"


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
        bias: `[d_out]`, the part of `y` that is not scaled; None: there is none.
        t: `[*batch, rank]`; None: there is no update.
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
        bias: `[d_out]`, the part of `y` that is not scaled; None: there is none.
        t: `[*batch, rank]`, x Aᵀ from `low_rank.shrink`; None: there is no update.
        b: `[d_out, rank]`, given with `t`.
        scaling: the factor s.

    Returns:
        Shape and dtype of `y`.
    """
    if mode.is_reference():
        return compose_reference(y, gain, bias, t, b, scaling)
    reads = torch.is_grad_enabled() and gain.requires_grad and _is_readable(gain)
    if reads or mode.may_take_triton(y):
        few = columns = None
        if reads:
            found = (gain.detach().abs() < least(y.dtype, bias is not None)).nonzero().flatten()
            if found.numel():
                few, columns = found, y.index_select(-1, found)  # [*batch, few]
        out: Tensor = _compose(y, gain, bias, t, b, scaling, reads, few, columns)
        return out
    # the same operations, so that a forward has the same bits with and without gradients
    if mode.is_plain(y):
        return compose_reference(y, gain, bias, t, b, scaling)
    with exactly(y.device):
        return compose_reference(y, gain, bias, t, b, scaling)


def _is_readable(gain: Tensor) -> bool:
    """Return whether the host can read the gain: not in compiled or captured code."""
    is_real = type(gain) in mode.ORIGINAL and not gain.is_meta
    return is_real and not (torch.compiler.is_compiling() or _launch.is_captured())


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


def _run(*args: Any) -> Tensor:
    # the last three are for the backward
    given = args[:6]
    if not mode.takes_triton("compose", *[v for v in given[:5] if v is not None]):
        return compose_reference(*given).contiguous()
    from . import compose_triton

    return compose_triton.compose(*given)


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
        y, gain, bias, t, b, ctx.scaling, ctx.tells, few, columns = args
        kept = out if ctx.tells else y
        # only the gradient of the gain reads it
        kept = kept if ctx.needs_input_grad[1] else y.new_empty(0)
        ctx.save_for_backward(kept, gain, bias, t, b, few, columns)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        needs = ctx.needs_input_grad[:5]
        kept, gain, bias, t, b, few, columns = saved_by(ctx, "compose")
        run = _compose_torch.compose_backward if torch.is_grad_enabled() else _compose_backward
        of_y, of_gain, *rest = run(dy, kept, gain, bias, t, b, ctx.scaling, ctx.tells, *needs)
        if needs[1] and few is not None:
            last = bias, t, b, ctx.scaling, few
            of_gain = _compose_torch.few_backward(dy, columns, of_gain, *last)
        found = of_y, of_gain, *rest
        grads = (g if need else None for g, need in zip(found, needs, strict=True))
        return *grads, None, None, None, None


_compose = register(
    "compose(Tensor y, Tensor gain, Tensor? bias, Tensor? t, Tensor? b, float scaling, "
    "bool tells, Tensor? few, Tensor? columns) -> Tensor",
    _run,
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
