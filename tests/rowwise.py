"""Products whose rows do not depend on each other, so that a batch can be compared bit for bit.

BLAS sums a row's products in an order that depends on how many rows there are, and on where they
lie in memory: of plain transformers, too, a row of a batch differs from that row alone in its last
bits. Here every matrix product is summed term by term, in one order for all shapes. Products inside
of attention are seen only where it is made of them: `sdpa_kernel(SDPBackend.MATH)`. A function of
one number, such as exp, has one code for whole vectors and another for the rest of a tensor: here
no tensor has a rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Rowwise(TorchDispatchMode):
    """All products of matrices within it are summed term by term.

    Attributes:
        products: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.products += 1
        if func in (aten.mm.default, aten.bmm.default):
            return _product(*args)
        if func in (aten.addmm.default, aten.baddbmm.default):
            beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
            added = _product(args[1], args[2]) * alpha
            return added + args[0] * beta if beta else added
        self.products -= 1
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        unary = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
        if unary and len(tensors) == 1 and args[0] is tensors[0]:
            return _without_rest(func, *args, **kwargs)
        return func(*args, **kwargs)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`[…, m, k]` and `[…, k, n]`."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for k in range(a.shape[-1]):
        total += a[..., k : k + 1] * b[..., k : k + 1, :]
    return total


def _without_rest(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As many numbers as the widest processors take at once, or a multiple."""
    filled = torch.cat([x.reshape(-1), x.new_ones(-x.numel() % 256)])
    return func(filled, *args, **kwargs)[: x.numel()].view(x.shape)
