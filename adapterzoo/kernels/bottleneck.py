"""The bottleneck: to + s · (φ(x W_downᵀ + b_down) W_upᵀ + b_up).

Papers: Houlsby et al. 2019, arXiv:1902.00751, §2.1; He et al. 2021, arXiv:2110.04366, eq. 7.

Saves x and h = x W_downᵀ + b_down for the backward, which computes φ(h) again. Products and h are
in the dtype of the matrices; a copy of x in that dtype lives no longer than a call. If x is `to`
itself, the product that computes one of its gradients adds the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from adapterzoo.activations import ACTIVATIONS, Activation

from . import ops
from .low_rank import rows_of
from .ops import below, computed, register

# a plain dict, which torch.compile can trace
FUNCTIONS: dict[str, Activation] = dict(ACTIVATIONS)
_ATEN = torch.ops.aten


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
    if ops.is_reference() or formula(activation) not in DERIVATIVES:
        x = x.to(down.dtype)
        return bottleneck_reference(to, x, down, down_bias, up, up_bias, scaling, activation)
    read = None if x is to else x
    keeps = torch.is_grad_enabled()
    # the operator computes the same; only gradients, casts and Triton need it
    plain = not keeps and to.dtype is x.dtype is down.dtype and ops.is_plain(x)
    run = bottleneck_torch if plain else _bottleneck
    out: Tensor = run(to, read, down, down_bias, up, up_bias, scaling, activation, keeps)[0]
    return out


def _sigmoid_weighted(du: Tensor, h: Tensor, slope: float) -> Tensor:
    s = torch.sigmoid(slope * h)
    return du * s * (1.0 + slope * h * (1.0 - s))


# other names of a formula; some of their functions round differently
SYNONYMS = {
    "gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_python": "gelu", "gelu_python_tanh": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "leakyrelu": "leaky_relu", "swish": "silu",
}  # fmt: skip
# dh from du and h, u = φ(h), by formula; all are differentiable again. Autograd differentiates the
# definition with others, which keeps u too.
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": lambda du, h: _ATEN.gelu_backward(du, h),
    "gelu_tanh": lambda du, h: _ATEN.gelu_backward(du, h, approximate="tanh"),
    "leaky_relu": lambda du, h: _ATEN.leaky_relu_backward(du, h, 0.01, False),
    "linear": lambda du, h: du,
    "quick_gelu": lambda du, h: _sigmoid_weighted(du, h, 1.702),
    "relu": lambda du, h: _ATEN.threshold_backward(du, h, 0),
    "sigmoid": lambda du, h: _ATEN.sigmoid_backward(du, torch.sigmoid(h)),
    # torch's own is not differentiable
    "silu": lambda du, h: (
        _sigmoid_weighted(du, h, 1.0) if torch.is_grad_enabled() else _ATEN.silu_backward(du, h)
    ),
    "tanh": lambda du, h: _ATEN.tanh_backward(du, torch.tanh(h)),
}


def formula(activation: str) -> str:
    """Return the name of an activation's formula."""
    return SYNONYMS.get(activation, activation)


def bottleneck_torch(
    to: Tensor,
    x: Tensor | None,
    down: Tensor,
    down_bias: Tensor,
    up: Tensor,
    up_bias: Tensor,
    scaling: float,
    activation: str,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """Return the sum `[*batch, d_model]` of the definition, and h `[*batch, width]`.

    `to` and `x` (None: `to`) `[*batch, d_model]`, `down` `[width, d_model]`, `up`
    `[d_model, width]`. Without `keeps` h is empty.
    """
    dtype = down.dtype
    h = linear((to if x is None else x).to(dtype), down, down_bias)  # [*batch, width]
    u = FUNCTIONS[activation](h)
    if to.dtype is dtype and dtype.itemsize >= 4:
        out = torch.add(to.contiguous(), up_bias, alpha=scaling)
        rows_of(out).addmm_(rows_of(u), up.T, alpha=scaling)  # [rows, d_model]
    else:
        # rounds `to` neither to the dtype of the products nor twice to its own
        out = torch.add(to, linear(u, up, up_bias), alpha=scaling).to(to.dtype)
    return out, h if keeps else h.new_empty(0)


def bottleneck_torch_backward(
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    down: Tensor,
    up: Tensor,
    scaling: float,
    activation: str,
    adds: bool,
    *needs: bool,
    dh: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (plus `dy` with `adds`), down, bias, up, bias; empty: not needed.

    Differentiable again; for that, `dh` `[*batch, width]` is the gradient of the output h. Without
    `needs_down`, `x` may be empty: only its dtype is read.
    """
    needs_x, needs_down, needs_down_bias, needs_up, needs_up_bias = needs or (True,) * 5
    of_down, of_down_bias, of_up, of_up_bias = (h.new_empty(0) for _ in range(4))
    flat, inner = rows_of(dy).to(h.dtype), rows_of(h)  # [rows, d_model], [rows, width]
    dx = x.new_empty(0)
    if needs_up:
        u = FUNCTIONS[activation](inner)
        # uᵀ dy instead of dyᵀ u, with upᵀ in rows, is several times as fast on the CPU
        of_up = _scaled(scaling, down, u.T, flat).T.contiguous()  # [d_model, width]
    if needs_up_bias:
        of_up_bias = flat.sum(0)
        of_up_bias = of_up_bias if scaling == 1.0 else of_up_bias * scaling
    if needs_x or needs_down or needs_down_bias:
        du = _scaled(scaling, inner, flat, up.T.contiguous().T)  # [rows, width]
        inner = DERIVATIVES[formula(activation)](du, inner)
        if dh is not None:
            inner = inner + rows_of(dh)
    if needs_x and adds and dy.dtype is h.dtype:
        dx = torch.addmm(flat, inner, down).view(dy.shape)  # [*batch, d_model]
    elif needs_x:
        dx = (inner @ down).view(dy.shape)  # [*batch, d_model]
        dx = (dx + dy if adds else dx).to(x.dtype)
    if needs_down:
        of_down = inner.T @ rows_of(x).to(h.dtype)  # [width, d_model]
    if needs_down_bias:
        of_down_bias = inner.sum(0)
    return dx, of_down, of_down_bias, of_up, of_up_bias


def _scaled(scaling: float, like: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return scaling · left · right, in one operation; only the shape of `like` is used."""
    return torch.addmm(like.detach(), left, right, beta=0, alpha=scaling)


def _shapes(
    to: Tensor, x: Tensor | None, down: Tensor, down_bias: Tensor, up: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    *_, keeps = rest
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
            run = partial(bottleneck_torch_backward, dh=dh)
        found = run(dy, x, h, down, up, scaling, activation, adds, *needs)
        dx, *grads = (g if need else None for g, need in zip(found, needs, strict=True))
        return dx if adds else dy, None if adds else dx, *grads, None, None, None


_bottleneck = register(
    "bottleneck(Tensor to, Tensor? x, Tensor down, Tensor down_bias, Tensor up, Tensor up_bias, "
    "float scaling, str activation, bool keeps) -> (Tensor, Tensor)",
    computed("bottleneck_triton.bottleneck", bottleneck_torch, 6),
    _shapes,
    _Bottleneck,
    narrows=(2, 3, 4, 5),
)


_bottleneck_backward = register(
    "bottleneck_backward(Tensor dy, Tensor x, Tensor h, Tensor down, Tensor up, float scaling, "
    "str activation, bool adds, bool needs_x, bool needs_down, bool needs_down_bias, "
    "bool needs_up, bool needs_up_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    computed("bottleneck_triton.bottleneck_backward", bottleneck_torch_backward, 5),
    _shapes_of_backward,
)
