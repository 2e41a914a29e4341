"""The low-rank update: y + s · (x Aᵀ) Bᵀ, without ever building B A.

Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3.

Two operators: `shrink` gives t = x Aᵀ, `expand` gives y + s · t Bᵀ; methods that need x Aᵀ
elsewhere take the first alone. Saved for the backward are x, t and, with dropout, a bit for each
feature. The factors decide in which dtype the products are: x and t come in theirs, and a copy
of x in it lives no longer than a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as plain_dropout
from torch.nn.functional import linear

from . import _dropout, _low_rank_torch, mode
from ._ops import below, check, narrowed, register


def low_rank_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """The definition: `y + scaling · x aᵀ bᵀ`, in the dtype of `y`.

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
    """`low_rank_reference` of any `x`, with dropout, fast and saving little.

    Args:
        y: `[*batch, d_out]`, the output that gets the update.
        x: `[*batch, d_in]`, in any floating dtype.
        a: `[rank, d_in]`.
        b: `[d_out, rank]`.
        scaling: the factor s.
        dropout: probability, 0 to below 1, of dropping a feature of x on the way to A.
        training: whether features are dropped at all.

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
        a: `[rank, d_in]`, or several of one dtype: A is then all of them, one below the other.
        dropout: probability, 0 to below 1, of dropping a feature of x.
        training: whether features are dropped at all.

    Returns:
        `[*batch, rank]`, in the dtype of `a`; under autocast in its dtype.
    """
    factors = (a,) if isinstance(a, Tensor) else a
    drops = training and dropout > 0.0
    if x.dtype is factors[0].dtype and mode.is_plain(x):
        if not drops and _low_rank_torch.is_small(x):
            # autograd keeps as little, and costs less
            return linear(x, _low_rank_torch.joined(factors))
        # a compiler would look into the drawing of bits
        if not drops or not torch.compiler.is_compiling():
            noise = _dropout.bits(x, dropout) if drops else None
            return _low_rank_torch.project(x, factors, dropout, noise)
    A = _low_rank_torch.joined(factors)
    if mode.is_reference():
        return linear(plain_dropout(x.to(A.dtype), dropout, training), A)
    noise = None
    if drops:
        noise = _dropout.seed(x) if mode.takes_triton("shrink", x, A) else _dropout.bits(x, dropout)
    t: Tensor = _shrink(x, A, dropout, noise)
    return t


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


def _takes_triton(kernel: str, noise: Tensor | None, *operands: Tensor) -> bool:
    # a seed is for Triton, bits are for torch, and a backward must see the mask of its forward
    if noise is not None:
        return noise.dtype is torch.int64
    return mode.takes_triton(kernel, *operands)


def _run_shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None) -> Tensor:
    if not _takes_triton("shrink", noise, x, a):
        return _low_rank_torch.shrink(x, a, p, noise).contiguous()
    from . import low_rank_triton

    return low_rank_triton.shrink(x, a, p, noise)


def _run_shrink_backward(
    dt: Tensor, x: Tensor, a: Tensor, p: float, noise: Tensor | None, *needs: bool
) -> tuple[Tensor, Tensor]:
    if not _takes_triton("shrink", noise, dt, x, a):
        return _low_rank_torch.shrink_backward(dt, x, a, p, noise, *needs)
    from . import low_rank_triton

    return low_rank_triton.shrink_backward(dt, x, a, p, noise, *needs)


def _run_expand(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    if not _takes_triton("expand", None, y, t, b):
        return _low_rank_torch.expand(y, t, b, scaling)
    from . import low_rank_triton

    return low_rank_triton.expand(y, t, b, scaling)


def _run_expand_backward(
    dy: Tensor, t: Tensor, b: Tensor, scaling: float, *needs: bool
) -> tuple[Tensor, Tensor]:
    if not _takes_triton("expand", None, dy, t, b):
        dt, db = _low_rank_torch.expand_backward(dy, t, b, scaling, *needs)
        return dt.contiguous(), db
    from . import low_rank_triton

    return low_rank_triton.expand_backward(dy, t, b, scaling, *needs)


def _fake_shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None) -> Tensor:
    check("shrink", "x", "a", {"x": x, "a": a, "noise": noise}, x.shape[-1:] == a.shape[1:])
    return x.new_empty((*x.shape[:-1], a.shape[0]), dtype=a.dtype)


def _fake_shrink_backward(
    dt: Tensor,
    x: Tensor,
    a: Tensor,
    p: float,
    noise: Tensor | None,
    needs_x: bool,
    needs_a: bool,
) -> tuple[Tensor, Tensor]:
    operands = {"dt": dt, "x": x, "a": a, "noise": noise}
    check("shrink's backward", "dt", "a", operands, dt.shape[-1:] == a.shape[:1])
    dx = x.new_empty((*dt.shape[:-1], a.shape[1]) if needs_x else 0)
    return dx, a.new_empty(a.shape if needs_a else 0)


def _fake_expand(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    fits = y.shape == (*t.shape[:-1], b.shape[0]) and t.shape[-1:] == b.shape[1:]
    check("expand", "t", "b", {"y": y, "t": t, "b": b}, fits)
    return y.new_empty(y.shape)


def _fake_expand_backward(
    dy: Tensor, t: Tensor, b: Tensor, scaling: float, needs_t: bool, needs_b: bool
) -> tuple[Tensor, Tensor]:
    check("expand's backward", "dy", "b", {"dy": dy, "t": t, "b": b}, dy.shape[-1:] == b.shape[:1])
    dt = t.new_empty((*dy.shape[:-1], b.shape[1]) if needs_t else 0)
    return dt, b.new_empty(b.shape if needs_b else 0)


class _Shrink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, p: float, noise: Tensor | None) -> Any:
        # of an x that only passes the gradient on, the dtype is enough
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else x.new_empty(0), a, noise)
        ctx.p = p
        return below(_shrink, x, a, p, noise)

    @staticmethod
    def backward(ctx: Any, dt: Tensor) -> Any:
        x, a, noise = ctx.saved_tensors
        needs_x, needs_a = ctx.needs_input_grad[:2]
        run = _low_rank_torch.shrink_backward if torch.is_grad_enabled() else _shrink_backward
        dx, da = run(dt, x, a, ctx.p, noise, needs_x, needs_a)
        return dx if needs_x else None, da if needs_a else None, None, None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Any:
        ctx.save_for_backward(t if ctx.needs_input_grad[2] else t.new_empty(0), b)
        ctx.scaling = scaling
        return below(_expand, y, t, b, scaling)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        t, b = ctx.saved_tensors
        needs_t, needs_b = ctx.needs_input_grad[1:3]
        run = _low_rank_torch.expand_backward if torch.is_grad_enabled() else _expand_backward
        dt, db = run(dy, t, b, ctx.scaling, needs_t, needs_b)
        return dy, dt if needs_t else None, db if needs_b else None, None


_shrink = register(
    "low_rank_shrink(Tensor x, Tensor a, float p, Tensor? noise) -> Tensor",
    _run_shrink,
    _fake_shrink,
    _Shrink,
    lambda dtype, x, a, p, noise: (x, narrowed(a, dtype), p, noise),
)
_shrink_backward = register(
    "low_rank_shrink_backward(Tensor dt, Tensor x, Tensor a, float p, Tensor? noise, "
    "bool needs_x, bool needs_a) -> (Tensor, Tensor)",
    _run_shrink_backward,
    _fake_shrink_backward,
)
_expand = register(
    "low_rank_expand(Tensor y, Tensor t, Tensor b, float scaling) -> Tensor",
    _run_expand,
    _fake_expand,
    _Expand,
    lambda dtype, y, t, b, scaling: (y, narrowed(t, dtype), narrowed(b, dtype), scaling),
)
_expand_backward = register(
    "low_rank_expand_backward(Tensor dy, Tensor t, Tensor b, float scaling, "
    "bool needs_t, bool needs_b) -> (Tensor, Tensor)",
    _run_expand_backward,
    _fake_expand_backward,
)
