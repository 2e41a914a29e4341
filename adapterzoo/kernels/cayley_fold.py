"""From the parameters of butterfly rotations to one rotation per chunk of features.

Paper: Liu et al. 2023, arXiv:2311.06243, §3 and §4. `cayley` makes rotations of the parameters,
and `folded` makes one factor of m; on a GPU one kernel does both, unless chunks are wide.
The host never waits, and all memory is torch's, as a captured graph requires.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _cayley_fold_torch, mode
from ._ops import below, check, computed, register
from .butterfly import folded, folds, widened, without
from .cayley import cayley

# a program cannot keep wider chunks of a single factor, or of a product of several
_WIDEST, _WIDEST_PRODUCT = 64, 32


def cayley_fold(R: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Return the rotations of `cayley`, folded to one factor if that is faster.

    Args:
        R: `[*lead, m, d_in / b, b, b]`, in float32 or float64.
        dropped: blocks that become the identity, bool `[*lead, m, d_in / b]`; None: none.

    Returns:
        `[*lead, 1, chunks, width, width]`, or with all m factors; see `butterfly.folded`.
    """
    fits = is_narrow(R.shape[-4], R.shape[-1]) and R.dtype is torch.float32
    if not fits or mode.is_reference() or not mode.may_take_triton(R):
        if dropped is None and folds(R) and mode.is_plain(R):
            # in torch operations, with a backward by hand
            return widened(_cayley_fold(R, None)[0]).unsqueeze(-4)
        Q = cayley(R)
        return folded(Q if dropped is None else without(Q, dropped))
    whole: Tensor = _cayley_fold(R, dropped)[0]  # [*lead, chunks, width, width]
    return whole.unsqueeze(-4)


def is_narrow(m: int, b: int) -> bool:
    """Return whether a program can keep a chunk of m factors with blocks of b."""
    return b <= _WIDEST if m == 1 else b << (m - 1) <= _WIDEST_PRODUCT


def _shapes(R: Tensor, dropped: Tensor | None) -> tuple[Tensor, Tensor]:
    m, blocks, b = R.shape[-4:-1]
    fits = R.shape[-1] == b and (dropped is None or dropped.shape == R.shape[:-2])
    legal = "R is [*lead, m, blocks, b, b], dropped [*lead, m, blocks]"
    check("cayley_fold", "R", "dropped", {"R": R, "dropped": dropped}, fits, legal)
    n = 1 << (m - 1)
    whole = R.new_empty((*R.shape[:-4], blocks // n, b * n, b * n))
    return whole, R.new_empty(R.shape if m > 1 else 0)


def _shapes_of_backward(grad: Tensor, whole: Tensor, Q: Tensor, dropped: Tensor | None) -> Tensor:
    return Q.new_empty(Q.shape)


class _CayleyFold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, R: Tensor, dropped: Tensor | None) -> Any:
        whole, Q = below(_cayley_fold, R, dropped)
        ctx.set_materialize_grads(False)
        ctx.single = R.shape[-4] == 1
        if ctx.single:
            ctx.mark_non_differentiable(Q)
        ctx.save_for_backward(whole, None if ctx.single else Q, dropped)
        return whole, Q

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_Q: Tensor | None) -> Any:
        whole, Q, dropped = ctx.saved_tensors
        Q = whole.unsqueeze(-4) if ctx.single else Q
        of_Q = None if ctx.single else of_Q
        if grad is None and of_Q is None:
            return None, None
        # only a second backward has a gradient of the factors
        if grad is None or of_Q is not None or torch.is_grad_enabled():
            return _cayley_fold_torch.cayley_fold_backward(grad, whole, Q, dropped, of_Q), None
        return _cayley_fold_backward(grad, whole, Q, dropped), None


_cayley_fold = register(
    "cayley_fold(Tensor R, Tensor? dropped) -> (Tensor, Tensor)",
    computed("cayley_fold", "cayley_fold_triton", _cayley_fold_torch.cayley_fold, 1, single=True),
    _shapes,
    _CayleyFold,
)
_cayley_fold_backward = register(
    "cayley_fold_backward(Tensor grad, Tensor whole, Tensor Q, Tensor? dropped) -> Tensor",
    computed(
        "cayley_fold", "cayley_fold_triton", _cayley_fold_torch.cayley_fold_backward, 3, single=True
    ),
    _shapes_of_backward,
)
