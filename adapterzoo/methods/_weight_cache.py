"""A tensor that follows from weights, kept in evaluation for as long as they stay the same.

The norm of DoRA and the folded rotation of BOFT cost more than the layer itself when it is given
few tokens, and in evaluation they are the same in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

# subclasses hide their memory, or compute something else
_PLAIN = {Tensor, nn.Parameter}


class WeightCache(nn.Module):
    """Computes a tensor, or gives the one computed before when nothing it came from has changed.

    A change is another version, which all in-place operations that autograd knows of give:
    optimizers, `load_state_dict`, merging, writes through `detach()`; or another tensor, memory
    or layout in the place of the old one: assignments, also to `.data`, and swapped tensors.

    Writes that leave no trace on the tensor are not seen: `p.data.mul_(2)`, NumPy arrays and
    DLPack capsules over its memory, kernels of others. Only reading all weights would show them,
    which is what is to be saved. After such a write, call `model.eval()` again: `train`, `eval`
    and every move or cast forget what was kept.

    Optimizers with `fused=True` write like this too. So after a forward with gradients nothing is
    kept until the mode is set again, and never while a source has a gradient that an optimizer
    may be about to use, or is learning in memory shared with other processes.

    Nothing is kept in training, with gradients, inside of compiled, traced, exported, transformed
    or captured code, and in a process group, where FSDP refills tensors without a new version.
    Copies, pickles and replicas begin with nothing; state dicts and buffers never have it.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        super().__init__()
        self._memory = _Memory()

    def get(self, compute: Callable[[], Tensor], *sources: Tensor, facts: object = None) -> Tensor:
        """Return the tensor.

        Args:
            compute: makes it from the sources and the facts alone.
            sources: parameters, or views of parameters.
            facts: numbers and dtypes that it follows from as well.
        """
        # what is forgotten meanwhile, by another thread, is forgotten: it has a new memory then
        memory = self._memory
        if torch.is_grad_enabled():
            memory.learns = True
            return compute()
        if self.training or _is_recorded(sources[0]):
            return compute()
        marks = None if memory.learns else _marks(sources, facts)
        entry = memory.entry
        if entry is not None and entry.marks == marks and not entry.is_stale():
            return entry.value
        value = compute()
        if marks is not None and type(value) is Tensor and not any(map(_is_shared, sources)):
            storages = [StorageWeakRef(source.untyped_storage()) for source in sources]
            memory.entry = _Entry(value, marks, storages)
        return value

    @property
    def value(self) -> Tensor | None:
        """What is kept, whether or not it still holds; None: nothing."""
        entry = self._memory.entry
        return None if entry is None else entry.value

    def forget(self) -> None:
        """Keep nothing of what was computed until now."""
        self._memory = _Memory()

    def train(self, mode: bool = True) -> Self:
        """Change the mode; what was computed before it is forgotten."""
        self.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Every move and cast of the module: what was computed before it is forgotten."""
        self.forget()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        # it shares all attributes, and has weights of its own
        replica.forget()
        return replica

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have other weights and begin with nothing."""
        state = dict(super().__getstate__())  # type: ignore[no-untyped-call]
        return {**state, "_memory": _Memory()}


class _Entry(NamedTuple):
    """A value and what it came from, in one object, so that other threads see both or none.

    Attributes:
        value: what was computed.
        marks: what tells whether the sources are still the same.
        storages: of the sources, not kept alive: the addresses in the marks hold while they live.
    """

    value: Tensor
    marks: list[object]
    storages: list[StorageWeakRef]

    def is_stale(self) -> bool:
        """Return whether memory that was looked at is gone: another tensor may have its address."""
        return any(storage.expired() for storage in self.storages)


class _Memory:
    """What one period between two changes of mode has left.

    Attributes:
        entry: None while nothing is kept.
        learns: whether a graph may be waiting for its backward, and a step for its gradients.
    """

    def __init__(self) -> None:
        self.entry: _Entry | None = None
        self.learns = False


def _is_recorded(source: Tensor) -> bool:
    """Return whether the operations go into something that will run again with other weights."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or (dist.is_available() and dist.is_initialized())
        or (source.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _marks(sources: tuple[Tensor, ...], facts: object) -> list[object] | None:
    """Return how the sources look; None where a change of them could not be seen."""
    marks: list[object] = [facts]
    for source in sources:
        # a view is a new object in each call, what it looks at is not
        whole = source if source._base is None else source._base
        if type(source) not in _PLAIN or type(whole) not in _PLAIN or whole.is_inference():
            return None
        if whole.is_leaf and whole.grad is not None:
            return None
        # no reference to the tensor itself: it may be swapped with another
        marks += (id(whole), whole._version, whole.requires_grad, source.data_ptr(), source.dtype)
        marks += (source.shape, source.stride())
        if source.is_cuda:
            # what one stream computes is not there yet for another
            marks.append(torch.cuda.current_stream(source.device).cuda_stream)
    return marks


def _is_shared(source: Tensor) -> bool:
    """Return whether another process may be training the tensor: versions are not shared."""
    # of memory on a GPU torch does not know; memory that is shared later moves to another place
    whole = source if source._base is None else source._base
    return whole.requires_grad and source.is_cpu and source.untyped_storage().is_shared()
