"""Rows: which row of a batch takes which composition.

`BatchSplit`, `Parallel` and a list of names for each row all assign a composition to each row,
itself without rows. `rows_of` finds it, wherever in the tree the rows are divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from adapterzoo.errors import BatchError, CompositionError, StateError
from adapterzoo.kernels.grouped import Groups

from ._node import Child, Node
from .nodes import Average, BatchSplit, Fuse, Parallel


def has_rows(node: Child) -> bool:
    """Return whether the composition divides the rows of the batch."""
    if not isinstance(node, Node) or isinstance(node, Fuse):
        return False
    return isinstance(node, (BatchSplit, Parallel)) or any(map(has_rows, node.children))


def has_tokens(node: Child) -> bool:
    """Return whether the composition divides the tokens of the sequence."""
    return isinstance(node, Node) and (
        type(node).__name__ == "Split" or any(map(has_tokens, node.children))
    )


def rows_of(setup: Node) -> tuple[list[Child], int, bool]:
    """Return the composition of each row of a batch.

    Returns:
        The compositions; how often the batch is to be repeated before that; whether it must have
        just these rows then. As for `Parallel`, they may stand for that many equal parts of it.

    Raises:
        CompositionError: two divisions of the batch in it do not fit each other.
    """
    count, exact = _need(setup)
    return [_at_row(setup, row, count) for row in range(count)], _repeats(setup), exact


def _repeats(node: Child) -> int:
    if not isinstance(node, Node):
        return 1
    inner = max(map(_repeats, node.children))
    return max(inner, len(node)) if isinstance(node, Parallel) else inner


def _need(node: Child) -> tuple[int, bool]:
    """Return how many rows the composition distinguishes, and whether the batch must have them."""
    if not isinstance(node, Node) or not has_rows(node):
        return 1, False
    if isinstance(node, BatchSplit):
        for child, size in zip(node.children, node.batch_sizes, strict=True):
            count, fixed = _need(child)
            if size % count or (fixed and size != count):
                raise CompositionError(
                    f"{node!r}: {child!r} gets {size} rows and divides {count}. "
                    f"Write batch_sizes with {count} for it."
                )
        return sum(node.batch_sizes), True
    found = [_need(child) for child in node.children if has_rows(child)]
    if isinstance(node, Parallel) and not found:
        return len(node), False
    counts = {count for count, fixed in found if fixed} or {count for count, _ in found}
    count = max(counts)
    if len(counts) > 1 or any(count % other for other, _ in found):
        raise CompositionError(
            f"{node!r}: its parts divide the batch into {sorted({c for c, _ in found})} rows. "
            f"Let all of them divide as many rows."
        )
    fixed = any(fixed for _, fixed in found)
    return (count * len(node), fixed) if isinstance(node, Parallel) else (count, fixed)


def _at_row(node: Child, row: int, count: int) -> Child:
    """Return the composition that one row of `count` rows sees."""
    if not isinstance(node, Node) or not has_rows(node):
        return node
    if isinstance(node, Parallel):
        share = count // len(node)
        return _at_row(node.children[row // share], row % share, share)
    if isinstance(node, BatchSplit):
        for child, size in zip(node.children, node.batch_sizes, strict=True):
            if row < size:
                return _at_row(child, row, size)
            row -= size
    children: list[Child] = []
    options = dict(node.options)
    kept = []
    for number, child in enumerate(node.children):
        seen = _at_row(child, row, count)
        # the plain layer: nothing acts in a stack, and an average has nothing to add
        if seen is None and not node.takes_none:
            continue
        kept.append(number)
        # a stack in a stack is one stack
        inner = isinstance(seen, Node) and type(seen) is type(node) and not options
        children += seen.children if inner and isinstance(seen, Node) else [seen]
    if not children:
        return None
    if isinstance(node, Average):
        options["weights"] = [node.weights[number] for number in kept]
    return type(node)(*children, **options)


@dataclass(slots=True)
class Layout:
    """A batch, by the part of the composition that each row takes.

    Attributes:
        index: the part of each row.
        runs: (part, first row, number of rows) of the batch in which equal parts stand together.
        order: rows in that order; None where they stand together already.
    """

    index: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    order: tuple[int, ...] | None
    _tensors: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _groups: dict[tuple[int | None, ...], Groups] = field(default_factory=dict)

    @classmethod
    def of(cls, index: tuple[int, ...]) -> Self:
        """Return the layout of a batch in which each row takes the part of this number."""
        order = tuple(sorted(range(len(index)), key=index.__getitem__))
        runs: list[tuple[int, int, int]] = []
        start = 0
        for part in sorted(set(index)):
            size = index.count(part)
            runs.append((part, start, size))
            start += size
        return cls(index, tuple(runs), None if order == tuple(range(len(index))) else order)

    def arranged(self, t: Tensor) -> Tensor:
        """Return the rows of a tensor `[rows, …]` in the order of the runs."""
        return t if self.order is None else t.index_select(0, self._orders(t.device)[0])

    def restored(self, t: Tensor) -> Tensor:
        """Return the rows of a tensor `[rows, …]` in the order of the batch again."""
        return t if self.order is None else t.index_select(0, self._orders(t.device)[1])

    def _orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # they live as long as the forward does, like what they order
        if device not in self._tensors:
            there = list(self.order or ())
            back = sorted(range(len(there)), key=there.__getitem__)
            self._tensors[device] = (
                torch.tensor(there, device=device),
                torch.tensor(back, device=device),
            )
        return self._tensors[device]

    def groups(self, numbers: tuple[int | None, ...]) -> Groups:
        """Return the rows for a kernel.

        Args:
            numbers: of the adapter that each part has, None for the base layer.
        """
        if numbers not in self._groups:
            self._groups[numbers] = Groups.of([numbers[part] for part in self.index])
        return self._groups[numbers]


@dataclass(slots=True)
class RowMap:
    """Which rows of a batch take which part of a composition.

    Attributes:
        index: the part of each row.
        repeats: how often the batch is to be repeated at the model's input; 1 once it is.
        exact: whether the batch must have just these rows, not several of each.
        together: whether heads that answer alike give one answer for the whole batch.
        heads: the head of each part; empty where the active heads answer all rows, None where
            they answer a part each if they are as many.
        copies: how often the batch was repeated.
        tokens: lengths of the model's input sequences, by which a layer is found that gets tokens
            before rows; None: any length tells.
        entered: whether the model has seen that the batch has these rows. Beams and tokens that
            come as rows make several consecutive rows of one, which could not be known before.
    """

    index: tuple[int, ...]
    repeats: int = 1
    exact: bool = False
    together: bool = False
    heads: tuple[str, ...] | None = None
    copies: int = 1
    tokens: frozenset[int] | None = frozenset()
    entered: bool = False
    _layouts: dict[int, Layout] = field(default_factory=dict, compare=False, repr=False)

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return max(self.index, default=-1) + 1

    def enter(
        self, count: int, together: bool, tokens: frozenset[int] | None = frozenset()
    ) -> RowMap:
        """Return the rows of one call, whose input has been checked and is repeated.

        Args:
            count: rows of the batch when it is repeated.
            together: whether heads that answer alike give one answer for the whole batch.
            tokens: lengths of sequences that no layer can have as its number of rows; None: any.
        """
        times = count // len(self.index)
        index = tuple(part for part in self.index for _ in range(times))
        return replace(
            self, index=index, repeats=1, together=together, copies=self.repeats, tokens=tokens,
            entered=True, _layouts={},
        )  # fmt: skip

    def renumbered(self, numbers: Sequence[int]) -> RowMap:
        """Return the same rows where parts have other numbers, several the same perhaps."""
        return replace(self, index=tuple(numbers[part] for part in self.index), _layouts={})

    def of(self, other: RowMap, part: int) -> RowMap:
        """Return the rows of a part of another division of the batch, in the order of `take`."""
        index = tuple(own for own, p in zip(self.index, other.index, strict=True) if p == part)
        return replace(self, index=index, _layouts={})

    def layout(self, count: int) -> Layout:
        """Return the layout of a batch of so many rows.

        Raises:
            CompositionError: they are not these rows, or several of each.
            StateError: the model did not repeat its input.
        """
        layout = self._layouts.get(count)
        if layout is None:
            layout = Layout.of(self._index(count))
            # what lives longer than a call shall hold no tensors
            if self.entered:
                self._layouts[count] = layout
        return layout

    def layout_of(self, x: Tensor) -> Layout:
        """Return the layout of a layer's input.

        Raises:
            CompositionError: its rows are not these, or its first dimension is tokens.
        """
        is_length = self.tokens is None or x.shape[0] in self.tokens
        if is_length and x.dim() > 2 and x.shape[1] == len(self.index):
            raise CompositionError(
                f"rows of a batch: an adapted layer got {list(x.shape)}, tokens before rows. "
                f"Activate one adapter for all rows, or add adapters that do not sit at such "
                f"layers: 'seq_bn'."
            )
        return self.layout(x.shape[0])

    def _index(self, count: int) -> tuple[int, ...]:
        if self.repeats > 1:
            raise StateError(
                "Parallel: the batch is repeated where the model is called, and a part of it was "
                "called alone. Call model(…) itself, not model.base_model(…)."
            )
        times, rest = divmod(count, len(self.index))
        if rest or (times > 1 and not self.entered):
            raise BatchError(
                f"rows of a batch: an adapted layer got {count} rows, and the composition has "
                f"{len(self.index)}. Give the model a batch of {len(self.index)} rows; where the "
                f"layer's input is not a batch, activate one adapter for all rows."
            )
        return tuple(part for part in self.index for _ in range(times))

    def take(self, part: int, t: Tensor) -> Tensor:
        """Return the rows of a tensor `[rows, …]` that take the part."""
        layout = self.layout(t.shape[0])
        _, start, size = next(run for run in layout.runs if run[0] == part)
        return layout.arranged(t).narrow(0, start, size)

    def put(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor of which `take` gives these, one for each part."""
        whole = torch.cat(list(parts))
        return self.layout(whole.shape[0]).restored(whole)


def numbered(parts: Sequence[Child]) -> tuple[tuple[Child, ...], tuple[int, ...]]:
    """Return the different ones among the rows' compositions, and the number of each row's."""
    numbers: Mapping[Child, int] = {p: i for i, p in enumerate(dict.fromkeys(parts))}
    return tuple(numbers), tuple(numbers[p] for p in parts)


def parts_of(setup: Node) -> tuple[tuple[Child, ...], RowMap | None]:
    """Return the distinct compositions of a batch and each row's; None: all rows have one.

    Raises:
        CompositionError: two divisions of the batch in it do not fit each other.
    """
    if not has_rows(setup):
        return (setup,), None
    found, repeats, exact = rows_of(setup)
    parts, index = numbered(found)
    return parts, RowMap(index, repeats, exact=exact)
