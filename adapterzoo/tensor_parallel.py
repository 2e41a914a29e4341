"""Tensor parallelism: how a layer is split over processes, and what these have to sum.

Paper: Shoeybi et al. 2019, arXiv:1909.08053, §3. A column-parallel layer has some rows of W in each
process: the input x is whole, and the output y is a part. A row-parallel layer has some columns: x
is a part, and y is whole, the sum over the processes.

An adapter at such a layer has the same part of each of its tensors: where a dimension counts output
features, the part of y, and where it counts input features, the part of x; all else is equal in
each process. Let t be a product over the input features that each output feature reads, as A x of a
low-rank update. In a row-parallel layer each process has a summand of t. In a column-parallel layer
t is whole, and each process has a summand of its gradient. So one sum of t, in the forward or in
the backward, makes the outputs and all gradients those of one process (`Split.joined`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Split:
    """How a layer is split over the processes of a mesh; at most one of the two is true.

    Attributes:
        mesh: of one dimension.
        inputs: whether each process has a part of the input features (row-parallel).
        outputs: whether each process has a part of the output features (column-parallel).
        d_in: the number of input features of the whole layer.
    """

    mesh: Any
    inputs: bool
    outputs: bool
    d_in: int

    @property
    def sides(self) -> frozenset[str]:
        """The side of the layer that is split, "in" or "out"; empty for a layer that is whole."""
        return frozenset(("in",) * self.inputs + ("out",) * self.outputs)

    @property
    def size(self) -> int:
        """The number of processes."""
        return int(self.mesh.size())

    def joined(self, t: Tensor) -> Tensor:
        """Return a product over the input features, for each output feature to read.

        Args:
            t: the product over this process's input features, of any shape.
        """
        return self.spread(self.summed(t))

    def summed(self, t: Tensor) -> Tensor:
        """Return a product over the input features: in a row-parallel layer, the sum of all."""
        return _apply(_Sum, t, self.mesh) if self.inputs else t

    def spread(self, t: Tensor) -> Tensor:
        """Return what each output feature reads: in a column-parallel layer its gradient is summed.

        Args:
            t: equal in all processes.
        """
        return _apply(_Spread, t, self.mesh) if self.outputs else t

    def part(self, t: Tensor, dim: int) -> Tensor:
        """Return this process's part of a whole tensor along a dimension, as `Shard` has it."""
        parts = t.chunk(self.size, dim)
        mine = self.mesh.get_local_rank()
        return parts[mine] if mine < len(parts) else t.narrow(dim, 0, 0)


def _apply(function: Any, t: Tensor, mesh: Any) -> Tensor:
    return cast("Tensor", function.apply(t, mesh.get_group()))


class _Sum(torch.autograd.Function):
    """The sum over a group; the gradient of the sum is equal in each process, and that of `t`."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Any) -> Tensor:
        total = t.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Spread(torch.autograd.Function):
    """The tensor itself; its gradient is the sum over a group."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def is_part(tensor: object) -> bool:
    """Return whether a tensor is a DTensor: torch may be built without the class."""
    return hasattr(tensor, "device_mesh")


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, without gradients if it is a DTensor; a collective call then."""
    return cast("Tensor", cast("Any", tensor.detach()).full_tensor()) if is_part(tensor) else tensor


def write(target: Tensor, value: Tensor) -> None:
    """Write a whole value to a tensor of which this process may have a part."""
    if is_part(target):
        from torch.distributed.tensor import distribute_tensor

        own: Any = target
        value = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
    target.copy_(value)
