"""Rows: which row of a batch takes which composition.

`BatchSplit`, `Parallel`, `MultiTask` and a list of names for each row all assign a composition to
each row, itself without rows. `rows_of` finds it, wherever in the tree the rows are divided. Which
task of a `MultiTask` a row has is known when the model is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from adapterzoo.errors import CompositionError, StateError
from adapterzoo.kernels.grouped import Groups

from ._node import Child, Node
from .nodes import Average, BatchSplit, Fuse, MultiTask, Parallel


def has_rows(node: Child) -> bool:
    """Return whether the composition divides the rows of the batch."""
    if not isinstance(node, Node) or isinstance(node, Fuse):
        return False
    divides = isinstance(node, (BatchSplit, MultiTask, Parallel))
    return divides or any(map(has_rows, node.children))


def has_tokens(node: Child) -> bool:
    """Return whether the composition divides the tokens of the sequence."""
    return isinstance(node, Node) and (
        type(node).__name__ == "Split" or any(map(has_tokens, node.children))
    )


def rows_of(setup: Child) -> tuple[list[Child], int, bool]:
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
    return _seen(node, lambda child: _at_row(child, row, count))


def _at_task(node: Child, task: int) -> Child:
    """Return the composition that a row of a task sees, which may divide the batch otherwise."""
    if isinstance(node, MultiTask):
        return node.children[task]
    return _seen(node, lambda child: _at_task(child, task)) if isinstance(node, Node) else node


def _multi_tasks(node: Child) -> Iterator[MultiTask]:
    """Yield the compositions inside that divide the batch by tasks."""
    if isinstance(node, MultiTask):
        yield node
    elif isinstance(node, Node):
        for child in node.children:
            yield from _multi_tasks(child)


def _seen(node: Node, see: Callable[[Child], Child]) -> Child:
    """Return a composition as a row sees it, from what the row sees of each child."""
    children: list[Child] = []
    options = dict(node.options)
    kept = []
    for number, child in enumerate(node.children):
        seen = see(child)
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


class Tasks(NamedTuple):
    """The tasks that rows of a batch can have.

    Attributes:
        names: what the tasks are called; None for the base model, and a task whose composition
            has no name.
        parts: for each task, the part of each row of the composition.
    """

    names: tuple[tuple[str | None, ...], ...]
    parts: tuple[tuple[int, ...], ...]

    def number(self, name: object) -> int | None:
        """Return the number of the task of a name; None: there is none."""
        return next((own.index(name) for own in self.names if name in own), None)


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
        tasks: those of which the call says which each row has; None: the rows have their parts.
        known: number of parts, where a batch may lack some.
    """

    index: tuple[int, ...]
    repeats: int = 1
    exact: bool = False
    together: bool = False
    heads: tuple[str, ...] | None = None
    copies: int = 1
    tokens: frozenset[int] | None = frozenset()
    entered: bool = False
    tasks: Tasks | None = None
    known: int = 0
    _layouts: dict[int, Layout] = field(default_factory=dict, compare=False, repr=False)

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return max(self.known, max(self.index, default=-1) + 1)

    def enter(
        self,
        count: int,
        together: bool,
        tokens: frozenset[int] | None = frozenset(),
        task_ids: Sequence[int] = (),
    ) -> RowMap:
        """Return the rows of one call, whose input has been checked and is repeated.

        Args:
            count: rows of the batch when it is repeated.
            together: whether heads that answer alike give one answer for the whole batch.
            tokens: lengths of sequences that no layer can have as its number of rows; None: any.
            task_ids: the task of each row of the batch before it is repeated, where there are
                tasks.
        """
        times = count // len(self.index)
        if self.tasks is None:
            index = tuple(part for part in self.index for _ in range(times))
        else:
            of, batch = self.tasks.parts, len(task_ids)
            index = tuple(of[task_ids[row % batch]][row // times] for row in range(count))
        return replace(
            self, index=index, repeats=1, together=together, copies=self.repeats, tokens=tokens,
            entered=True, tasks=None, _layouts={},
        )  # fmt: skip

    def renumbered(self, numbers: Sequence[int]) -> RowMap:
        """Return the same rows where parts have other numbers, several the same perhaps."""
        index = tuple(numbers[part] for part in self.index)
        return replace(self, index=index, known=0, _layouts={})

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
        if self.tasks is not None:
            raise StateError(
                "MultiTask: a part of the model was called alone, and the tasks of rows are known "
                "to the whole model only. Write model(…, task_ids=[…])."
            )
        times, rest = divmod(count, len(self.index))
        if rest or (times > 1 and not self.entered):
            raise CompositionError(
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
    names = tuple(node.tasks for node in _multi_tasks(setup))
    if not names:
        found, repeats, exact = rows_of(setup)
        parts, index = numbered(found)
        return parts, RowMap(index, repeats, exact=exact)
    _check_tasks(setup, names)
    # the row of each task; all tasks divide the batch alike
    each = [rows_of(_at_task(setup, task)) for task in range(len(names[0]))]
    parts, numbers = numbered([part for found, _, _ in each for part in found])
    (found, repeats, exact), size = each[0], len(each[0][0])
    table = tuple(numbers[i : i + size] for i in range(0, len(numbers), size))
    rows = RowMap(table[0], repeats, exact=exact, tasks=Tasks(names, table), known=len(parts))
    return parts, rows


def _check_tasks(setup: Node, names: Sequence[tuple[str | None, ...]]) -> None:
    """Check that one task_ids can serve several divisions of a batch by tasks.

    Raises:
        CompositionError: they have other numbers of tasks, or a name has two numbers.
    """
    numbers = {name: number for own in names for number, name in enumerate(own)}
    clash = [n for own in names for i, n in enumerate(own) if n is not None and numbers[n] != i]
    if len({len(own) for own in names}) > 1 or clash:
        what = f"{clash[0]!r} has two numbers in them" if clash else "they have other numbers of"
        raise CompositionError(
            f"{setup!r}: one task_ids says the task of a row for each MultiTask, and "
            f"{what}{'' if clash else ' tasks'}. Write as many children in each, in one order."
        )
