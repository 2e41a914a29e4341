"""Models that `torch.distributed.fsdp.fully_shard` has split over processes.

Each process holds a part of each parameter, as a DTensor. `fully_shard` knows the parameters that
were there when it was called: adapters and heads come before it and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from adapterzoo.checkpoint.formats import Checkpoint
from adapterzoo.errors import AdapterZooError, CheckpointError, StateError

from .wrapped import refuse_if_wrapped


def rest(model: Any) -> None:
    """Let every module show its own part of the parameters again, on this process alone.

    After a forward without a backward `fully_shard` leaves some parameters whole, as other
    objects than those that an optimizer and a checkpoint see.

    Args:
        model: sharded or not.
    """
    if _may_be_sharded():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def mesh_of(model: Any) -> Any:
    """The `DeviceMesh` over which a model at rest is sharded; None: every parameter is whole."""
    if not _may_be_sharded():
        return None
    from torch.distributed.tensor import DTensor

    meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    return next(meshes, None)


def refuse_if_sharded(model: Any, call: str, hint: str) -> None:
    """Raise where the set or the nature of the parameters would change below `fully_shard` or PEFT.

    Args:
        model: is brought to rest.
        call: what the user wrote, for the message.
        hint: what to write instead.

    Raises:
        StateError: the model is sharded, or has layers of PEFT.
    """
    refuse_if_wrapped(model, call)
    rest(model)
    mesh = mesh_of(model)
    if mesh is not None:
        raise StateError(
            f"{call}: the model is sharded over {mesh.size()} processes, and fully_shard keeps to "
            f"the parameters that were there when it was called. {hint}"
        )


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with all their parts; those that are not sharded as they are.

    A collective call where any is sharded. Copies that the processes hold of the same part are
    not compared: each gets its own.

    Args:
        tensors: of a model at rest, in the same order in all processes.
    """
    if not _may_be_sharded():
        return dict(tensors)
    from torch.distributed.tensor import DTensor

    def whole(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        # CPUOffloadPolicy keeps the parts where the process group may not reach them
        there = cast("Any", tensor.detach().to(tensor.device_mesh.device_type))
        return cast("Tensor", there.full_tensor())

    return {key: whole(tensor) for key, tensor in tensors.items()}


def save(model: Any, stored: Checkpoint, write: Callable[[Checkpoint], None]) -> None:
    """Gather the tensors of a checkpoint and write it in one process, the first of the mesh.

    The others wait for it and share its error. Where the model is not sharded each process writes.

    Args:
        model: at rest.
        stored: of the model, in the same order in all processes.
        write: writes what is whole.

    Raises:
        CheckpointError: what `write` raised; an old checkpoint is still whole.
    """
    whole = Checkpoint(stored.metadata, gathered(stored.adapter), gathered(stored.head))
    mesh = mesh_of(model)
    if mesh is None:
        write(whole)
        return
    failure: list[str | None] = [None]
    if not any(mesh.get_coordinate()):
        try:
            write(whole)
        except AdapterZooError as error:
            failure = [str(error)]
    # along one dimension after the other: then all have heard it
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        dist.broadcast_object_list(failure, dist.get_global_rank(group, 0), group)
    if failure[0] is not None:
        raise CheckpointError(failure[0])


def class_name(model: Any) -> str:
    """The name of a model's class; `fully_shard` gives it a subclass of that."""
    mro = type(model).__mro__
    if _may_be_sharded():
        from torch.distributed.fsdp import FSDPModule

        if FSDPModule in mro:
            return mro[mro.index(FSDPModule) + 1].__name__
    return mro[0].__name__


def _may_be_sharded() -> bool:
    # what follows is imported late: a build of torch may have no process groups
    return dist.is_available() and dist.is_initialized()
