"""A function that runs again in its backward, instead of keeping what it computes in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import mode
from .exact import exactly


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `run(x)`; keeps only x for the backward.

    Args:
        run: a function that draws no random numbers, reads no other learned tensor, and does not
            depend on autocast.
        x: of any shape.
    """
    if torch.compiler.is_compiling() or mode.is_reference():
        return run(x)
    y: Tensor = _Recomputed.apply(run, x)
    return y


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        # for gradients of gradients, x stays in its graph; hooks of x itself must not run here
        again = torch.is_grad_enabled()
        with torch.enable_grad(), exactly(x.device):
            x = x.view_as(x) if again else x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.run(x), x, dy, create_graph=again)
