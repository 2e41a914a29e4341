"""The shared trunk: blocks before the first adapter compute equal rows of a batch only once.

Like multi-task inference in AdapterDrop: Rücklé et al. 2021, arXiv:2010.11918, §3.1.2.

`Parallel` repeats the batch at the start of the model, and a mixed batch may contain a prompt
several times. Equal rows stay equal up to the first adapter. A block f treats rows separately, so
with the distinct rows u of a batch x = u[index],

    f(x) = f(u)[index].

Only the blocks see fewer rows. Everything between them sees the whole batch: embeddings, masks,
positions, returned hidden states. A block writes the keys and values of all rows to a cache, which
is then the same as without the trunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.utils import output_capturing

from .errors import AdapterZooError, StateError
from .kernels.grouped import on_device

_CACHES = Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin
# types of argument values that have no rows
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, nn.Module)
# largest relative difference between equal rows that were computed at different places of a batch
_ROUNDING = 1e-2
_ADVICE = "Write model.share_trunk(False)"


@dataclass(frozen=True, slots=True)
class Distinct:
    """The distinct rows of a batch.

    Attributes:
        first: for each distinct row, the first row equal to it.
        index: for each row, the number of its distinct row.
    """

    first: tuple[int, ...]
    index: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Distinct:
        """Return the distinct rows of a batch.

        Args:
            numbers: a number for each row; equal for equal rows.
        """
        places = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
        index = tuple(places[number] for number in numbers)
        return cls(tuple(index.index(place) for place in range(len(places))), index)

    def taken(self, t: Tensor) -> Tensor:
        """Return the distinct rows of a tensor `[rows, …]`."""
        count = len(self.first)
        if self.first == tuple(range(count)):
            return t.narrow(0, 0, count)  # [distinct, …]
        return t.index_select(0, on_device(self.first, torch.int64, t.device))  # [distinct, …]

    def spread(self, t: Tensor) -> Tensor:
        """Return all rows of a tensor `[distinct, …]`; the inverse of `taken`."""
        times, rest = divmod(len(self.index), t.shape[0])
        # the backward of this one sums in a fixed order
        if not rest and self.index == tuple(range(t.shape[0])) * times:
            return t.repeat(times, *(1 for _ in t.shape[1:]))  # [rows, …]
        return t.index_select(0, on_device(self.index, torch.int64, t.device))  # [rows, …]

    def hold(self, t: Tensor, drops: bool = False) -> bool:
        """Return whether the equal rows of a tensor `[rows, …]` are still equal, up to rounding.

        Args:
            t: the tensor.
            drops: whether dropout may have set some numbers to 0.
        """
        t = t.detach()
        again = self.spread(self.taken(t))
        if not t.is_floating_point():
            return torch.equal(t, again)
        # the difference of two infinities, as in masks, is nan
        differs = (t - again).nan_to_num(0.0).abs()
        if drops:
            differs = differs.where((t != 0) & (again != 0), 0.0)
        largest = t.nan_to_num(0.0, 0.0, 0.0).abs()
        return not t.numel() or bool(differs.amax() <= _ROUNDING * largest.amax())


@dataclass(slots=True, eq=False)
class Trunk:
    """The blocks that run once for equal rows in a call.

    Attributes:
        index: a number for the input of each row; equal for equal inputs.
        adapted: paths of the modules that are, or contain, sites of the call's adapters.
        blocks: paths of the blocks that have run once for equal rows.
        is_running: whether rows with equal inputs are still equal.
        is_started: whether a forward pass has set `is_running`.
        has_ended: whether an adapter has acted.
        running: path of the running block; empty outside of one.
        checked: paths of the stacks whose first block has run.
    """

    index: tuple[int, ...]
    adapted: frozenset[str]
    blocks: dict[str, None] = field(default_factory=dict)
    is_running: bool = True
    is_started: bool = False
    has_ended: bool = False
    running: str = ""
    checked: set[str] = field(default_factory=set)

    def started(self, is_running: bool) -> Trunk:
        """Return the trunk for one forward pass of a call, which may have several.

        Args:
            is_running: whether the pass computes the inputs of the call.
        """
        return replace(self, is_running=is_running, is_started=True, checked=set())

    def end(self) -> None:
        """Note that an adapter acts.

        Raises:
            StateError: it acts inside a block of the trunk.
        """
        if self.running:
            raise StateError(
                f"share_trunk: the block {self.running!r} calls a layer of another block, and an "
                f"adapter changes that layer. {_ADVICE}."
            )
        self.has_ended = True

    def takes(self, path: str) -> bool:
        """Return whether a block of the model belongs to the trunk.

        Args:
            path: the block's path.
        """
        if path in self.adapted:
            self.has_ended = True
        return self.is_running and not self.has_ended and not self.running

    def run(
        self,
        path: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a block on the distinct rows.

        Args:
            path: the block's path.
            forward: the block's forward.
            args: its positional inputs for all rows.
            kwargs: its named inputs for all rows.

        Returns:
            Its outputs for all rows.

        Raises:
            StateError: the rows of an input are unknown.
            Exception: of the block, with a note.
        """
        call = _BlockCall.of(path, self.index, args[0] if args else next(iter(kwargs.values())))
        stack = path.rpartition(".")[0]
        if stack not in self.checked:
            call.check()
            self.checked.add(stack)
        inputs = [call.taken(value, f"input {number}") for number, value in enumerate(args)]
        named = {name: call.taken(value, name) for name, value in kwargs.items()}
        collected = _collected()
        counts = {name: len(values) for name, values in collected.items()}
        self.running = path
        try:
            out = forward(*inputs, **named)
        except Exception as error:
            # an input may have rows that are not its first dimension
            if not isinstance(error, AdapterZooError):
                few, every = len(call.rows.first), len(call.rows.index)
                error.add_note(
                    f"share_trunk: the block {path!r} got {few} of {every} rows, those that "
                    f"differ. {_ADVICE} if it needs all of them."
                )
            raise
        finally:
            self.running = ""
        self.blocks[path] = None
        for name, count in counts.items():
            values = collected[name]
            values[count:] = [call.spread(value) for value in values[count:]]
        return call.output(out)


@contextmanager
def resumed(trunk: Trunk | None, has_ended: bool) -> Iterator[None]:
    """Make a block run as it did first when gradient checkpointing runs it again.

    Args:
        trunk: the call's trunk; None without one.
        has_ended: whether an adapter had acted before the first run of the block.
    """
    if trunk is None:
        yield
        return
    before, trunk.has_ended = trunk.has_ended, has_ended
    try:
        yield
    finally:
        trunk.has_ended |= before


class _BlockCall(NamedTuple):
    """One call of a block of the trunk.

    Attributes:
        path: the block's path.
        rows: the call's rows.
        x: the hidden states, `[rows, tokens, d]`, or with several token dimensions.
    """

    path: str
    rows: Distinct
    x: Tensor

    @classmethod
    def of(cls, path: str, index: tuple[int, ...], x: Any) -> _BlockCall:
        """Return the call of a block.

        Args:
            path: the block's path.
            index: see `Trunk`.
            x: its first input.

        Raises:
            StateError: the input does not have the rows of the batch.
        """
        shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        times = x.shape[0] // len(index) if isinstance(x, Tensor) and x.dim() > 1 else 0
        if not times or x.shape[0] % len(index):
            _refuse(path, f"got {shape}, not {len(index)} rows")
        # each row may have beams, or frames of a video
        numbers = [number * times + copy for number in index for copy in range(times)]
        return cls(path, Distinct.of(numbers), x)

    def check(self) -> None:
        """Check that equal rows are still equal before the first block.

        Raises:
            StateError: their states differ at random, or the rows are in another dimension.
        """
        if not torch.compiler.is_compiling() and not self.rows.hold(self.x, drops=True):
            _refuse(
                self.path,
                f"got {list(self.x.shape)}, whose first dimension is not the rows, or "
                "whose equal rows differ at random",
            )

    def taken(self, value: Any, name: str) -> Any:
        """Return an input for the distinct rows.

        Args:
            value: the input for all rows.
            name: its name.
        """
        if isinstance(value, Tensor):
            return self._taken(value, name)
        if isinstance(value, _CACHES):
            return _CacheOfRows(value, self)
        if isinstance(value, MutableMapping):
            return _Written(self, value, name)
        if isinstance(value, (tuple, list)):
            parts = [self.taken(each, f"{name}[{n}]") for n, each in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if not isinstance(value, _PLAIN) and not callable(value):
            _refuse(self.path, f"got {name}, a {type(value).__name__}, whose rows are unknown")
        return value

    def _taken(self, t: Tensor, name: str) -> Tensor:
        count = len(self.rows.index)
        if t is self.x:
            return self.rows.taken(t)
        if not t.dim() or not t.shape[0] or t.shape[0] % count:
            return t
        if t.shape[0] > count:
            # each row may have heads or tokens
            split = t.view(count, -1, *t.shape[1:])
            return self.rows.taken(split).flatten(0, 1) if self._holds(split, name) else t
        tokens = self.x.shape[1]
        like_states = t.dim() == self.x.dim() and t.shape[-1] == self.x.shape[-1]
        has_tokens = t.dim() > 1 and t.shape[1] == tokens and count != tokens
        # other tensors of this length may be tables without rows
        certain = t.dim() > 3 or like_states or has_tokens
        return self.rows.taken(t) if certain or self._holds(t, name) else t

    def _holds(self, t: Tensor, name: str) -> bool:
        if torch.compiler.is_compiling():
            _refuse(self.path, f"got {name} {list(t.shape)}, whose rows compiled code cannot find")
        return self.rows.hold(t)

    def spread(self, value: Any) -> Any:
        """Return an output for all rows.

        Args:
            value: the output for the distinct rows.
        """
        if isinstance(value, Tensor):
            few, tokens = len(self.rows.first), self.x.shape[1]
            if value.dim() and value.shape[0] == few:
                return self.rows.spread(value)
            if value.dim() == 2 and value.shape[0] == few * tokens:
                # one value per token and row, such as the logits of a router
                split = value.view(few, tokens, -1)
                return self.rows.spread(split).flatten(0, 1)  # [rows · tokens, …]
            return value
        if type(value) in (_CacheOfRows, _Written):
            return value._whole
        if isinstance(value, Mapping):
            made = {key: self.spread(each) for key, each in value.items()}
            return made if type(value) is dict else type(value)(**made)
        if isinstance(value, (tuple, list)):
            parts = [self.spread(each) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    def output(self, out: Any) -> Any:
        """Return the block's output for all rows.

        Args:
            out: the output for the distinct rows.
        """
        y = next(iter(tree_leaves(out)), None)
        few = len(self.rows.first)
        if not isinstance(y, Tensor) or not y.dim() or y.shape[0] != few:
            shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            _refuse(self.path, f"returned {shape} for {few} rows")
        return self.spread(out)


class _Written(dict[Any, Any]):
    """A dict for the distinct rows; a block's writes to it also go to the dict for all rows."""

    def __init__(self, call: _BlockCall, whole: MutableMapping[Any, Any], name: str) -> None:
        super().__init__({key: call.taken(v, f"{name}[{key!r}]") for key, v in whole.items()})
        self._call = call
        self._whole = whole

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._whole[key] = self._call.spread(value)


class _CacheOfRows:
    """The view that a block for the distinct rows has of a cache of all rows, or of its layers.

    Its methods take and return tensors of the distinct rows. Tensors with more than one dimension
    have rows: keys and values, and the states of a linear attention.
    """

    __slots__ = ("_call", "_whole")

    def __init__(self, whole: Any, call: _BlockCall) -> None:
        object.__setattr__(self, "_whole", whole)
        object.__setattr__(self, "_call", call)

    @property  # type: ignore[misc]  # a read-only one
    def __class__(self) -> Any:
        # blocks check for the caches of encoder–decoders
        return type(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._whole, name)
        if not inspect.ismethod(value):
            return self._taken(value)

        def method(*args: Any, **kwargs: Any) -> Any:
            named = {key: self._spread(each) for key, each in kwargs.items()}
            return self._taken(value(*map(self._spread, args), **named))

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._whole, name, self._spread(value))

    def _taken(self, value: Any) -> Any:
        if isinstance(value, _CACHES):
            return _CacheOfRows(value, self._call)
        if type(value) in (tuple, list):
            return type(value)(map(self._taken, value))
        rows = self._call.rows
        return rows.taken(value) if self._has_rows(value, len(rows.index)) else value

    def _spread(self, value: Any) -> Any:
        rows = self._call.rows
        return rows.spread(value) if self._has_rows(value, len(rows.first)) else value

    def _has_rows(self, value: Any, count: int) -> bool:
        """Return whether a value is a tensor with rows, and check their number.

        Raises:
            StateError: it does not have this number of rows.
        """
        if not isinstance(value, Tensor) or value.dim() < 2:
            return False
        if value.shape[0] != count:
            what = f"{list(value.shape)} for {count} rows"
            _refuse(self._call.path, f"has a {type(self._whole).__name__} with {what}")
        return True


def _collected() -> Mapping[str, list[Any]]:
    """Return the inner outputs that transformers is collecting, such as attentions."""
    collector = output_capturing._active_collector
    # compiled code cannot read a context variable; transformers then uses another collector
    if torch.compiler.is_compiling() and not collector.compiling:
        return {}
    return {name: own for name, own in (collector.get() or {}).items() if isinstance(own, list)}


def _refuse(path: str, why: str) -> Never:
    raise StateError(f"share_trunk: the block {path!r} {why}. {_ADVICE}.")
