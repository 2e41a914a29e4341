"""The low-rank update of a mixed batch: y + s · (x Aᵀ) Bᵀ for each row, with its own adapter.

Papers: Chen et al. 2023 (Punica), arXiv:2310.18547, §4; Sheng et al. 2023 (S-LoRA),
arXiv:2311.03285, §5.3; the update is that of Hu et al. 2021, arXiv:2106.09685, eq. 3.

As in `low_rank` there are two operators: `grouped_shrink` computes t = x Aᵀ for each row, and
`grouped_expand` y + s · t Bᵀ; methods that rescale or rotate rows call them separately. `Groups`
says which row takes which adapter; factors of different ranks are stacked, padded with zeros. Saves
x, t, the stacks and, with dropout, one bit for each feature for the backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout as plain_dropout
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from . import _dropout, _grouped_ops, _grouped_torch, mode
from ._groups import BASE, Groups, on_device
from .low_rank import low_rank_reference

__all__ = [
    "Groups",
    "Stack",
    "grouped_expand",
    "grouped_low_rank",
    "grouped_low_rank_reference",
    "grouped_shrink",
    "on_device",
    "stacked",
    "stacked_down",
    "stacked_up",
]


class Stack(NamedTuple):
    """Factors of n adapters, for `grouped_low_rank(y, x, *stack, groups)`.

    Attributes:
        a: `[n, rank, d_in]`; zero beyond an adapter's own rank.
        b: `[n, d_out, rank]`; zero beyond an adapter's own rank.
        scaling: the factor s of each.
    """

    a: Tensor
    b: Tensor
    scaling: tuple[float, ...]


def stacked(a: Sequence[Tensor], b: Sequence[Tensor], scaling: Sequence[float]) -> Stack:
    """Stack factors, padded to the widest rank; differentiable.

    A caller may keep the stack as long as its factors do not change.

    Args:
        a: n factors `[rank_i, d_in]`.
        b: n factors `[d_out, rank_i]`.
        scaling: n factors s.
    """
    return Stack(stacked_down(a), stacked_up(b), tuple(scaling))


def stacked_down(a: Sequence[Tensor]) -> Tensor:
    """Return n factors `[rank_i, d_in]` as `[n, rank, d_in]`; see `stacked`."""
    if len({factor.shape for factor in a}) == 1:
        return torch.stack([*a])
    return pad_sequence([*a], batch_first=True)


def stacked_up(b: Sequence[Tensor]) -> Tensor:
    """Return n factors `[d_out, rank_i]` as `[n, d_out, rank]`; see `stacked`."""
    if len({factor.shape for factor in b}) == 1:
        return torch.stack([*b])
    return pad_sequence([factor.T for factor in b], batch_first=True).mT  # [n, d_out, rank]


def grouped_low_rank_reference(
    y: Tensor,
    x: Tensor,
    a: Sequence[Tensor] | Tensor,
    b: Sequence[Tensor] | Tensor,
    scaling: Sequence[float],
    groups: Groups,
) -> Tensor:
    """Return `low_rank_reference` of each row with its adapter, in the dtype of `y`.

    Args:
        y: `[batch, *tokens, d_out]`, the output that gets the update.
        x: `[batch, *tokens, d_in]`, in the dtype of the factors.
        a: n factors `[rank_i, d_in]`.
        b: n factors `[d_out, rank_i]`.
        scaling: n factors s.
        groups: which adapter each row of the batch takes.
    """
    rows = [
        y[row] if i == BASE else low_rank_reference(y[row], x[row], a[i], b[i], scaling[i])
        for row, i in enumerate(groups.index)
    ]
    return torch.stack(rows) if rows else y.clone()  # [batch, *tokens, d_out]


def grouped_low_rank(
    y: Tensor,
    x: Tensor,
    a: Sequence[Tensor] | Tensor,
    b: Sequence[Tensor] | Tensor,
    scaling: Sequence[float],
    groups: Groups,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """Return `grouped_low_rank_reference` for `x` of any dtype, with dropout, in few calls.

    Args:
        y: `[batch, *tokens, d_out]`, the output that gets the update.
        x: `[batch, *tokens, d_in]`, in any floating dtype.
        a: n factors `[rank_i, d_in]`, or a stack of them.
        b: n factors `[d_out, rank_i]`, or a stack of them.
        scaling: n factors s.
        groups: which adapter each row of the batch takes.
        dropout: probability, 0 to below 1, of dropping a feature of x on the way to A.
        training: whether to drop features.

    Returns:
        Shape and dtype of `y`. A row without an adapter has the bits of `y`; an adapter without
        rows gets a gradient of zeros.

    Raises:
        KernelError: the groups are those of another batch or name an adapter that does not exist;
            or the mode is `"triton"`, and Triton cannot take the operands.
    """
    groups.check("grouped_low_rank", x, len(a))
    if mode.is_reference():
        dropped = plain_dropout(x.to(a[0].dtype), dropout, training) if len(a) else x
        return grouped_low_rank_reference(y, dropped, a, b, scaling, groups)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        a, b, scaling = stacked([*a], [*b], scaling)
    return grouped_expand(y, grouped_shrink(x, a, groups, dropout, training), b, scaling, groups)


def grouped_shrink(
    x: Tensor, a: Tensor, groups: Groups, dropout: float = 0.0, training: bool = False
) -> Tensor:
    """Project down: t = dropout(x) Aᵀ with each row's A, accumulated in float32 or float64.

    Args:
        x: `[batch, *tokens, d_in]`, in any floating dtype.
        a: `[n, rank, d_in]`, from `stacked`.
        groups: which adapter each row of the batch takes.
        dropout: probability, 0 to below 1, of dropping a feature of x.
        training: whether to drop features.

    Returns:
        `[batch, *tokens, rank]`, in the dtype of `a`; under autocast in its dtype. Zero beyond an
        adapter's own rank, and for a row without an adapter.

    Raises:
        KernelError: see `grouped_low_rank`.
    """
    groups.check("grouped_shrink", x, a.shape[0])
    if mode.is_reference():
        dropped = plain_dropout(x.to(a.dtype), dropout, training)
        none = a.new_zeros(*x.shape[1:-1], a.shape[1])
        rows = [none if i == BASE else linear(dropped[r], a[i]) for r, i in enumerate(groups.index)]
        return torch.stack(rows) if rows else a.new_zeros(*x.shape[:-1], a.shape[1])
    noise = None
    if training and dropout:
        in_triton = mode.takes_triton("grouped_shrink", x, a)
        noise = _dropout.seed(x) if in_triton else _dropout.bits(x, dropout)
    elif x.dtype is a.dtype and _calls_torch(x):
        return _grouped_torch.shrink(x, a, 0.0, None, groups)
    t: Tensor = _grouped_ops.shrink(x, a, dropout, noise, _plan("grouped_shrink", groups, x, a))
    return t


def grouped_expand(
    y: Tensor, t: Tensor, b: Tensor, scaling: Sequence[float], groups: Groups
) -> Tensor:
    """Add the update: y + s · t Bᵀ with each row's B and s, in one pass over y.

    Args:
        y: `[batch, *tokens, d_out]`, the output that gets the update.
        t: `[batch, *tokens, rank]`, from `grouped_shrink`.
        b: `[n, d_out, rank]`, from `stacked`.
        scaling: n factors s.
        groups: which adapter each row of the batch takes.

    Returns:
        Shape and dtype of `y`; a row without an adapter has its bits.

    Raises:
        KernelError: see `grouped_low_rank`.
    """
    groups.check("grouped_expand", y, b.shape[0])
    if mode.is_reference():
        rows = [
            y[r] if i == BASE else torch.add(y[r], linear(t[r], b[i]).to(y.dtype), alpha=scaling[i])
            for r, i in enumerate(groups.index)
        ]
        return torch.stack(rows) if rows else y.clone()  # [batch, *tokens, d_out]
    if y.dtype is t.dtype is b.dtype and _calls_torch(y):
        return _grouped_torch.expand(y, t, b, scaling, groups)
    plan = _plan("grouped_expand", groups, y, t, b)
    place = (torch.device("cpu"), torch.float64) if plan is groups.host else (y.device, torch.float)
    out: Tensor = _grouped_ops.expand(y, t, b, groups.scales(tuple(scaling), *place), plan)
    return out


def _calls_torch(x: Tensor) -> bool:
    """Return whether to call torch without the operator, which only gradients need.

    Not in compiled code, which would be compiled again for the groups of each batch.
    """
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling()) and mode.is_plain(x)


def _plan(kernel: str, groups: Groups, x: Tensor, *factors: Tensor) -> Tensor:
    """Return the groups as an operator's argument: a plan for Triton, or torch's on the host."""
    if not mode.takes_triton(kernel, x, *factors):
        return groups.host
    return groups.plan(math.prod(x.shape[1:-1]), factors[-1].shape[0], x.device)
