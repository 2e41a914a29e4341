"""The operators of the grouped low-rank update; see `grouped` for what they compute.

Each takes the groups as one tensor: for torch the adapter of each row, int64 on the host; for
Triton the plan, int32 on the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _grouped_torch
from ._groups import groups_of
from ._ops import check, product

_LEGAL = "Stacked factors are a [n, rank, d_in] and b [n, d_out, rank]"


def _prepared(in_triton: bool, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the plan on the device for Triton, with the `Groups` for torch.

    A backward uses the mode that is set when it runs, so the forward's tensor may be the other one.
    """
    # the groups are the last tensor, the factors the last one before with three dimensions
    at = max(i for i, v in enumerate(args) if isinstance(v, Tensor))
    x, plan = args[0], args[at]
    if in_triton and plan.dtype is torch.int32:
        return args
    n = next(v for v in args[at - 1 :: -1] if isinstance(v, Tensor) and v.dim() == 3).shape[0]
    told: Any = groups_of(plan, n, x.shape[0])
    if in_triton:
        told = told.plan(math.prod(x.shape[1:-1]), n, x.device)
    return *args[:at], told, *args[at + 1 :]


def _shapes_of_shrink(x: Tensor, a: Tensor, p: float, noise: Tensor | None, plan: Tensor) -> Tensor:
    fits = x.dim() > 1 and a.dim() == 3 and x.shape[-1] == a.shape[-1]
    check("grouped_shrink", "x", "a", {"x": x, "a": a, "noise": noise}, fits, _LEGAL)
    return x.new_empty((*x.shape[:-1], a.shape[1]), dtype=a.dtype)


def _shapes_of_expand(y: Tensor, t: Tensor, b: Tensor, scaling: Tensor, plan: Tensor) -> Tensor:
    fits = b.dim() == 3 and t.shape[-1:] == b.shape[2:]
    fits = fits and y.shape == (*t.shape[:-1], b.shape[1]) and scaling.shape == b.shape[:1]
    check("grouped_expand", "t", "b", {"y": y, "t": t, "b": b}, fits, _LEGAL)
    return y.new_empty(y.shape)


shrink, _shrink_backward = product(
    "grouped_shrink(Tensor x, Tensor a, float p, Tensor? noise, Tensor plan) -> Tensor",
    "grouped_shrink",
    "grouped_triton",
    (_grouped_torch.shrink, _grouped_torch.shrink_backward),
    _shapes_of_shrink,
    noise=3,
    prepare=_prepared,
    narrows=(1,),
)
expand, _expand_backward = product(
    "grouped_expand(Tensor y, Tensor t, Tensor b, Tensor scaling, Tensor plan) -> Tensor",
    "grouped_expand",
    "grouped_triton",
    (_grouped_torch.expand, _grouped_torch.expand_backward),
    _shapes_of_expand,
    added=True,
    prepare=_prepared,
    narrows=(1, 2),
)
