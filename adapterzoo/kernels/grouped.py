"""The low-rank update of a mixed batch: y + s · (x Aᵀ) Bᵀ for each row, with its own adapter.

Papers: Chen et al. 2023 (Punica), arXiv:2310.18547, §4; Sheng et al. 2023 (S-LoRA),
arXiv:2311.03285, §5.3; the update is that of Hu et al. 2021, arXiv:2106.09685, eq. 3.

As in `low_rank` there are two operators: `grouped_shrink` computes t = x Aᵀ for each row, and
`grouped_expand` y + s · t Bᵀ; methods that rescale or rotate rows call them separately. `Groups`
says which row takes which adapter; factors of different ranks are stacked, padded with zeros. Saves
x, t, the stacks and, with dropout, one bit for each feature for the backward.

Rows are sorted by adapter once for a batch, and all layers of a forward share the plan. An operator
takes the groups as the adapter of each row, int64 on the host; Triton gets a plan on the device.
"""

from __future__ import annotations

import functools
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as plain_dropout
from torch.nn.functional import pad

from adapterzoo.errors import KernelError

from . import ops
from .low_rank import dropout_bits, dropout_mask, dropout_scale, dropout_seed
from .ops import product

# value in the index for no adapter
BASE = -1
# numbers per chunk in the plan: its adapter, first row, and one past its last row
CHUNK = 3
# maximum number of tensors that one batch's groups keep on a device before they start anew
_MOST_TENSORS = 64
_HOST = torch.device("cpu")


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return n tensors as `[n, …]`, with zeros beyond the end of smaller ones."""
    sizes = [max(own) for own in zip(*(t.shape for t in tensors), strict=True)]
    if all([*t.shape] == sizes for t in tensors):
        return torch.stack([*tensors])
    missing = [[size - own for size, own in zip(sizes, t.shape, strict=True)] for t in tensors]
    # `pad` takes the last dimension first
    before = [[n for end in reversed(own) for n in (0, end)] for own in missing]
    return torch.stack([pad(t, own) for t, own in zip(tensors, before, strict=True)])


def grouped_low_rank(
    y: Tensor,
    x: Tensor,
    a: Tensor | Sequence[Tensor],
    b: Tensor | Sequence[Tensor],
    scaling: Sequence[float] | Tensor,
    groups: RowGroups,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """Return `low_rank_reference` of each row with its adapter, with dropout, in few calls.

    Args:
        y: `[batch, *tokens, d_out]`, the output that gets the update.
        x: `[batch, *tokens, d_in]`, in any floating dtype.
        a: n factors `[rank_i, d_in]`, or their stack.
        b: n factors `[d_out, rank_i]`, or their stack.
        scaling: n factors s, or a tensor `[n]` of them on the CPU.
        groups: the adapter of each row of the batch.
        dropout: probability, 0 to below 1, of dropping a feature of x on the way to A.
        training: whether to drop features.

    Returns:
        Shape and dtype of `y`. A row without an adapter has the bits of `y`; an adapter without
        rows gets a gradient of zeros.

    Raises:
        KernelError: the groups belong to another batch or name an unknown adapter;
            or the mode is `"triton"`, and Triton cannot take the operands.
    """
    a, b = (each if isinstance(each, Tensor) else stacked(each) for each in (a, b))
    t = grouped_shrink(x, a, groups, dropout, training)
    return grouped_expand(y, t, b, scaling, groups)


def grouped_shrink(
    x: Tensor, a: Tensor, groups: RowGroups, dropout: float = 0.0, training: bool = False
) -> Tensor:
    """Project down: t = dropout(x) Aᵀ with each row's A, accumulated in float32 or float64.

    Args:
        x: `[batch, *tokens, d_in]`, in any floating dtype.
        a: `[n, rank, d_in]`, from `stacked`.
        groups: the adapter of each row of the batch.
        dropout: probability, 0 to below 1, of dropping a feature of x.
        training: whether to drop features.

    Returns:
        `[batch, *tokens, rank]`, in the dtype of `a`; under autocast in its dtype. Zero beyond an
        adapter's own rank, and for a row without an adapter.

    Raises:
        KernelError: see `grouped_low_rank`.
    """
    if ops.is_reference():
        fixed = _of_host(groups.host)
        fixed.check(x, len(a))
        return grouped_shrink_torch(plain_dropout(x, dropout, training), a, 0.0, None, fixed)
    noise = None
    if training and dropout:
        in_triton = ops.takes_triton("grouped_shrink", x, a)
        noise = dropout_seed(x) if in_triton else dropout_bits(x, dropout)
    return _shrink(x, a, dropout, noise, groups.host)


def grouped_expand(
    y: Tensor, t: Tensor, b: Tensor, scaling: Sequence[float] | Tensor, groups: RowGroups
) -> Tensor:
    """Add the update: y + s · t Bᵀ with each row's B and s, in one pass over y.

    Args:
        y: `[batch, *tokens, d_out]`, the output that gets the update.
        t: `[batch, *tokens, rank]`, from `grouped_shrink`.
        b: `[n, d_out, rank]`, from `stacked`.
        scaling: n factors s, or a tensor `[n]` of them on the CPU.
        groups: the adapter of each row of the batch.

    Returns:
        Shape and dtype of `y`; a row without an adapter has its bits.

    Raises:
        KernelError: see `grouped_low_rank`.
    """
    if ops.is_reference():
        fixed = _of_host(groups.host)
        fixed.check(y, len(b))
        return grouped_expand_torch(y, t, b, scaling, fixed)
    return _expand(y, t, b, groups.scales(scaling), groups.host)


class RowGroups(ABC):
    """The adapter, of n, of each row of a batch.

    Attributes:
        host: the adapter of each row as a tensor on the CPU, int64 `[batch]`; −1 for none.
    """

    host: Tensor

    @abstractmethod
    def scales(self, scaling: Sequence[float] | Tensor) -> Tensor:
        """Return the scaling of each adapter as a tensor on the CPU, `[n]`."""

    @abstractmethod
    def acting(self, t: Tensor) -> Tensor:
        """Return the rows that adapters act on, `[rows, …]`, of `[batch, …]`."""

    @abstractmethod
    def taken(self, stack: Tensor) -> Tensor:
        """Return the values for each row of `acting`, `[rows, …]`, of `[n, …]`."""

    @abstractmethod
    def placed(self, own: Tensor, plain: Tensor) -> Tensor:
        """Return the batch `[batch, …]` from the rows of `acting`, and others from `plain`."""

    @abstractmethod
    def features(self, stack: Tensor, dim: int) -> Tensor:
        """Return the vector of each row's adapter, `[batch, 1, …, width]`, of `[n, width]`.

        They are zeros for rows without an adapter, which may hold inf or NaN, and send no gradient.

        Args:
            stack: a vector for each adapter.
            dim: number of dimensions of the result.
        """

    @abstractmethod
    def restored(self, out: Tensor, plain: Tensor) -> Tensor:
        """Return `out` with the rows of `plain` where no adapter acts; both `[batch, …]`."""


class RowIndex(RowGroups):
    """Groups that are known only when they are used, so compiled code runs for any of them.

    All rows are computed, rows without an adapter with the first adapter.
    """

    def __init__(self, host: Tensor, index: Tensor) -> None:
        """Take the adapter of each row.

        Args:
            host: on the CPU, int64 `[batch]`; −1 for none.
            index: the same where the features are.
        """
        self.host, self.index = host, index

    def scales(self, scaling: Sequence[float] | Tensor) -> Tensor:
        """Return the scaling of each adapter as a tensor on the CPU, `[n]`."""
        if isinstance(scaling, Tensor):
            return scaling
        return torch.tensor([*scaling], dtype=torch.float64, device="cpu")

    def acting(self, t: Tensor) -> Tensor:
        """Return all rows."""
        return t

    def taken(self, stack: Tensor) -> Tensor:
        """Return the values for each row, `[batch, …]`, of `[n, …]`."""
        return stack.index_select(0, self.index.clamp(min=0))

    def placed(self, own: Tensor, plain: Tensor) -> Tensor:
        """Return the same as `restored`."""
        return self.restored(own, plain)

    def features(self, stack: Tensor, dim: int) -> Tensor:
        """Return the vector of each row's adapter, `[batch, 1, …, width]`, of `[n, width]`."""
        rows = torch.where(self._acts(2), self.taken(stack), 0.0)
        return rows.view(len(rows), *(1 for _ in range(dim - 2)), rows.shape[1])

    def restored(self, out: Tensor, plain: Tensor) -> Tensor:
        """Return `out` with the rows of `plain` where no adapter acts; both `[batch, …]`."""
        return torch.where(self._acts(out.dim()), out, plain.to(out.dtype))

    def _acts(self, dim: int) -> Tensor:
        """Return whether an adapter acts on each row, `[batch, 1, …]`."""
        return (self.index >= 0).view(-1, *(1 for _ in range(dim - 1)))


class Groups(RowGroups):
    """The rows of one batch by adapter; created once, immutable, and shared by all layers.

    It does not depend on a layer. Its tensors are created on first use, once per device, so layers
    neither read values from a device nor copy values to one. A batch with the same rows gets the
    same object again, as in each step of decoding: then nothing is copied, and a forward that has
    run once can be captured in a CUDA graph.

    Attributes:
        runs: (adapter, rows) of each run of rows with one adapter, -1 for none; neighbors differ.
        size: the number of rows.
        adapters: those that at least one row takes, ascending.
        lengths: the number of rows of each of `adapters`.
        base: the rows without an adapter.
        order: the rows with an adapter, sorted by adapter.
        host: the adapter of each row as a tensor on the CPU, int64 `[batch]`.
    """

    def __init__(self, runs: tuple[tuple[int, int], ...], host: Tensor) -> None:
        """See `Groups.of_runs`."""
        self.runs, self.host = runs, host
        found: dict[int, list[int]] = {}
        self.size = 0
        for adapter, count in self.runs:
            found.setdefault(adapter, []).extend(range(self.size, self.size + count))
            self.size += count
        self.base = tuple(found.pop(BASE, ()))
        self.adapters = tuple(sorted(found))
        self.lengths = tuple(len(found[adapter]) for adapter in self.adapters)
        self.order = tuple(chain.from_iterable(found[adapter] for adapter in self.adapters))
        self._made: dict[tuple[object, ...], Tensor] = {}

    @property
    def index(self) -> tuple[int, ...]:
        """The adapter of each row, −1 for none."""
        return tuple(chain.from_iterable(repeat(i, count) for i, count in self.runs))

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows with an adapter, ascending."""
        return tuple(sorted(self.order))

    @property
    def of_rows(self) -> tuple[int, ...]:
        """The adapter of each of `rows`."""
        own = ((i, count) for i, count in self.runs if i != BASE)
        return tuple(chain.from_iterable(repeat(i, count) for i, count in own))

    @property
    def of_all(self) -> tuple[int, ...]:
        """The adapter of each row; the first of `adapters` for rows without one."""
        spare = self.adapters[0] if self.adapters else 0
        own = ((spare if i == BASE else i, count) for i, count in self.runs)
        return tuple(chain.from_iterable(repeat(i, count) for i, count in own))

    @classmethod
    def of(cls, index: Sequence[int | None] | Tensor) -> Groups:
        """Return the plan of a batch.

        Args:
            index: the number of each row's adapter, from 0; None or -1 for none. The host reads a
                tensor `[batch]` of integers once.

        Raises:
            KernelError: an entry is not such a number.
        """
        given = index.tolist() if isinstance(index, Tensor) else index
        values = [BASE if i is None else i for i in given]
        for row, value in enumerate(values):
            if type(value) is not int or value < BASE:
                raise KernelError(
                    f"Groups.of(index): index[{row}]={value!r} is not the number of an adapter, or "
                    f"None or -1 for none. Write Groups.of([0, 1, None])."
                )
        return cls.of_runs([(value, 1) for value in values])

    @classmethod
    def of_runs(cls, runs: Sequence[tuple[int | None, int]]) -> Groups:
        """Return the plan of a batch.

        Args:
            runs: the number of an adapter, None or -1 for none, and its number of consecutive rows.
        """
        joined: list[tuple[int, int]] = []
        for adapter, count in runs:
            own = BASE if adapter is None else adapter
            if count and joined and joined[-1][0] == own:
                joined[-1] = own, joined[-1][1] + count
            elif count:
                joined.append((own, count))
        return (_made if torch.compiler.is_compiling() else _remembered)(tuple(joined))

    def check(self, x: Tensor, n: int) -> None:
        """Check that the groups fit the operands.

        Args:
            x: `[batch, *tokens, width]`.
            n: number of adapters.

        Raises:
            KernelError: the groups belong to another batch, or name an adapter beyond `n`.
        """
        batch, most = self.size, max(self.adapters, default=BASE)
        if x.dim() < 2 or x.shape[0] != batch or most >= n:
            raise KernelError(
                f"grouped_low_rank: the groups are of {batch} rows and adapters up to {most}, x is "
                f"{list(x.shape)}, and there are {n} adapters. Write Groups.of(index) for these."
            )

    def numbers(self, name: str, device: torch.device) -> Tensor:
        """Return an attribute as a tensor of int64.

        Args:
            name: name of the attribute.
            device: device of the tensor.
        """
        return self.kept((name, device), device, torch.int64, lambda: getattr(self, name))

    def scales(
        self,
        scaling: Sequence[float] | Tensor,
        device: torch.device = _HOST,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Return the scaling of each adapter, `[n]`; layers with equal scalings share it.

        Args:
            scaling: n numbers, or a tensor of them on the CPU.
            device: device of the result.
            dtype: dtype of the result.
        """
        if isinstance(scaling, Tensor) and device == _HOST:
            return scaling.to(dtype)
        each = tuple(scaling.tolist() if isinstance(scaling, Tensor) else scaling)
        if torch.compiler.is_compiling():
            return torch.tensor(each, dtype=dtype, device=device)
        return self.kept((each, device, dtype), device, dtype, lambda: each)

    def acting(self, t: Tensor) -> Tensor:
        """Return the rows that adapters act on, `[rows, …]`, of `[batch, …]`."""
        return t.index_select(0, self.numbers("rows", t.device)) if self.base else t

    def taken(self, stack: Tensor) -> Tensor:
        """Return the values for each row of `acting`, `[rows, …]`, of `[n, …]`."""
        return stack.index_select(0, self.numbers("of_rows", stack.device))

    def placed(self, own: Tensor, plain: Tensor) -> Tensor:
        """Return the batch `[batch, …]` from the rows of `acting`, and others from `plain`."""
        if not self.base:
            return own
        return plain.index_copy(0, self.numbers("rows", plain.device), own.to(plain.dtype))

    def features(self, stack: Tensor, dim: int) -> Tensor:
        """Return the vector of each row's adapter, `[batch, 1, …, width]`, of `[n, width]`."""
        rows = stack.index_select(0, self.numbers("of_all", stack.device))  # [batch, width]
        if self.base:
            rows = rows.index_fill_(0, self.numbers("base", rows.device), 0.0)
        return rows.view(len(rows), *(1 for _ in range(dim - 2)), rows.shape[1])

    def restored(self, out: Tensor, plain: Tensor) -> Tensor:
        """Return `out` with the rows of `plain` where no adapter acts; both `[batch, …]`."""
        if not self.base:
            return out
        places = self.numbers("base", out.device)
        return out.index_copy(0, places, plain.index_select(0, places).to(out.dtype))

    def plan(self, tokens: int, n: int, device: torch.device) -> Tensor:
        """Return the plan for the Triton kernels, int32; see `plan_of`.

        Args:
            tokens: number of tokens of each row.
            n: number of adapters.
            device: device of the plan.
        """
        key = (tokens, n, device)
        return self.kept(key, device, torch.int32, lambda: plan_of(self, tokens, n))

    def kept(
        self,
        key: tuple[object, ...],
        device: torch.device,
        dtype: torch.dtype,
        values: Callable[[], Sequence[float]],
    ) -> Tensor:
        """Return a tensor of the batch, created once (or twice, by two threads)."""
        if _is_gpu(device):
            # another stream could read it too early
            key = *key, torch.cuda.current_stream(device).cuda_stream
            if ops.is_captured():
                # a captured graph reads its tensors whenever it runs
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
    # fake tensors may be on a device that does not exist
    return device.type == "cuda" and torch.cuda.is_initialized()


def _made(runs: tuple[tuple[int, int], ...]) -> Groups:
    index = [i for i, count in runs for _ in range(count)]
    with torch.inference_mode(False):
        return Groups(runs, torch.tensor(index, dtype=torch.int64))


# address of `host` → its groups, while they exist
_by_host: weakref.WeakValueDictionary[int, Groups] = weakref.WeakValueDictionary()


# groups of the latest batches; a service that repeats its batches copies nothing
@functools.lru_cache(maxsize=64)
def _remembered(runs: tuple[tuple[int, int], ...]) -> Groups:
    groups = _made(runs)
    _by_host[groups.host.data_ptr()] = groups
    return groups


def _of_host(host: Tensor) -> Groups:
    """Return the groups that an operator gets; their own tensor is not read again."""
    groups = _by_host.get(host.data_ptr())
    if groups is not None and groups.host.shape == host.shape and host.numel():
        return groups
    return Groups.of_runs([(adapter, 1) for adapter in host.tolist()])


# groups whose tensors a CUDA graph reads: they must never be freed
_CAPTURED: set[Groups] = set()


def chunk_rows(tokens: int) -> int:
    """Return the number of rows of an adapter per program; a decoding step has few rows."""
    return 64 if tokens >= 64 else 16


def plan_of(groups: Groups, tokens: int, n: int) -> list[int]:
    """Return the rows sorted by adapter, and their chunks: `[batch + n + 1 + CHUNK · chunks]`.

    First the rows of the batch: those without an adapter, then the others, sorted by adapter; then
    the place at which each adapter's rows begin, and the end; then the chunks, whose rows are
    those of x flattened in that order.

    Args:
        groups: the batch's groups.
        tokens: number of tokens of each row of the batch.
        n: number of adapters.
    """
    lengths = dict(zip(groups.adapters, groups.lengths, strict=True))
    starts = list(accumulate((lengths.get(i, 0) for i in range(n)), initial=len(groups.base)))
    step, chunks = chunk_rows(tokens), list[int]()
    for adapter, first, last in zip(range(BASE, n), [0, *starts], starts, strict=False):
        for start in range(first * tokens, last * tokens, step):
            chunks += [adapter, start, min(start + step, last * tokens)]
    return [*groups.base, *groups.order, *starts, *chunks]


def grouped_shrink_torch(
    x: Tensor, a: Tensor, p: float, noise: Tensor | None, groups: Groups
) -> Tensor:
    """Project down: t = dropout(x) aᵀ; `noise` from `dropout_bits`.

    `x` `[batch, *tokens, d_in]`, `a` `[n, rank, d_in]` → `[batch, *tokens, rank]` in the dtype
    of `a`; zero for a row without an adapter.
    """
    if noise is not None:
        x = dropout_mask(noise, x.shape, p).to(a.dtype).mul_(x)  # [batch, *tokens, d_in]
        x = x.mul_(dropout_scale(p))
    own = _own(x.to(a.dtype), groups) @ _factors(a, groups).mT  # [rows, tokens, rank]
    return _placed(own, x.shape, groups)


def grouped_shrink_torch_backward(
    dt: Tensor, x: Tensor, a: Tensor, p: float, noise: Tensor | None, groups: Groups, *needs: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in its dtype, and of a; empty if not needed.

    Differentiable again. Without `needs_a`, `x` may be empty: only its dtype is read.
    """
    needs_x, needs_a = needs or (True,) * 2
    dx, da, kept = x.new_empty(0), a.new_empty(0), None
    if noise is not None:
        dt = dt * dropout_scale(p)  # [batch, *tokens, rank]
        kept = dropout_mask(noise, (*dt.shape[:-1], a.shape[-1]), p).to(a.dtype)
    own = _own(dt, groups)  # [rows, tokens, rank]
    if needs_x:
        dx = _placed(own @ _factors(a, groups), dt.shape, groups)  # [batch, *tokens, d_in]
        dx = (dx if kept is None else dx * kept).to(x.dtype)
    if needs_a:
        x = x.to(a.dtype) if kept is None else kept * x
        da = _summed(own.mT @ _own(x, groups), a, groups)  # [n, rank, d_in]
    return dx, da


def grouped_expand_torch(
    y: Tensor, t: Tensor, b: Tensor, scaling: Sequence[float] | Tensor, groups: Groups
) -> Tensor:
    """Add the update: y + scaling · t bᵀ.

    `y` `[batch, *tokens, d_out]`, `t` `[batch, *tokens, rank]`, `b` `[n, d_out, rank]` → shape and
    dtype of `y`; a row without an adapter keeps its bits.
    """
    update = _scaled(t, scaling, groups) @ _factors(b, groups).to(t.dtype).mT
    # rounded once, to the dtype of y
    rows = (_own(y, groups) + update).to(y.dtype)  # [rows, tokens, d_out]
    if not groups.base:
        return rows.view(y.shape)
    places = groups.numbers("rows", y.device)
    return y.index_copy(0, places, rows.view(len(rows), *y.shape[1:]))


def grouped_expand_torch_backward(
    dy: Tensor,
    t: Tensor,
    b: Tensor,
    scaling: Sequence[float] | Tensor,
    groups: Groups,
    *needs: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of t and b; empty if not needed.

    Differentiable again. Without `needs_b`, `t` may be empty: only its dtype is read.
    """
    needs_t, needs_b = needs or (True,) * 2
    dt, db = t.new_empty(0), b.new_empty(0)
    own = _own(dy.to(t.dtype), groups)  # [rows, tokens, d_out]
    if needs_t:
        made = own @ _factors(b, groups).to(t.dtype)  # [rows, tokens, rank]
        dt = _placed(made * _scales(scaling, made, groups), dy.shape, groups)
    if needs_b:
        db = _summed(own.mT @ _scaled(t, scaling, groups), b, groups)  # [n, d_out, rank]
    return dt, db


def _own(t: Tensor, groups: Groups) -> Tensor:
    """Return the rows with an adapter, `[rows, tokens, width]`, of `[batch, *tokens, width]`."""
    return groups.acting(t.reshape(groups.size, math.prod(t.shape[1:-1]), t.shape[-1]))


def _placed(own: Tensor, shape: tuple[int, ...], groups: Groups) -> Tensor:
    """Return the inverse of `_own`, `[batch, *tokens, width]`: zeros in rows without an adapter."""
    shape = *shape[:-1], own.shape[-1]
    if not groups.base:
        return own.view(shape)
    whole = own.new_zeros(shape[0], *own.shape[1:])
    return whole.index_copy(0, groups.numbers("rows", own.device), own).view(shape)


def _factors(factors: Tensor, groups: Groups) -> Tensor:
    """Return the factor of each row with an adapter, `[rows, …]`, of `[n, …]`."""
    return groups.taken(factors)


def _summed(own: Tensor, like: Tensor, groups: Groups) -> Tensor:
    """Return the sum over each adapter's rows `[n, …]`, of `[rows, …]`; zero without rows."""
    numbers = groups.numbers("of_rows", own.device)
    return own.new_zeros(like.shape).index_add(0, numbers, own).to(like.dtype)


def _scales(scaling: Sequence[float] | Tensor, like: Tensor, groups: Groups) -> Tensor:
    """Return the factor s of each row with an adapter, `[rows, 1, 1]`."""
    each = tuple(scaling.tolist() if isinstance(scaling, Tensor) else scaling)
    key = ("rows", each, like.device, like.dtype)
    scales = groups.kept(
        key, like.device, like.dtype, lambda: [1.0 if i == BASE else each[i] for i in groups.index]
    )  # [batch]
    return _own(scales.view(-1, 1, 1), groups)


def _scaled(t: Tensor, scaling: Sequence[float] | Tensor, groups: Groups) -> Tensor:
    """Return s · t of each row with an adapter, `[rows, tokens, rank]`."""
    own = _own(t, groups)
    return own * _scales(scaling, own, groups)


def _prepared(in_triton: bool, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with `Groups` for torch, or with the plan on the device for Triton."""
    # a backward has two flags at the end
    at = len(args) - (1 if isinstance(args[-1], Tensor) else 3)
    x, factor = args[0], args[2] if isinstance(args[2], Tensor) else args[1]
    groups = _of_host(args[at])
    groups.check(x, len(factor))
    before, after = args[:at], args[at + 1 :]
    if not in_triton:
        return *before, groups, *after
    scaling = args[at - 1]
    if isinstance(scaling, Tensor) and scaling.is_floating_point():
        scales = groups.scales(scaling, x.device, torch.float32)
        before = *args[: at - 1], scales
    return *before, groups.plan(math.prod(x.shape[1:-1]), len(factor), x.device), *after


_shrink, _shrink_backward = product(
    "grouped_shrink(Tensor x, Tensor a, float p, Tensor? noise, Tensor index) -> Tensor",
    "grouped_triton.shrink",
    (grouped_shrink_torch, grouped_shrink_torch_backward),
    lambda x, a, p, noise, index: x.new_empty((*x.shape[:-1], a.shape[1]), dtype=a.dtype),
    noise=3,
    prepare=_prepared,
    narrows=(1,),
)


_expand, _expand_backward = product(
    "grouped_expand(Tensor y, Tensor t, Tensor b, Tensor scaling, Tensor index) -> Tensor",
    "grouped_triton.expand",
    (grouped_expand_torch, grouped_expand_torch_backward),
    lambda y, t, b, scaling, index: y.new_empty(y.shape),
    added=True,
    prepare=_prepared,
    narrows=(1, 2),
)
