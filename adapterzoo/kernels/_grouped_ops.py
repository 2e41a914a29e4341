"""The operators of the grouped low-rank update; `grouped` says what they compute.

Each takes the groups as one tensor: on the host for torch, int64, the adapter of each row; on the
device for Triton, int32, the plan.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _grouped_torch, mode
from ._groups import groups_of
from ._ops import below, check, narrowed, register

_LEGAL = "Stacked factors are a [n, rank, d_in] and b [n, d_out, rank]"


def _plan_for_triton(
    kernel: str, plan: Tensor, noise: Tensor | None, x: Tensor, *factors: Tensor
) -> Tensor | None:
    """The plan on the device of `x`, None where torch computes.

    As in `low_rank`, a backward takes the mode of its own time, but sees the mask of its forward.
    """
    if noise is not None:
        taken = noise.dtype is torch.int64
    else:
        taken = mode.takes_triton(kernel, x, *factors)
    if not taken or plan.dtype is torch.int32:
        return plan if taken else None
    n = factors[-1].shape[0]
    return groups_of(plan, n, x.shape[0]).plan(math.prod(x.shape[1:-1]), n, x.device)


def _run_shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: Tensor) -> Tensor:
    placed = _plan_for_triton("grouped_shrink", plan, noise, x, a)
    if placed is None:
        groups = groups_of(plan, a.shape[0], x.shape[0])
        return _grouped_torch.shrink(x, a, p, noise, groups)
    from . import grouped_triton

    return grouped_triton.shrink(x, a, p, noise, placed)


def _run_shrink_backward(
    dt: Tensor, x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: Tensor, *needs: bool
) -> tuple[Tensor, Tensor]:
    placed = _plan_for_triton("grouped_shrink", plan, noise, dt, x, a)
    if placed is None:
        groups = groups_of(plan, a.shape[0], dt.shape[0])
        return _grouped_torch.shrink_backward(dt, x, a, p, noise, groups, *needs)
    from . import grouped_triton

    return grouped_triton.shrink_backward(dt, x, a, p, noise, placed, *needs)


def _run_expand(y: Tensor, t: Tensor, b: Tensor, scaling: Tensor, plan: Tensor) -> Tensor:
    placed = _plan_for_triton("grouped_expand", plan, None, y, t, b)
    if placed is None:
        groups = groups_of(plan, b.shape[0], y.shape[0])
        return _grouped_torch.expand(y, t, b, scaling.tolist(), groups)
    from . import grouped_triton

    return grouped_triton.expand(y, t, b, scaling, placed)


def _run_expand_backward(
    dy: Tensor, t: Tensor, b: Tensor, scaling: Tensor, plan: Tensor, *needs: bool
) -> tuple[Tensor, Tensor]:
    placed = _plan_for_triton("grouped_expand", plan, None, dy, t, b)
    if placed is None:
        groups = groups_of(plan, b.shape[0], dy.shape[0])
        return _grouped_torch.expand_backward(dy, t, b, scaling.tolist(), groups, *needs)
    from . import grouped_triton

    return grouped_triton.expand_backward(dy, t, b, scaling, placed, *needs)


def _fake_shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: Tensor) -> Tensor:
    fits = x.dim() > 1 and a.dim() == 3 and x.shape[-1] == a.shape[-1]
    check("grouped_shrink", "x", "a", {"x": x, "a": a, "noise": noise}, fits, _LEGAL)
    return x.new_empty((*x.shape[:-1], a.shape[1]), dtype=a.dtype)


def _fake_shrink_backward(
    dt: Tensor,
    x: Tensor,
    a: Tensor,
    p: float,
    noise: Tensor | None,
    plan: Tensor,
    needs_x: bool,
    needs_a: bool,
) -> tuple[Tensor, Tensor]:
    operands = {"dt": dt, "x": x, "a": a, "noise": noise}
    fits = dt.shape[-1] == a.shape[1]
    check("grouped_shrink's backward", "dt", "a", operands, fits, _LEGAL)
    dx = x.new_empty((*dt.shape[:-1], a.shape[2]) if needs_x else 0)
    return dx, a.new_empty(a.shape if needs_a else 0)


def _fake_expand(y: Tensor, t: Tensor, b: Tensor, scaling: Tensor, plan: Tensor) -> Tensor:
    fits = b.dim() == 3 and t.shape[-1:] == b.shape[2:]
    fits = fits and y.shape == (*t.shape[:-1], b.shape[1]) and scaling.shape == b.shape[:1]
    check("grouped_expand", "t", "b", {"y": y, "t": t, "b": b}, fits, _LEGAL)
    return y.new_empty(y.shape)


def _fake_expand_backward(
    dy: Tensor, t: Tensor, b: Tensor, scaling: Tensor, plan: Tensor, needs_t: bool, needs_b: bool
) -> tuple[Tensor, Tensor]:
    operands = {"dy": dy, "t": t, "b": b}
    check("grouped_expand's backward", "dy", "b", operands, dy.shape[-1] == b.shape[1], _LEGAL)
    dt = t.new_empty((*dy.shape[:-1], b.shape[2]) if needs_t else 0)
    return dt, b.new_empty(b.shape if needs_b else 0)


class _Shrink(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: Tensor
    ) -> Any:
        # of an x that only passes the gradient on, the dtype is enough
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else x.new_empty(0), a, noise, plan)
        ctx.p = p
        return below(shrink, x, a, p, noise, plan)

    @staticmethod
    def backward(ctx: Any, dt: Tensor) -> Any:
        x, a, noise, plan = ctx.saved_tensors
        needs_x, needs_a = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            told = groups_of(plan, a.shape[0], dt.shape[0])
            dx, da = _grouped_torch.shrink_backward(dt, x, a, ctx.p, noise, told, needs_x, needs_a)
        else:
            dx, da = _shrink_backward(dt, x, a, ctx.p, noise, plan, needs_x, needs_a)
        return dx if needs_x else None, da if needs_a else None, None, None, None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, t: Tensor, b: Tensor, scaling: Tensor, plan: Tensor) -> Any:
        kept = t if ctx.needs_input_grad[2] else t.new_empty(0)
        ctx.save_for_backward(kept, b, scaling, plan)
        return below(expand, y, t, b, scaling, plan)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        t, b, scaling, plan = ctx.saved_tensors
        needs_t, needs_b = ctx.needs_input_grad[1:3]
        if torch.is_grad_enabled():
            told, each = groups_of(plan, b.shape[0], dy.shape[0]), scaling.tolist()
            dt, db = _grouped_torch.expand_backward(dy, t, b, each, told, needs_t, needs_b)
        else:
            dt, db = _expand_backward(dy, t, b, scaling, plan, needs_t, needs_b)
        return dy, dt if needs_t else None, db if needs_b else None, None, None


shrink = register(
    "grouped_shrink(Tensor x, Tensor a, float p, Tensor? noise, Tensor plan) -> Tensor",
    _run_shrink,
    _fake_shrink,
    _Shrink,
    lambda dtype, x, a, p, noise, plan: (x, narrowed(a, dtype), p, noise, plan),
)
_shrink_backward = register(
    "grouped_shrink_backward(Tensor dt, Tensor x, Tensor a, float p, Tensor? noise, "
    "Tensor plan, bool needs_x, bool needs_a) -> (Tensor, Tensor)",
    _run_shrink_backward,
    _fake_shrink_backward,
)
expand = register(
    "grouped_expand(Tensor y, Tensor t, Tensor b, Tensor scaling, Tensor plan) -> Tensor",
    _run_expand,
    _fake_expand,
    _Expand,
    lambda dtype, y, t, b, scaling, plan: (
        y,
        narrowed(t, dtype),
        narrowed(b, dtype),
        scaling,
        plan,
    ),
)
_expand_backward = register(
    "grouped_expand_backward(Tensor dy, Tensor t, Tensor b, Tensor scaling, Tensor plan, "
    "bool needs_t, bool needs_b) -> (Tensor, Tensor)",
    _run_expand_backward,
    _fake_expand_backward,
)
