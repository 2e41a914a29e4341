"""The bottleneck: to + s · (φ(x W_downᵀ + b_down) W_upᵀ + b_up).

Papers: Houlsby et al. 2019, arXiv:1902.00751, §2.1; He et al. 2021, arXiv:2110.04366, eq. 7.

Saves x and h = x W_downᵀ + b_down for the backward, which computes φ(h) again. Products and h are
in the dtype of the matrices; a copy of x in that dtype lives no longer than a call. If x is `to`
itself, the product that computes one of its gradients adds the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import _bottleneck_torch, mode
from ._bottleneck_torch import FUNCTIONS, SMALL
from ._ops import below, check, computed, register

_LEGAL = (
    "to and x are [*batch, d_model], down is [width, d_model], up [d_model, width], their biases "
    "[width] and [d_model]"
)


def bottleneck_reference(
    to: Tensor,
    x: Tensor,
    down: Tensor,
    down_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    scaling: float,
    activation: str,
) -> Tensor:
    """Return the definition, in the dtype of `to`.

    Args:
        to: `[*batch, d_model]`, to which the bottleneck's result is added.
        x: `[*batch, d_model]`, its input, in the dtype of the matrices.
        down: `[width, d_model]`.
        down_bias: `[width]`.
        up: `[d_model, width]`.
        up_bias: `[d_model]`.
        scaling: the factor s.
        activation: φ, a key of `activations.ACTIVATIONS`.
    """
    update = linear(FUNCTIONS[activation](linear(x, down, down_bias)), up, up_bias)
    return torch.add(to, update.to(to.dtype), alpha=scaling)  # [*batch, d_model]


def bottleneck(
    to: Tensor,
    x: Tensor,
    down: Tensor,
    down_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    scaling: float,
    activation: str,
) -> Tensor:
    """Return `bottleneck_reference` for `x` of any dtype, fast and with few saved tensors.

    Args:
        to: `[*batch, d_model]`, to which the bottleneck's result is added.
        x: `[*batch, d_model]`, its input, in any floating dtype; may be `to` itself.
        down: `[width, d_model]`.
        down_bias: `[width]`.
        up: `[d_model, width]`.
        up_bias: `[d_model]`.
        scaling: the factor s.
        activation: φ, a key of `activations.ACTIVATIONS`.

    Returns:
        Shape and dtype of `to`.

    Raises:
        KernelError: the mode is `"triton"`, and Triton cannot take the operands.
    """
    plain = to.dtype is x.dtype is down.dtype and mode.is_plain(x)
    # the usual case on a CPU, where each call in Python counts
    if plain and to.numel() <= SMALL:
        inner = FUNCTIONS[activation](linear(x, down, down_bias))
        return torch.add(to, linear(inner, up, up_bias), alpha=scaling)
    if mode.is_reference():
        x = x.to(down.dtype)
        return bottleneck_reference(to, x, down, down_bias, up, up_bias, scaling, activation)
    read = None if x is to else x
    keeps = torch.is_grad_enabled()
    run = _bottleneck_torch.bottleneck if plain and not keeps else _bottleneck
    out: Tensor = run(to, read, down, down_bias, up, up_bias, scaling, activation, keeps)[0]
    return out


def _shapes(
    to: Tensor, x: Tensor | None, down: Tensor, down_bias: Tensor, up: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    up_bias, _, _, keeps = rest
    operands = {"to": to, "x": x, "down": down, "down_bias": down_bias, "up": up}
    fits = down.shape == (*down_bias.shape, *up_bias.shape) and up.shape == down.shape[::-1]
    fits = fits and to.shape[-1:] == up_bias.shape and (x is None or x.shape == to.shape)
    check("bottleneck", "to", "down", operands | {"up_bias": up_bias}, fits, _LEGAL)
    h = down.new_empty((*to.shape[:-1], down.shape[0]) if keeps else 0)
    return to.new_empty(to.shape), h


def _shapes_of_backward(
    dy: Tensor, x: Tensor, h: Tensor, down: Tensor, up: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    _, _, _, needs_x, *needs = rest
    shapes = (down.shape, down.shape[:1], up.shape, up.shape[:1])
    grads = (h.new_empty(shape if need else 0) for shape, need in zip(shapes, needs, strict=True))
    return x.new_empty(dy.shape if needs_x else 0), *grads


class _Bottleneck(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        to, x, down, _, up, _, ctx.scaling, ctx.activation, _ = args
        out, h = below(_bottleneck, *args[:-1], True)
        read = to if x is None else x
        # without a gradient of `down`, only the dtype of x is needed
        ctx.save_for_backward(read if ctx.needs_input_grad[2] else read.new_empty(0), h, down, up)
        ctx.adds = x is None
        # h is an output for second derivatives; in a first derivative its gradient is None
        ctx.set_materialize_grads(False)
        return out, h

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> Any:
        x, h, down, up = ctx.saved_tensors
        of_to, of_x, *needs = ctx.needs_input_grad[:6]
        scaling, activation, adds = ctx.scaling, ctx.activation, ctx.adds
        if dy is None:
            dy = x.new_zeros((*h.shape[:-1], up.shape[0]))  # [*batch, d_model]
        needs = [of_to if adds else of_x, *needs]
        run = _bottleneck_backward
        if dh is not None or torch.is_grad_enabled():
            run = partial(_bottleneck_torch.bottleneck_backward, dh=dh)
        found = run(dy, x, h, down, up, scaling, activation, adds, *needs)
        dx, *grads = (g if need else None for g, need in zip(found, needs, strict=True))
        return dx if adds else dy, None if adds else dx, *grads, None, None, None


_bottleneck = register(
    "bottleneck(Tensor to, Tensor? x, Tensor down, Tensor down_bias, Tensor up, Tensor up_bias, "
    "float scaling, str activation, bool keeps) -> (Tensor, Tensor)",
    computed("bottleneck", "bottleneck_triton", _bottleneck_torch.bottleneck, 6),
    _shapes,
    _Bottleneck,
    narrows=(2, 3, 4, 5),
)
_bottleneck_backward = register(
    "bottleneck_backward(Tensor dy, Tensor x, Tensor h, Tensor down, Tensor up, float scaling, "
    "str activation, bool adds, bool needs_x, bool needs_down, bool needs_down_bias, "
    "bool needs_up, bool needs_up_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    computed("bottleneck", "bottleneck_triton", _bottleneck_torch.bottleneck_backward, 5),
    _shapes_of_backward,
)
