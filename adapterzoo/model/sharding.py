"""Models that another library has changed: sharded, or wrapped by PEFT.

After `torch.distributed.fsdp.fully_shard`, each process holds a part of each parameter, as a
DTensor. After `deepspeed.initialize` with ZeRO stage 3 (DeepSpeed 0.19.8), a parameter is empty,
has a `ds_id`, and is whole only within `GatheredParameters`. Both handle only parameters that exist
when they are called, so adapters and heads must be added before. In layers wrapped by PEFT,
adapters act but cannot be added or removed. With a `tp_plan` of transformers, each process holds a
part of some layers, also as DTensors; adapters and heads can be added at any time, in all processes
(`inject.parallel`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adapterzoo.anatomy import input_embeddings_of, unwrapped
from adapterzoo.errors import AdapterZooError, CheckpointError, StateError
from adapterzoo.inject import parallel
from adapterzoo.inject.layers import unpacked_size
from adapterzoo.tensor_parallel import is_part, part_of, whole_tensor

from .state import output_embeddings_of


def reshard(model: Any) -> None:
    """Give every module its sharded parameters again, in this process only.

    After a forward without a backward, `fully_shard` leaves some parameters whole: other objects
    than those that the optimizer and the checkpoint refer to.
    """
    if _may_be_sharded():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def groups_of(model: Any) -> list[Any]:
    """Return the process groups over which a resharded model is sharded, one for each dimension."""
    every = map(_groups, model.parameters() if _may_be_sharded() else ())
    return [*next(filter(None, every), ())]


def _groups(tensor: Tensor) -> tuple[Any, ...]:
    """Return the process groups over which a tensor is sharded, one for each dimension."""
    if is_part(tensor):
        mesh = cast("Any", tensor).device_mesh
        return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    return (cast("Any", tensor).ds_process_group,) if _is_partitioned(tensor) else ()


def _is_partitioned(tensor: Tensor) -> bool:
    """Return whether ZeRO stage 3 handles a parameter."""
    return hasattr(tensor, "ds_id")


def split_over(model: Any) -> Any:
    """Return the mesh over which a `tp_plan` has split a model; None for another model."""
    for parameter in model.parameters() if _may_be_sharded() else ():
        if is_part(parameter):
            mesh = parameter.device_mesh
            # a mesh of fully_shard has another name, no name, or more dimensions
            return mesh if mesh.mesh_dim_names == ("tp",) else None
    return None


def equalize(model: Any, modules: Iterable[nn.Module]) -> None:
    """Copy the values of new modules from the first process to all, if a `tp_plan` has split it."""
    if (mesh := split_over(model)) is not None:
        parallel.equalize(modules, mesh)


def refuse_if_fixed(model: Any, hint: str) -> None:
    """Reshard, and refuse to add or remove parameters if their set is fixed.

    Args:
        model: with adapters.
        hint: what to write instead.

    Raises:
        StateError: the model is sharded, but not by a `tp_plan`, or has layers of PEFT.
    """
    refuse_if_wrapped(model)
    if split_over(model) is None:
        refuse_if_sharded(model, hint)


def refuse_if_sharded(model: Any, hint: str) -> None:
    """Reshard, and refuse a model that is sharded or wrapped.

    Args:
        model: with adapters.
        hint: what to write instead.

    Raises:
        StateError: the model is sharded, or has layers of PEFT.
    """
    refuse_if_wrapped(model)
    reshard(model)
    if (mesh := split_over(model)) is not None:
        if "fully_shard" in hint:
            hint = "Load the model without tp_plan."
        raise StateError(f"the model is split over {mesh.size()} processes by its tp_plan. {hint}")
    if groups := groups_of(model):
        by = "fully_shard"
        if any(_is_partitioned(parameter) for parameter in model.parameters()):
            by, hint = "ZeRO", hint.replace("fully_shard(model)", "deepspeed.initialize(…)")
        raise StateError(
            f"the model is sharded over {math.prod(map(dist.get_world_size, groups))} processes, "
            f"and {by} handles only parameters that existed when it was called. {hint}"
        )


def refuse_if_wrapped(model: Any) -> None:
    """Refuse a model that PEFT has wrapped.

    Raises:
        StateError: it has layers of PEFT.
    """
    # PEFT leaves its config in models that it wraps; searching all layers first would be slower
    path = peft_layer(model) if "peft_config" in vars(model) else None
    if path is not None:
        raise StateError(f"PEFT has wrapped the layer {path!r}. Write peft_model.unload() first.")


def peft_layer(model: nn.Module) -> str | None:
    """Return the path of the first layer that PEFT has wrapped; None without one."""
    found = (path for path, m in model.named_modules() if _is_of_peft(cast("Any", type(m))))
    return next(found, None)


@functools.cache
def _is_of_peft(cls: type[nn.Module]) -> bool:
    """Return whether a class of layers is one of PEFT, which this library never imports."""
    names = ((c.__module__.partition(".")[0], c.__name__) for c in cls.__mro__)
    return ("peft", "BaseTunerLayer") in names


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process has only a part of a tensor."""
    return is_part(tensor) or _is_partitioned(tensor)


def shape_of(tensor: Tensor) -> list[int]:
    """Return the shape of the whole tensor."""
    return [*(cast("Any", tensor).ds_shape if _is_partitioned(tensor) else tensor.shape)]


def size_of(parameter: Tensor) -> int:
    """Return the number of entries of the whole parameter, unpacked."""
    if _is_partitioned(parameter):
        return int(cast("Any", parameter).ds_numel)
    return unpacked_size(parameter)


@contextlib.contextmanager
def gathering(
    model: Any, modules: Iterable[nn.Module], parameters: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Return a context in which parameters of adapters and heads are whole under ZeRO stage 3.

    A collective call if they are partitioned. Token embeddings and everything outside the base
    model are whole too.

    Args:
        model: with adapters.
        modules: modules of adapters, in the same order in all processes.
        parameters: other parameters to gather.
    """
    if not (_may_be_sharded() and any(map(_is_partitioned, model.parameters()))):
        yield
        return
    tables = (input_embeddings_of(model), output_embeddings_of(model))
    backbone = model._backbone
    outside = [] if backbone is model else [*model.children()]
    outside = [child for child in outside if unwrapped(child) is not backbone]
    every = (*modules, *outside, *(table for table in tables if table is not None))
    whole = dict.fromkeys((*(p for module in every for p in module.parameters()), *parameters))
    with _partitioned(whole):
        yield


def _partitioned(
    tensors: Iterable[Tensor], modifier_rank: int | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which tensors that ZeRO has partitioned are whole.

    Args:
        tensors: any tensors.
        modifier_rank: the process whose values all processes get at the end; None: no value is
            changed.
    """
    own = [t for t in tensors if _is_partitioned(t)]
    if modifier_rank is None:
        # parameters that are already whole must not be gathered again
        own = [t for t in own if t.numel() != size_of(t)]
    if not own:
        return contextlib.nullcontext()
    # a model with such parameters has imported it
    gather: Any = sys.modules["deepspeed"].zero.GatheredParameters
    return cast("contextlib.AbstractContextManager[Any]", gather(own, modifier_rank=modifier_rank))


def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole tensors; tensors that are not sharded are returned unchanged.

    A collective call if any is sharded. Replicas of a shard in several processes are not compared.

    Args:
        tensors: of a resharded model, in the same order in all processes.
    """
    with _partitioned(tensors.values()):
        return {
            key: t.detach().clone() if _is_partitioned(t) else whole_tensor(t)
            for key, t in tensors.items()
        }


def negative_at(
    tensors: Mapping[str, Tensor], positions: Callable[[int], Tensor]
) -> dict[str, Tensor]:
    """Return whether entries of whole tensors have a sign bit, `bool`, on the CPU.

    A collective call if any is sharded; no tensor is gathered.

    Args:
        tensors: of a resharded model, in the same order in all processes.
        positions: the number of entries of a tensor → those to look at, counted in memory order.
    """
    indices: dict[tuple[int, torch.device], Tensor] = {}
    found: dict[str, Tensor] = {}
    shared: dict[Any, list[str]] = {}
    for key, tensor in tensors.items():
        part, size = cast("Any", tensor.detach()), size_of(tensor)
        # parts may be on the CPU while the processes communicate through GPUs
        device = tensor.device.type
        if is_part(tensor):
            device, part = part.device_mesh.device_type, part.to_local()
        elif _is_partitioned(tensor):
            part = cast("Any", tensor).ds_tensor
        at = size, part.device
        if at not in indices:
            indices[at] = positions(size).to(part.device)
        index, inside = indices[at], None
        if groups := _groups(tensor):
            shared.setdefault((groups, device), []).append(key)
            index, inside = _own_entries(index, tensor)
        signs = torch.signbit(part.take(index))
        if inside is not None:
            signs = torch.zeros_like(inside).masked_scatter_(inside, signs)
        found[key] = signs.cpu()
    for (groups, device), keys in shared.items():
        joined = torch.cat([found[key] for key in keys]).to(device, torch.uint8)
        for group in groups:
            dist.all_reduce(joined, dist.ReduceOp.MAX, group)
        parts = joined.bool().cpu().split([len(found[key]) for key in keys])
        found |= dict(zip(keys, parts, strict=True))
    return found


def _own_entries(index: Tensor, tensor: Any) -> tuple[Tensor, Tensor]:
    """Return which entries of a whole tensor this process has, as positions in its part.

    Args:
        index: positions in the whole tensor.
        tensor: partitioned by ZeRO, or a DTensor whose placements are `Shard` or `Replicate`.

    Returns:
        The positions in the local tensor of those that it has, and which these are.
    """
    if _is_partitioned(tensor):
        # a piece of the flattened tensor for each process; the last one is padded
        size = tensor.ds_tensor.ds_numel
        start = size * dist.get_rank(tensor.ds_process_group)
        inside = (index >= start) & (index < start + size)
        return index[inside] - start, inside
    shape, first = [*tensor.shape], [0] * tensor.dim()
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard():
            cut, mesh = placement.dim, tensor.device_mesh
            # as torch.chunk cuts
            step = -(-shape[cut] // mesh.size(dim))
            start = min(step * mesh.get_local_rank(dim), shape[cut])
            first[cut] += start
            shape[cut] = min(step, shape[cut] - start)
    inside = torch.ones_like(index, dtype=torch.bool)
    mine = torch.zeros_like(index)
    for cut, place in enumerate(torch.unravel_index(index, tensor.shape)):
        inside &= (place >= first[cut]) & (place < first[cut] + shape[cut])
        mine = mine * shape[cut] + place - first[cut]
    return mine[inside], inside


def is_flattened(model: nn.Module) -> bool:
    """Return whether FSDP 1 wraps a part of a model, where parameters are parts of a flat one."""
    if not _may_be_sharded():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def is_read_in_parts(tensor: Tensor) -> bool:
    """Return whether `negative_at` can read a tensor.

    It can if the tensor is whole, or cut into parts in memory that are slices of it.
    """
    if _is_partitioned(tensor):
        part = cast("Any", tensor).ds_tensor
        # parts of NVMe offload are on a disk, and quantized ones have lost signs
        return bool(part.status.name == "AVAILABLE" and part.dtype == tensor.dtype)
    placements = cast("Any", tensor).placements if is_part(tensor) else ()
    return all(type(each).__name__ in ("Shard", "Replicate") for each in placements)


def fill(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write whole values into tensors that may be sharded.

    A collective call under ZeRO stage 3, where the values of the first process count.

    Args:
        values: pairs of a tensor of a resharded model and its new value, the same in all processes.
    """
    values = [(tensor, value.detach()) for tensor, value in values]
    # the first process sends the values to the others
    with torch.no_grad(), _partitioned((tensor for tensor, _ in values), modifier_rank=0):
        for tensor, value in values:
            if is_part(tensor):
                cast("Any", tensor).to_local().copy_(part_of(value, tensor).to_local())
            else:
                tensor.copy_(value)
    for tensor, value in values:
        _set_master(tensor, value)


def _set_master(tensor: Any, value: Tensor) -> None:
    """Write a value to DeepSpeed's own copy of a parameter, from which its next step starts.

    Every stage of ZeRO keeps a float32 copy of the trained parameters, and overwrites the model's
    parameters with it (DeepSpeed 0.19.8).
    """
    if hasattr(tensor, "_z3_optimizer"):
        # the function for whole values fails if the partitions are padded
        sys.modules["deepspeed"].utils.safe_set_local_fp32_param(tensor, tensor.ds_tensor.data)
    elif hasattr(tensor, "_hp_mapping"):
        sys.modules["deepspeed"].utils.safe_set_full_fp32_param(tensor, value.to(tensor.device))


def whole_state(optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer over sharded parameters, as in a single process.

    A collective call.

    Args:
        optimizer: the optimizer of a resharded model, not one of DeepSpeed.
    """
    state = optimizer.state_dict()
    whole = {}
    for number, own in state["state"].items():
        tensors = {key: value for key, value in own.items() if isinstance(value, Tensor)}
        whole[number] = {**own, **gathered(tensors)}
    return {**state, "state": whole}


def load_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load this process's part of a state from `whole_state` into an optimizer.

    Args:
        optimizer: the optimizer of the same parameters, sharded over any number of processes.
        state: the whole state, in all processes.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    own = dict(zip(numbers, parameters, strict=True))

    def part(number: int, value: Any) -> Any:
        parameter = own[number]
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        return part_of(value, parameter) if is_part(parameter) else value

    parts = {n: {k: part(n, v) for k, v in each.items()} for n, each in state["state"].items()}
    optimizer.load_state_dict({**state, "state": parts})


def in_first_process(model: Any, write: Callable[[], None]) -> None:
    """Write a checkpoint in the first process of the mesh.

    The other processes wait, and raise its error too. If the model is not sharded, every process
    writes.

    Args:
        model: resharded.
        write: a function that writes whole tensors.

    Raises:
        CheckpointError: `write` failed; an old checkpoint is still intact.
    """
    groups = groups_of(model)
    if not groups:
        write()
        return
    failure: list[str | None] = [None]
    if not any(dist.get_rank(group) for group in groups):
        try:
            write()
        except AdapterZooError as error:
            failure = [str(error)]
    # along each dimension of the mesh in turn, until every process has the result
    for group in groups:
        dist.broadcast_object_list(failure, dist.get_global_rank(group, 0), group)
    if failure[0] is not None:
        raise CheckpointError(failure[0])


@contextlib.contextmanager
def raised_in_all(processes: int) -> Iterator[None]:
    """Raise an error of one process in all of them, so that none waits for it.

    A collective call; within the block the processes must not wait for one another.

    Args:
        processes: the number of processes; with 1, there is no communication.

    Raises:
        CheckpointError: another process has failed.
    """
    try:
        yield
    except Exception as error:
        _exchanged(str(error), processes)
        raise
    for rank, message in enumerate(_exchanged(None, processes)):
        if message is not None:
            raise CheckpointError(f"process {rank}: {message}")


def _exchanged(message: str | None, processes: int) -> list[str | None]:
    messages: list[str | None] = [message] * processes
    if processes > 1:
        dist.all_gather_object(messages, message)
    return messages


def class_name(model: Any) -> str:
    """Return the name of a model's class, before `fully_shard` made a subclass of it."""
    names = [cls.__name__ for cls in type(model).__mro__]
    return names[names.index("FSDPModule") + 1 if "FSDPModule" in names else 0]


def _may_be_sharded() -> bool:
    return dist.is_available() and dist.is_initialized()
