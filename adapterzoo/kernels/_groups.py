"""Which adapter each row of a batch takes, as Python numbers and as tensors on a device.

Papers: Chen et al. 2023 (Punica), arXiv:2310.18547; Sheng et al. 2023 (S-LoRA), arXiv:2311.03285:
rows are sorted by adapter once for a batch, and all layers of a forward share the plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from adapterzoo.errors import KernelError

from . import _launch
from ._ops import register

# in the index: no adapter
BASE = -1
# numbers per chunk in the plan: its adapter, its first row, and one past its last row
CHUNK = 3
# tensors that the groups of one batch keep on a device before they start anew
_MOST_TENSORS = 64


class Groups:
    """The rows of one batch by adapter; made once, immutable, and shared by all layers.

    It does not depend on a layer. Its tensors are made on first use, once for each device, so that
    layers neither read values from a device nor copy values to one. A batch of the same rows gets
    the same object again, as each step of decoding does: then nothing is copied, and a forward that
    has run once can be captured in a CUDA graph.

    Attributes:
        index: the adapter of each row; -1: none.
        adapters: those that at least one row takes, ascending.
        lengths: the number of rows of each of `adapters`.
        rows: the rows with an adapter, ascending.
        order: the same rows, sorted by adapter.
        of_rows: the adapter of each of `rows`.
        of_all: the adapter of each row of the batch; the first of `adapters` for rows without one.
        base: the rows without an adapter.
        host: `index` as a tensor on the CPU, int64 `[batch]`.
    """

    def __init__(self, index: tuple[int, ...], host: Tensor) -> None:
        """See `Groups.of`."""
        found: dict[int, list[int]] = {}
        for row, adapter in enumerate(index):
            found.setdefault(adapter, []).append(row)
        self.index, self.host = index, host
        self.base = tuple(found.pop(BASE, ()))
        self.adapters = tuple(sorted(found))
        self.lengths = tuple(len(found[adapter]) for adapter in self.adapters)
        self.order = tuple(chain.from_iterable(found[adapter] for adapter in self.adapters))
        self.rows = tuple(sorted(self.order))
        self.of_rows = tuple(index[row] for row in self.rows)
        spare = self.adapters[0] if self.adapters else 0
        self.of_all = tuple(spare if i == BASE else i for i in index)
        self._made: dict[tuple[object, ...], Tensor] = {}

    @classmethod
    def of(cls, index: Sequence[int | None] | Tensor) -> Groups:
        """Return the plan of a batch.

        Args:
            index: the number of each row's adapter, from 0; None or -1 for none. The host reads a
                tensor `[batch]` of integers once.

        Raises:
            KernelError: an entry is not such a number.
        """
        if isinstance(index, Tensor):
            if index.dim() != 1 or index.is_floating_point() or index.dtype is torch.bool:
                raise KernelError(
                    f"Groups.of(index): index is {index.dtype} {list(index.shape)}. Legal is a "
                    f"tensor of integers [batch], -1 for rows without an adapter. Write "
                    f"Groups.of([0, 1, None])."
                )
            given: Sequence[int | None] = index.tolist()
        else:
            given = index
        values = tuple(BASE if i is None else i for i in given)
        for row, value in enumerate(values):
            if type(value) is not int or value < BASE:
                raise KernelError(
                    f"Groups.of(index): index[{row}]={value!r} is not the number of an adapter. "
                    f"Legal are 0, 1, … and None or -1 for rows without an adapter. Write "
                    f"Groups.of([0, 1, None])."
                )
        return (_made if torch.compiler.is_compiling() else _remembered)(values)

    def check(self, kernel: str, x: Tensor, n: int) -> None:
        """Check that the plan fits the operands.

        Args:
            kernel: its name, for the message.
            x: `[batch, *tokens, width]`.
            n: number of adapters.

        Raises:
            KernelError: it is the plan of another batch, or names an adapter beyond `n`.
        """
        batch = self.host.shape[0]
        if x.dim() < 2 or x.shape[0] != batch:
            raise KernelError(
                f"{kernel}: the groups are of {batch} rows, x is {list(x.shape)}. Legal is "
                f"x [{batch}, *tokens, width]. Write Groups.of(index) with an entry for each row."
            )
        # compiled code would be specialized to the numbers; it checks them when it runs
        if not torch.compiler.is_compiling():
            self.check_adapters(kernel, n)

    def check_adapters(self, kernel: str, n: int) -> None:
        """Check that all adapters of the plan exist; see `check`."""
        if self.adapters and self.adapters[-1] >= n:
            raise KernelError(
                f"{kernel}: the groups name adapter {self.adapters[-1]}, and there are {n} "
                f"adapters. Legal are 0 to {n - 1}. Write Groups.of(index) with these, or None."
            )

    def numbers(self, name: str, device: torch.device) -> Tensor:
        """Return an attribute as a tensor of int64.

        Args:
            name: of the attribute.
            device: of the tensor.
        """
        return self._kept((name, device), device, torch.int64, lambda: getattr(self, name))

    def row_scales(
        self, scaling: tuple[float, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Return the scaling of each row, `[batch]`; 1 for rows without an adapter."""
        key = ("rows", scaling, device, dtype)
        return self._kept(
            key, device, dtype, lambda: [1.0 if i == BASE else scaling[i] for i in self.index]
        )

    def scales(
        self, scaling: tuple[float, ...], device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """Return the scaling of each adapter, `[n]`; layers with equal scalings share it."""
        if torch.compiler.is_compiling():
            return torch.tensor(scaling, dtype=dtype, device=device)
        return self._kept((scaling, device, dtype), device, dtype, lambda: scaling)

    def plan(self, tokens: int, n: int, device: torch.device) -> Tensor:
        """Return the plan for the Triton kernels, int32; see `plan_of`.

        Args:
            tokens: of each row.
            n: number of adapters.
            device: of the plan.
        """
        if torch.compiler.is_compiling():
            made: Tensor = _plan(self.host, tokens, n, device)
            return made
        key = (tokens, n, device)
        return self._kept(key, device, torch.int32, lambda: plan_of(self, tokens, n))

    def _kept(
        self,
        key: tuple[object, ...],
        device: torch.device,
        dtype: torch.dtype,
        values: Callable[[], Sequence[float]],
    ) -> Tensor:
        """Return a tensor of the batch, made once (or twice, by two threads)."""
        if _is_gpu(device):
            # another stream could read it before it is there
            key = *key, torch.cuda.current_stream(device).cuda_stream
            if _launch.is_captured():
                # the graph reads its tensors whenever it runs
                _CAPTURED.add(self)
        found = self._made.get(key)
        if found is None:
            # each length of a prompt has a plan
            if len(self._made) >= _MOST_TENSORS and self not in _CAPTURED:
                self._made = {}
            # an inference tensor could not be saved for a backward
            with torch.inference_mode(False):
                found = self._made[key] = on_device(values(), dtype, device)
        return found


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor; the host does not wait for a GPU to copy them."""
    if not _is_gpu(device):
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _is_gpu(device: torch.device) -> bool:
    # fake tensors may be of one that is not there
    return device.type == "cuda" and torch.cuda.is_initialized()


def _made(index: tuple[int, ...]) -> Groups:
    with torch.inference_mode(False):
        return Groups(index, torch.tensor(index, dtype=torch.int64))


# for the latest batches; a service that repeats its batches copies nothing
_remembered = functools.lru_cache(maxsize=64)(_made)
# groups whose tensors a CUDA graph reads: they must never be freed
_CAPTURED: set[Groups] = set()


def chunk_rows(tokens: int) -> int:
    """Return how many rows of an adapter a program takes; a decoding step has few rows."""
    return 64 if tokens >= 64 else 16


def plan_of(groups: Groups, tokens: int, n: int) -> list[int]:
    """Return the rows sorted by adapter, and their chunks: `[batch + n + 1 + CHUNK · chunks]`.

    First the rows of the batch, those without an adapter before the others, which are sorted by
    adapter; then the place at which each adapter's rows begin, and the end; then the chunks, whose
    rows are those of x flattened in that order.

    Args:
        groups: of the batch.
        tokens: of each row of the batch.
        n: number of adapters.
    """
    lengths = dict(zip(groups.adapters, groups.lengths, strict=True))
    starts = list(accumulate((lengths.get(i, 0) for i in range(n)), initial=len(groups.base)))
    step, chunks = chunk_rows(tokens), list[int]()
    for adapter, first, last in zip(range(BASE, n), [0, *starts], starts, strict=False):
        for start in range(first * tokens, last * tokens, step):
            chunks += [adapter, start, min(start + step, last * tokens)]
    return [*groups.base, *groups.order, *starts, *chunks]


def groups_of(plan: Tensor, n: int, batch: int) -> Groups:
    """Return the groups of a plan; the host waits for a plan on a device.

    Args:
        plan: from `Groups.plan`, or `Groups.host`.
        n: number of adapters.
        batch: number of rows.
    """
    values = plan.tolist()
    if plan.dtype is torch.int64:
        groups = _remembered(tuple(values))
        groups.check_adapters("grouped_low_rank", n)
        return groups
    index = [BASE] * batch
    starts = values[batch : batch + n + 1]
    for adapter in range(n):
        for row in values[starts[adapter] : starts[adapter + 1]]:
            index[row] = adapter
    return Groups(tuple(index), torch.tensor(index, dtype=torch.int64))


def _run_plan(index: Tensor, tokens: int, n: int, device: torch.device) -> Tensor:
    """Return the plan, padded with empty chunks to a length that is known in advance."""
    values = plan_of(groups_of(index, n, index.shape[0]), tokens, n)
    values += [BASE, 0, 0] * ((_plan_size(index, tokens, n) - len(values)) // CHUNK)
    return torch.tensor(values, dtype=torch.int32, device=device)


def _fake_plan(index: Tensor, tokens: int, n: int, device: torch.device) -> Tensor:
    return index.new_empty(_plan_size(index, tokens, n), dtype=torch.int32, device=device)


def _plan_size(index: Tensor, tokens: int, n: int) -> int:
    batch = index.shape[0]
    # whole chunks, and one partial chunk for each adapter and for the base
    chunks = batch * tokens // chunk_rows(tokens) + n + 1
    return batch + n + 1 + CHUNK * chunks


# only for compiled code, which would otherwise be specialized to the groups of one batch
_plan = register(
    "grouped_plan(Tensor index, SymInt tokens, SymInt n, Device device) -> Tensor",
    _run_plan,
    _fake_plan,
)
