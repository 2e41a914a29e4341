"""The low-rank update: y + s · (x Aᵀ) Bᵀ, without computing B A.

Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3.

There are two operators: `shrink` computes t = x Aᵀ, and `expand` y + s · t Bᵀ; methods that need
x Aᵀ elsewhere call only the first. Saves x, t and, with dropout, one bit for each feature for the
backward. Products and t are in the dtype of the factors; a copy of x in that dtype lives no longer
than a call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout as plain_dropout
from torch.nn.functional import linear

from . import _dropout, _low_rank_torch, mode
from ._ops import check, product


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
    drops = training and dropout > 0.0
    if not drops and y.dtype is x.dtype is a.dtype is b.dtype and mode.is_plain(y):
        return low_rank_reference(y, x, a, b, scaling)
    return expand(y, shrink(x, a, dropout, training), b, scaling)


def shrink(x: Tensor, a: Tensor, dropout: float = 0.0, training: bool = False) -> Tensor:
    """Project down: t = dropout(x) Aᵀ, accumulated in float32 or float64.

    Args:
        x: `[*batch, d_in]`, in any floating dtype.
        a: `[rank, d_in]`.
        dropout: probability, 0 to below 1, of dropping a feature of x.
        training: whether to drop features.

    Returns:
        `[*batch, rank]`, in the dtype of `a`; under autocast in its dtype.
    """
    drops = training and dropout > 0.0
    if mode.is_reference():
        return linear(plain_dropout(x.to(a.dtype), dropout, training), a)
    # autograd keeps as little, and costs less than the operator
    if not drops and x.dtype is a.dtype and mode.is_plain(x):
        return linear(x, a)
    t: Tensor = _shrink(x, a, dropout, _noise(x, a, dropout) if drops else None)
    return t


def _noise(x: Tensor, a: Tensor, p: float) -> Tensor:
    """Return what tells which features of `x` drop: a seed for Triton, bits for torch."""
    return _dropout.seed(x) if mode.takes_triton("shrink", x, a) else _dropout.bits(x, p)


def expand(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Add the update: y + scaling · t Bᵀ.

    Args:
        y: `[*batch, d_out]`, the output that gets the update.
        t: `[*batch, rank]`, from `shrink`.
        b: `[d_out, rank]`.
        scaling: the factor s.

    Returns:
        Shape and dtype of `y`.
    """
    if mode.is_reference() or (y.dtype is t.dtype is b.dtype and mode.is_plain(y)):
        update = linear(t, b.to(t.dtype))  # [*batch, d_out]
        return torch.add(y, update.to(y.dtype), alpha=scaling)
    out: Tensor = _expand(y, t, b, scaling)
    return out


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
