"""Values computed from weights, kept on request, and the caches of a model's earlier tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

CACHES = ("cache", "past_key_values", "cache_params")
"""A model's argument for the keys, values and states of earlier tokens: one of these names."""


def cached_tokens(given: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in the cache among the arguments of a call, 0 without a cache.

    Returns:
        None if the cache is a state that does not count its tokens, as Mamba's.
    """
    cache = next((c for name in CACHES if (c := given.get(name)) is not None), None)
    if cache is None:
        return 0
    linear = getattr(cache, "is_linear", ())
    counts = hasattr(cache, "get_seq_length") and not (linear and all(linear))
    return int(cache.get_seq_length()) if counts else None


def is_empty(given: Mapping[str, Any]) -> bool:
    """Return whether a call starts without earlier tokens: it has no cache, or an empty one."""
    cache = next((c for name in CACHES if (c := given.get(name)) is not None), None)
    if cache is None:
        return True
    linear = getattr(cache, "is_linear", ())
    if any(linear) and cache.has_previous_state():
        return False
    return cached_tokens(given) == 0 or (bool(linear) and all(linear))


class _Value(NamedTuple):
    """A value with the state of its sources.

    Attributes:
        value: the computed tensor.
        marks: the state of the sources.
        storages: their memory, whose addresses are in the marks.
    """

    value: Tensor
    marks: list[object]
    storages: list[StorageWeakRef]


# a module, for as long as it lives → what it has computed; None: nothing is kept
_values: ContextVar[weakref.WeakKeyDictionary[nn.Module, _Value] | None] = ContextVar(
    "values", default=None
)


@contextmanager
def values_kept() -> Iterator[None]:
    """Keep the values of `cached` in this thread and task until the block ends.

    A block inside another shares its values.
    """
    token = None if _values.get() is not None else _values.set(weakref.WeakKeyDictionary())
    try:
        yield
    finally:
        if token is not None:
            _values.reset(token)


def cached(
    owner: nn.Module,
    compute: Callable[[], Tensor],
    sources: Callable[[], Sequence[Tensor]],
    facts: object,
) -> Tensor:
    """Return a value computed from weights; inside `values_kept`, the one computed before.

    A kept value is dropped when a source has another version, which every operation that autograd
    tracks increases (optimizers, `load_state_dict`, writes through `detach()`), or other memory,
    layout or dtype (moves, casts, assignments). Writes that autograd does not track go unnoticed:
    `p.data.mul_(2)`, NumPy, optimizers with `fused=True`.

    Nothing is kept in training, of sources that get gradients, in compiled, traced or captured
    code, or in a process group, where FSDP refills tensors without a new version.

    Args:
        owner: the object to which the value belongs.
        compute: a function that computes it from the sources and facts alone.
        sources: a function that returns the parameters and buffers.
        facts: the numbers and dtypes that it depends on.
    """
    values = None if torch.compiler.is_compiling() else _values.get()
    if values is None or owner.training or _is_recorded(tensors := sources()):
        return compute()
    marks: list[object] = [facts, torch.is_inference_mode_enabled()]
    for source in tensors:
        # a view is a new object in each call, its base is not
        whole = source if source._base is None else source._base
        marks += (id(whole), whole._version, source.data_ptr(), source.dtype)
        marks += (source.shape, source.stride())
        if source.is_cuda:
            # another stream may read the value before it is computed
            marks.append(torch.cuda.current_stream(source.device).cuda_stream)
    known = values.get(owner)
    # freed memory may come back as that of another tensor
    is_alive = known is not None and not any(storage.expired() for storage in known.storages)
    if known is not None and is_alive and known.marks == marks:
        return known.value
    value = compute()
    storages = [StorageWeakRef(source.untyped_storage()) for source in tensors]
    values[owner] = _Value(value, marks, storages)
    return value


def _is_recorded(sources: Sequence[Tensor]) -> bool:
    """Return whether operations are recorded, or sources change without a new version."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or (dist.is_available() and dist.is_initialized())
        or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        # subclasses may hide their memory, or compute differently
        or any(type(t) not in (Tensor, nn.Parameter) or t.is_inference() for t in sources)
        or (torch.is_grad_enabled() and any(t.requires_grad for t in sources))
    )
