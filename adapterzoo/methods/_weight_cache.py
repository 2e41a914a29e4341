"""A tensor computed from weights, kept in evaluation for as long as the weights stay the same.

Norms of weights and folded rotations cost more than the layer itself if it gets few tokens, and in
evaluation they are the same in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from adapterzoo.caches import ModuleCache

# subclasses may hide their memory, or compute differently
PLAIN = {Tensor, nn.Parameter}


class WeightCache(ModuleCache):
    """Compute a tensor, or return the one computed before if its sources have not changed.

    A source has changed if its version is another, which every in-place operation that autograd
    tracks increases (optimizers, `load_state_dict`, merging, writes through `detach()`), or if
    another tensor, memory or layout takes its place (assignments, also to `.data`, and swaps).

    Writes that autograd does not track go unnoticed: `p.data.mul_(2)`, NumPy arrays and DLPack
    capsules over the memory, foreign kernels. Only reading all weights, the cost to be saved, would
    show them. After such a write, call `model.eval()` again: `train`, `eval` and every move or cast
    clear the cache. This holds for writes to the layer's weight too, a source of the norms of DoRA
    and DVoRA.

    Optimizers with `fused=True` also write untracked. So nothing is kept after a forward with
    gradients until the mode is set again, nor while a source has a gradient that an optimizer may
    be about to use, or is trained in memory shared with other processes.

    Nothing is kept in training; with gradients; in compiled, traced, exported, transformed or
    captured code; or in a process group, where FSDP refills tensors without a new version. Copies,
    pickles and replicas start empty; state dicts and buffers never include the value.
    """

    _memory: _Memory

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.forget()

    def get(self, compute: Callable[[], Tensor], *sources: Tensor, facts: object = None) -> Tensor:
        """Return the tensor.

        Args:
            compute: computes it from the sources and the facts alone.
            sources: parameters, or views of parameters.
            facts: the numbers and dtypes that it depends on.
        """
        # if another thread clears the cache meanwhile, the value goes to the old memory
        memory = self._memory
        if torch.is_grad_enabled():
            # an optimizer may write the sources untracked
            memory.learns, memory.entry = True, None
            return compute()
        if self.training or is_recorded(sources[0]):
            return compute()
        marks = None if memory.learns else _marks(sources, facts)
        entry = memory.entry
        if entry is not None and entry.marks == marks and not entry.is_stale():
            return entry.value
        value = compute()
        if marks is not None and type(value) is Tensor and not any(map(is_shared, sources)):
            storages = [StorageWeakRef(source.untyped_storage()) for source in sources]
            memory.entry = _Entry(value, marks, storages)
        return value

    @property
    def value(self) -> Tensor | None:
        """The kept value, even if the sources have changed since; None if there is none."""
        entry = self._memory.entry
        return None if entry is None else entry.value

    def empty(self) -> dict[str, Any]:
        """Return the attributes of an empty cache."""
        return {"_memory": _Memory()}


class _Entry(NamedTuple):
    """A value with the state of its sources, in one object so that threads see both or neither.

    Attributes:
        value: the computed tensor.
        marks: the state of the sources, to be compared later.
        storages: weak references to the sources' memory, whose addresses are in the marks.
    """

    value: Tensor
    marks: list[object]
    storages: list[StorageWeakRef]

    def is_stale(self) -> bool:
        """Return whether a source's memory was freed, so that another may have its address."""
        return any(storage.expired() for storage in self.storages)


class _Memory:
    """The state of the cache between two changes of mode.

    Attributes:
        entry: None if nothing is kept.
        learns: whether a backward and an optimizer step may follow.
    """

    def __init__(self) -> None:
        self.entry: _Entry | None = None
        self.learns = False


def is_recorded(source: Tensor) -> bool:
    """Return whether the operations are recorded, to run again with other weights."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or (dist.is_available() and dist.is_initialized())
        or (source.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _marks(sources: tuple[Tensor, ...], facts: object) -> list[object] | None:
    """Return the state of the sources; None if changes of them could go unnoticed."""
    marks: list[object] = [facts]
    for source in sources:
        # a view is a new object in each call, its base is not
        whole = source if source._base is None else source._base
        if type(source) not in PLAIN or type(whole) not in PLAIN or whole.is_inference():
            return None
        if whole.is_leaf and whole.grad is not None:
            return None
        # not the tensor itself, which may be swapped with another
        marks += (id(whole), whole._version, whole.requires_grad, source.data_ptr(), source.dtype)
        marks += (source.shape, source.stride())
        if source.is_cuda:
            # another stream may read the value before it is computed
            marks.append(torch.cuda.current_stream(source.device).cuda_stream)
    return marks


def is_shared(source: Tensor) -> bool:
    """Return whether another process may be training the tensor: versions are not shared."""
    # torch does not know this for GPU memory; sharing memory later moves it to another address
    whole = source if source._base is None else source._base
    return whole.requires_grad and source.is_cpu and source.untyped_storage().is_shared()
