"""The low-rank update: y + s · (x Aᵀ) Bᵀ, without computing B A.

Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3.

There are two operators: `shrink` computes t = x Aᵀ, and `expand` y + s · t Bᵀ; methods that need
x Aᵀ elsewhere call only the first. Saves x, t and, with dropout, one bit for each feature for the
backward. Products and t are in the dtype of the factors; a copy of x in that dtype lives no longer
than a call.

If the layer is a plain product with a frozen weight, `fork` returns x beside t, and
`frozen.product` computes the layer and the update from both. Only that product writes the gradient
of x, and nothing else holds it, so that the gradient of t is added to it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as plain_dropout
from torch.nn.functional import linear

from . import _dropout, _low_rank_torch, mode
from ._ops import below, check, product


def low_rank_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return the definition: `y + scaling · x aᵀ bᵀ`, in the dtype of `y`.

    Args:
        y: `[*batch, d_out]`, the output that gets the update.
        x: `[*batch, d_in]`, in the dtype of `a` and `b`.
        a: `[rank, d_in]`.
        b: `[d_out, rank]`.
        scaling: the factor s.
    """
    update = linear(linear(x, a), b)  # [*batch, d_out]
    return torch.add(y, update.to(y.dtype), alpha=scaling)


def low_rank(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """Return `low_rank_reference` for `x` of any dtype, with dropout, with few saved tensors.

    Args:
        y: `[*batch, d_out]`, the output that gets the update.
        x: `[*batch, d_in]`, in any floating dtype.
        a: `[rank, d_in]`.
        b: `[d_out, rank]`.
        scaling: the factor s.
        dropout: probability, 0 to below 1, of dropping a feature of x on the way to A.
        training: whether to drop features.

    Returns:
        Shape and dtype of `y`.

    Raises:
        KernelError: the mode is `"triton"`, and Triton cannot take the operands.
    """
    return expand(y, shrink(x, a, dropout, training), b, scaling)


def shrink(
    x: Tensor, a: Tensor | Sequence[Tensor], dropout: float = 0.0, training: bool = False
) -> Tensor:
    """Project down: t = dropout(x) Aᵀ, accumulated in float32 or float64.

    Args:
        x: `[*batch, d_in]`, in any floating dtype.
        a: `[rank, d_in]`, or several of one dtype, which are concatenated to A.
        dropout: probability, 0 to below 1, of dropping a feature of x.
        training: whether to drop features.

    Returns:
        `[*batch, rank]`, in the dtype of `a`; under autocast in its dtype.
    """
    factors = (a,) if isinstance(a, Tensor) else a
    drops = training and dropout > 0.0
    if x.dtype is factors[0].dtype and mode.is_plain(x, drops):
        if not drops and _low_rank_torch.is_small(x):
            # autograd keeps as little and costs less
            return linear(x, _low_rank_torch.joined(factors))
        # a compiler would trace the drawing of bits
        if not drops or not torch.compiler.is_compiling():
            noise = _dropout.bits(x, dropout) if drops else None
            if torch.is_grad_enabled():
                return _forked(x, dropout, noise, factors)[1]
            return _low_rank_torch.shrink(x, _low_rank_torch.joined(factors), dropout, noise)
    A = _low_rank_torch.joined(factors)
    if mode.is_reference():
        return linear(plain_dropout(x.to(A.dtype), dropout, training), A)
    t: Tensor = _shrink(x, A, dropout, _noise(x, A, dropout) if drops else None)
    return t


def fork(
    x: Tensor, factors: Sequence[Tensor], dropout: float = 0.0, training: bool = False
) -> tuple[Tensor, Tensor]:
    """Return x for `frozen.product` or `rescaled.product` alone, and `shrink` of x.

    Autograd adds the gradients of all uses of the former. The gradient of t is added to the sum in
    place, which is legal because these nodes return gradients that nothing else holds.

    Args:
        x: `[*batch, d_in]`, in any floating dtype.
        factors: `[rank, d_in]` each, of one dtype.
        dropout: see `shrink`.
        training: see `shrink`.

    Returns:
        `[*batch, d_in]` and `[*batch, sum of ranks]`.
    """
    if not torch.is_grad_enabled() or not mode.is_eager(x) or _low_rank_torch.is_small(x):
        return x, shrink(x, factors, dropout, training)
    noise = None
    if training and dropout > 0.0:
        noise = _noise(x, factors[0], dropout)
    return _forked(x, dropout, noise, factors)


def _forked(
    x: Tensor, p: float, noise: Tensor | None, factors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return x and t; without a gradient of x, x itself, so that no use of it gets one."""
    made: Any = _Fork.apply(x, p, noise, *factors)
    return made if isinstance(made, tuple) else (x, made)


def _noise(x: Tensor, a: Tensor, p: float) -> Tensor:
    """Return what tells which features of `x` drop: a seed for Triton, bits for torch."""
    return _dropout.seed(x) if mode.takes_triton("shrink", x, a) else _dropout.bits(x, p)


def expand(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Add the update: y + scaling · t Bᵀ in one pass over y.

    Args:
        y: `[*batch, d_out]`, the output that gets the update.
        t: `[*batch, rank]`, from `shrink`.
        b: `[d_out, rank]`.
        scaling: the factor s.

    Returns:
        Shape and dtype of `y`.
    """
    if y.dtype is t.dtype is b.dtype and mode.is_plain(y):
        return _low_rank_torch.added(y, t, b, scaling)
    if mode.is_reference():
        update = linear(t, b.to(t.dtype))  # [*batch, d_out]
        return torch.add(y, update.to(y.dtype), alpha=scaling)
    out: Tensor = _expand(y, t, b, scaling)
    return out


def expand_backward(
    dy: Tensor, t: Tensor, b: Tensor, scaling: float, needs_t: bool, needs_b: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of t and b; empty if not needed. Differentiable again."""
    # an operator is not differentiated
    run = _low_rank_torch.expand_backward if torch.is_grad_enabled() else _expand_backward
    found: tuple[Tensor, Tensor] = run(dy, t, b, scaling, needs_t, needs_b)
    return found


def _shapes_of_shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None) -> Tensor:
    check("shrink", "x", "a", {"x": x, "a": a, "noise": noise}, x.shape[-1:] == a.shape[1:])
    return x.new_empty((*x.shape[:-1], a.shape[0]), dtype=a.dtype)


def _shapes_of_expand(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    fits = y.shape == (*t.shape[:-1], b.shape[0]) and t.shape[-1:] == b.shape[1:]
    check("expand", "t", "b", {"y": y, "t": t, "b": b}, fits)
    return y.new_empty(y.shape)


_shrink, _shrink_backward = product(
    "low_rank_shrink(Tensor x, Tensor a, float p, Tensor? noise) -> Tensor",
    "shrink",
    "low_rank_triton",
    (_low_rank_torch.shrink, _low_rank_torch.shrink_backward),
    _shapes_of_shrink,
    noise=3,
    narrows=(1,),
)
_expand, _expand_backward = product(
    "low_rank_expand(Tensor y, Tensor t, Tensor b, float scaling) -> Tensor",
    "expand",
    "low_rank_triton",
    (_low_rank_torch.expand, _low_rank_torch.expand_backward),
    _shapes_of_expand,
    added=True,
    narrows=(1, 2),
)


class _Fork(torch.autograd.Function):
    """x ↦ (x, t), by several factors at once; keeps x, the factors and `noise`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, noise: Tensor | None, *factors: Tensor) -> Any:
        """`x` `[*batch, d_in]`, factors `[rank, d_in]` → x, t `[*batch, sum of ranks]`."""
        # without gradients of the factors, only the dtype of x is needed
        learns = any(ctx.needs_input_grad[3:])
        ctx.save_for_backward(x if learns else x.new_empty(0), noise, *factors)
        ctx.p = p
        ctx.set_materialize_grads(False)
        t = below(_shrink, x, _low_rank_torch.joined(factors), p, noise)
        return (x, t) if ctx.needs_input_grad[0] else t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """The gradients of x, None if only t was used, and of t `[*batch, sum of ranks]`."""
        x, noise, *factors = ctx.saved_tensors
        needs_x, _, _, *needs = ctx.needs_input_grad
        onto, dt = grads if needs_x else (None, *grads)
        if dt is None:
            return onto, None, None, *[None] * len(factors)
        given = dt, x, _low_rank_torch.joined(factors), ctx.p, noise, needs_x, any(needs)
        if noise is None or noise.dtype is not torch.int64 or torch.is_grad_enabled():
            dx, da = _low_rank_torch.shrink_backward(*given, onto)
        else:
            dx, da = _shrink_backward(*given)
            dx = dx if onto is None else onto.add_(dx)
        parts = da.split([a.shape[0] for a in factors]) if any(needs) else factors
        of_factors = (part if need else None for part, need in zip(parts, needs, strict=True))
        return dx if needs_x else None, None, None, *of_factors
