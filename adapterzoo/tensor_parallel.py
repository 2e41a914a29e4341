"""Tensor parallelism: how a layer is split over processes, and which sums they exchange.

Paper: Shoeybi et al. 2019, arXiv:1909.08053, §3. In a column-parallel layer, each process has some
rows of W: the input x is whole, and each process has a part of the output y. In a row-parallel
layer, each process has some columns of W and a part of x; y, the sum over the processes, is whole.

An adapter at such a layer splits its tensors like the layer: a dimension of output features like
y, and a dimension of input features like x; all else is the same in each process. Let t be a
product over the input features that every output feature reads, such as A x of a low-rank update.
In a row-parallel layer, each process has a summand of t. In a column-parallel layer, t is whole,
and each process has a summand of its gradient. So one sum, of t in the forward or of its gradient
in the backward, makes the outputs and all gradients those of one process (`LayerSplit.joined`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """How a layer is split over the processes of a mesh, along at most one of its two dimensions.

    Attributes:
        mesh: a mesh with one dimension.
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
        """Return the product over all input features, with the gradient from all output features.

        Args:
            t: the product over this process's input features, of any shape.
        """
        return self.spread(self.summed(t))

    def summed(self, t: Tensor) -> Tensor:
        """Return the product over all input features: in a row-parallel layer, a sum."""
        return _apply(_Sum, t, self.mesh) if self.inputs else t

    def spread(self, t: Tensor) -> Tensor:
        """Return `t` unchanged; in a column-parallel layer its gradient is summed.

        Args:
            t: the same in all processes; all output features read it.
        """
        return _apply(_Spread, t, self.mesh) if self.outputs else t

    def part(self, t: Tensor, dim: int) -> Tensor:
        """Return this process's part of a whole tensor along a dimension, as `Shard` splits it."""
        parts = t.chunk(self.size, dim)
        mine = self.mesh.get_local_rank()
        return parts[mine] if mine < len(parts) else t.narrow(dim, 0, 0)


def _apply(function: Any, t: Tensor, mesh: Any) -> Tensor:
    return cast("Tensor", function.apply(t, mesh.get_group()))


class _Sum(torch.autograd.Function):
    """The sum over a group; its gradient, the same in each process, is also that of `t`."""

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
    """Return whether a tensor is a DTensor, a class that torch may be built without."""
    return hasattr(tensor, "device_mesh")


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor; for a DTensor, detached and by a collective call."""
    if not is_part(tensor):
        return tensor
    # CPUOffloadPolicy keeps the shards where the process group may not reach them
    part = cast("Any", tensor.detach())
    return cast("Tensor", part.to(part.device_mesh.device_type).full_tensor())


def part_of(value: Tensor, like: Any) -> Any:
    """Return this process's part of a tensor that all processes have, without communication."""
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, like.placements, src_data_rank=None)


def write(target: Tensor, value: Tensor) -> None:
    """Write a whole value to a tensor of which this process may have only a part."""
    target.copy_(part_of(value, target) if is_part(target) else value)
