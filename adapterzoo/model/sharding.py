"""Models that another library has changed: sharded by `fully_shard`, or wrapped by PEFT.

After `torch.distributed.fsdp.fully_shard` each process holds a part of each parameter, as a
DTensor. It handles only parameters that existed when it was called, so adapters and heads must be
added before. In layers wrapped by PEFT, adapters act but cannot be added or removed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from adapterzoo.checkpoint.formats import Checkpoint
from adapterzoo.errors import AdapterZooError, CheckpointError, StateError


def reshard(model: Any) -> None:
    """Give every module its sharded parameters again, in this process only.

    After a forward without a backward, `fully_shard` leaves some parameters whole, as other objects
    than those of the optimizer and the checkpoint.
    """
    if _may_be_sharded():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def mesh_of(model: Any) -> Any:
    """Return the `DeviceMesh` of a resharded model; None if no parameter is sharded."""
    if not _may_be_sharded():
        return None
    from torch.distributed.tensor import DTensor

    meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    return next(meshes, None)


def refuse_if_sharded(model: Any, hint: str) -> None:
    """Reshard, and refuse to add or remove parameters of a sharded or wrapped model.

    Args:
        model: with adapters.
        hint: what to write instead.

    Raises:
        StateError: the model is sharded, or has layers of PEFT.
    """
    # PEFT leaves its config in models it wraps; a search of all layers would be slower
    path = peft_layer(model) if "peft_config" in vars(model) else None
    if path is not None:
        raise StateError(
            f"PEFT has wrapped the layer {path!r} of this model. Write peft_model.unload() or "
            f"peft_model.merge_and_unload() first, or do this before get_peft_model(…)."
        )
    reshard(model)
    mesh = mesh_of(model)
    if mesh is not None:
        raise StateError(
            f"the model is sharded over {mesh.size()} processes, and fully_shard keeps to the "
            f"parameters that were there when it was called. {hint}"
        )


def peft_layer(model: nn.Module) -> str | None:
    """Return the path of the first layer that PEFT has wrapped; None without one."""
    # a model with such a layer has imported the class
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    kinds = getattr(tuners, "BaseTunerLayer", ())
    return next((path for path, m in model.named_modules() if isinstance(m, kinds)), None)


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole tensors; those that are not sharded unchanged.

    A collective call if any is sharded. Copies of the same part in several processes are not
    compared.

    Args:
        tensors: of a resharded model, in the same order in all processes.
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
    """Gather the tensors of a checkpoint and write it in the first process of the mesh.

    The others wait and raise its error too. If the model is not sharded, each process writes.

    Args:
        model: resharded.
        stored: of the model, in the same order in all processes.
        write: writes the whole checkpoint.

    Raises:
        CheckpointError: `write` failed; an old checkpoint is still whole.
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
    # along each dimension in turn, until every process has it
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        dist.broadcast_object_list(failure, dist.get_global_rank(group, 0), group)
    if failure[0] is not None:
        raise CheckpointError(failure[0])


def class_name(model: Any) -> str:
    """Return the name of a model's class, without the subclass of `fully_shard`."""
    mro = type(model).__mro__
    if _may_be_sharded():
        from torch.distributed.fsdp import FSDPModule

        if FSDPModule in mro:
            return mro[mro.index(FSDPModule) + 1].__name__
    return mro[0].__name__


def _may_be_sharded() -> bool:
    # torch may be built without process groups, hence the late imports above
    return dist.is_available() and dist.is_initialized()
