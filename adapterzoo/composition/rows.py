"""The composition of each row of a batch.

`BatchSplit`, `Parallel`, `MultiTask` and `adapter_names` all assign a composition to each row.
`rows_of` finds it wherever in the tree the batch is divided; the result no longer divides rows. The
tasks of the rows of a `MultiTask` are arguments of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor

from adapterzoo.errors import BatchError, CompositionError, StateError
from adapterzoo.kernels.grouped import Groups, RowGroups, RowIndex, on_device

from . import BatchSplit, Child, MultiTask, Node, Parallel, Stack

_NONE = torch.empty(0, 0, dtype=torch.int64)


def has_rows(node: Child) -> bool:
    """Return whether the composition divides the rows of the batch."""
    dividing = BatchSplit, MultiTask, Parallel
    return isinstance(node, Node) and any(isinstance(each, dividing) for each in node.nodes())


def rows_of(setup: Child) -> tuple[list[Child], int, bool]:
    """Return the composition of each row of a batch.

    Returns:
        One composition per row; how often the batch must be repeated first; and whether it must
        then have exactly these rows. If not, as in `Parallel`, each is an equal part of it.

    Raises:
        CompositionError: the composition divides the batch in two ways that do not match.
    """
    count, exact = _need(setup)
    repeats = setup.parallel_channels if isinstance(setup, Node) else 1
    return _divided(setup, count), repeats, exact


def _need(node: Child) -> tuple[int, bool]:
    """Return the number of rows that the composition tells apart, and whether it is the batch's."""
    if not isinstance(node, Node) or not has_rows(node):
        return 1, False
    if isinstance(node, BatchSplit):
        for child, size in zip(node.children, node.batch_sizes, strict=True):
            count, fixed = _need(child)
            if size % count or (fixed and size != count):
                raise CompositionError(
                    f"{node!r}: {child!r} gets {size} rows but divides {count}. "
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
            f"Let all of them divide the same number of rows."
        )
    fixed = any(fixed for _, fixed in found)
    return (count * len(node), fixed) if isinstance(node, Parallel) else (count, fixed)


def _divided(node: Child, count: int) -> list[Child]:
    """Return the composition of each of `count` rows."""
    if not isinstance(node, Node) or not has_rows(node):
        return [node] * count
    if isinstance(node, (BatchSplit, Parallel)):
        equal = (count // len(node),) * len(node)
        sizes = node.batch_sizes if isinstance(node, BatchSplit) else equal
        parts = map(_divided, node.children, sizes)
        return [row for part in parts for row in part]
    columns = [_divided(child, count) for child in node.children]
    return [node.with_children(children) for children in zip(*columns, strict=True)]


def _at_task(node: Child, task: int) -> Child:
    """Return the composition for a row of a task, which may divide the batch in another way."""
    if isinstance(node, MultiTask):
        return node.children[task]
    if not isinstance(node, Node):
        return node
    return node.with_children([_at_task(child, task) for child in node.children])


@dataclass(slots=True)
class RowLayout:
    """The rows of a batch, sorted by the part of the composition that they take.

    Attributes:
        segments: (part, number of rows) of each run of rows of one part, in batch order.
        runs: (part, first row, number of rows) in the sorted batch.
        size: the number of rows.
        is_sorted: whether the batch is sorted.
    """

    segments: tuple[tuple[int, int], ...]
    runs: tuple[tuple[int, int, int], ...]
    size: int
    is_sorted: bool
    _tensors: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _groups: dict[tuple[int | None, ...], Groups] = field(default_factory=dict)

    @classmethod
    def of(cls, segments: Sequence[tuple[int, int]]) -> Self:
        """Return the layout of a batch.

        Args:
            segments: the part and the length of each run of rows.
        """
        sizes: dict[int, int] = {}
        for part, size in segments:
            sizes[part] = sizes.get(part, 0) + size
        runs: list[tuple[int, int, int]] = []
        start = 0
        for part in sorted(sizes):
            runs.append((part, start, sizes[part]))
            start += sizes[part]
        parts = [part for part, _ in segments]
        return cls(tuple(segments), tuple(runs), start, parts == sorted(parts))

    @property
    def index(self) -> tuple[int, ...]:
        """The part of each row."""
        return tuple(part for part, size in self.segments for _ in range(size))

    def arranged(self, t: Tensor) -> Tensor:
        """Return a tensor `[rows, …]` with its rows sorted."""
        return t if self.is_sorted else t.index_select(0, self._orders(t.device)[0])

    def restored(self, t: Tensor) -> Tensor:
        """Return a sorted tensor `[rows, …]` in the order of the batch."""
        return t if self.is_sorted else t.index_select(0, self._orders(t.device)[1])

    def _orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the row at each position of the sorted batch, and the position of each row."""
        # cached as long as the layout, which lives for one forward
        if device not in self._tensors:
            index = self.index
            # functions for torch.compile, which cannot trace `index.__getitem__`
            there = sorted(range(self.size), key=lambda row: index[row])
            back = sorted(range(self.size), key=lambda row: there[row])
            self._tensors[device] = (
                on_device(there, torch.int64, device),
                on_device(back, torch.int64, device),
            )
        return self._tensors[device]

    def groups(self, numbers: Sequence[int | None]) -> Groups:
        """Return the row groups for a kernel.

        Args:
            numbers: the number of each part's adapter; None for the base layer.
        """
        key = tuple(numbers)
        if key not in self._groups:
            runs = [(numbers[part], size) for part, size in self.segments]
            self._groups[key] = Groups.of_runs(runs)
        return self._groups[key]


class RowTasks(NamedTuple):
    """The tasks that a batch's rows can have.

    Attributes:
        names: names of the tasks; None for the base model, and for a task whose composition has no
            name.
        parts: for each task, the part for each row of the composition.
    """

    names: tuple[tuple[str | None, ...], ...]
    parts: tuple[tuple[int, ...], ...]

    def number(self, name: object) -> int | None:
        """Return the number of a task by name; None if there is none."""
        return next((own.index(name) for own in self.names if name in own), None)


@dataclass(slots=True)
class RowMap:
    """The part of a composition for each row of a batch.

    Attributes:
        index: the part of each row.
        repeats: number of times the model must still repeat the batch; 1 once it has.
        exact: whether the batch must have exactly these rows, not a multiple of them.
        together: whether head outputs of equal shapes are joined into one for the batch.
        heads: the head of each part; empty if the active heads run on all rows, None if each runs
            on one part, provided that there are as many heads as parts.
        copies: number of times the model has repeated the batch.
        tokens: lengths of the model's input sequences, which identify layers whose input has tokens
            before rows; None: any length may be one.
        entered: whether the model has checked the batch. Only then may a layer get several
            consecutive rows per row, as with beams or with tokens flattened into rows.
        tasks: the tasks from which `enter` makes the rows; None without tasks.
        known: number of parts; a batch may lack some.
    """

    index: tuple[int, ...]
    repeats: int = 1
    exact: bool = False
    together: bool = False
    heads: tuple[str, ...] | None = None
    copies: int = 1
    tokens: frozenset[int] | None = frozenset()
    entered: bool = False
    tasks: RowTasks | None = None
    known: int = 0
    # of one call: `replace` makes new objects
    _layouts: dict[object, RowLayout] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def parts(self) -> int:
        """The number of parts."""
        return max(self.known, max(self.index, default=-1) + 1)

    def enter(
        self,
        count: int,
        together: bool,
        tokens: frozenset[int] | None = frozenset(),
        task_ids: Sequence[int] = (),
    ) -> RowMap:
        """Return the rows of one call whose batch has been checked.

        Args:
            count: number of rows of the repeated batch.
            together: see `RowMap`.
            tokens: see `RowMap`.
            task_ids: the task of each row of the batch before it is repeated, if there are tasks.
        """
        times = count // len(self.index)
        if self.tasks is None:
            index = tuple(part for part in self.index for _ in range(times))
        else:
            of, batch = self.tasks.parts, len(task_ids)
            index = tuple(of[task_ids[row % batch]][row // times] for row in range(count))
        return replace(
            self, index=index, repeats=1, together=together, copies=self.repeats, tokens=tokens,
            entered=True, tasks=None,
        )  # fmt: skip

    def renumbered(self, numbers: Sequence[int]) -> RowMap:
        """Return the same rows with another number for each part; parts may get equal numbers."""
        index = tuple(numbers[part] for part in self.index)
        return replace(self, index=index, known=0)

    def of(self, other: RowMap, part: int) -> RowMap:
        """Return how this map divides the rows of a part of another one, in the order of `take`."""
        index = tuple(own for own, p in zip(self.index, other.index, strict=True) if p == part)
        return replace(self, index=index)

    def layout(self, count: int) -> RowLayout:
        """Return the layout of a batch.

        Args:
            count: its number of rows.

        Raises:
            BatchError: the number of rows is wrong.
            StateError: the model has not repeated its input.
        """
        if (cached := self._layouts.get(count)) is not None:
            return cached
        if self.repeats > 1:
            raise StateError(
                "Parallel: only the whole model repeats the batch, and a part was called alone. "
                "Call model(…) itself, not model.base_model(…)."
            )
        if self.tasks is not None:
            raise StateError(
                "MultiTask: only the whole model knows the tasks of rows, but a part was called "
                "alone. Write model(…, task_ids=[…])."
            )
        times, rest = divmod(count, len(self.index))
        if rest or (times > 1 and not self.entered):
            raise BatchError(
                f"rows of a batch: an adapted layer got {count} rows, but the composition has "
                f"{len(self.index)}. Give the model as many, or activate one adapter for all rows."
            )
        layout = RowLayout.of([(part, times) for part in self.index])
        # other objects outlive the call and must not keep its tensors
        if self.entered:
            self._layouts[count] = layout
        return layout

    def grouped(self, count: int, numbers: tuple[int, ...]) -> RowLayout:
        """Return the layout of a batch whose parts get other numbers, which may be equal.

        Args:
            count: number of rows of the batch.
            numbers: a number for each part.
        """
        key = count, numbers
        if (cached := self._layouts.get(key)) is None:
            segments = self.layout(count).segments
            cached = RowLayout.of([(numbers[part], size) for part, size in segments])
            if self.entered:
                self._layouts[key] = cached
        return cached

    def layout_of(self, x: Tensor) -> RowLayout:
        """Return the layout of a layer's input.

        Raises:
            CompositionError: the number of rows is wrong, or the first dimension is tokens.
        """
        is_length = self.tokens is None or x.shape[0] in self.tokens
        if is_length and x.dim() > 2 and x.shape[1] == len(self.index):
            raise CompositionError(
                f"rows of a batch: an adapted layer got {list(x.shape)}, tokens before rows. "
                f"Activate one adapter for all rows, or add adapters of blocks, such as 'seq_bn'."
            )
        return self.layout(x.shape[0])

    def take(self, part: int, t: Tensor) -> Tensor:
        """Return the rows of a part from a tensor `[rows, …]`."""
        layout = self.layout(t.shape[0])
        _, start, size = next(run for run in layout.runs if run[0] == part)
        return layout.arranged(t).narrow(0, start, size)  # [size, …]

    def put(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor `[rows, …]` from the rows of each part; the inverse of `take`."""
        whole = torch.cat(list(parts))
        return self.layout(whole.shape[0]).restored(whole)  # [rows, …]


@dataclass(slots=True)
class PackedRows(RowMap):
    """The tokens of several requests in one sequence `[1, tokens, …]`; each token is a row.

    Attributes:
        segments: (part, number of tokens) of each request, in the order of the sequence.
        outputs: the part of each token whose logits are computed, if an output layer gets only
            these; None: it gets all tokens.
    """

    index: tuple[int, ...] = ()
    heads: tuple[str, ...] | None = ()
    entered: bool = True
    segments: tuple[tuple[int, int], ...] = ()
    outputs: tuple[int, ...] | None = None

    def at_outputs(self) -> PackedRows:
        """Return the rows that an output layer gets."""
        if self.outputs is None:
            return self
        return replace(self, segments=tuple((part, 1) for part in self.outputs), outputs=None)

    def layout(self, count: int) -> RowLayout:
        """Return the layout of the tokens.

        Args:
            count: number of tokens that a layer got.

        Raises:
            BatchError: the sequence has a different number of tokens.
        """
        if (cached := self._layouts.get(count)) is None:
            cached = RowLayout.of(self.segments)
            if cached.size != count:
                raise BatchError(
                    f"a sequence of packed requests has {cached.size} tokens, but an adapted layer "
                    f"got {count}. Write exclude_modules=[…] with the layer's name."
                )
            self._layouts[count] = cached
        return cached


@dataclass(slots=True)
class SlotRows(RowMap):
    """Rows, each with an adapter from the slots of shelves, or none.

    The slots are tensors, so compiled code runs for any of them.

    Attributes:
        host: int64 `[shelves, rows]` on the CPU; −1 where a row takes none of a shelf.
        slots: the same on the device of the model.
        is_packed: whether the rows are the tokens of packed requests, `[1, tokens, …]`.
        outputs: the rows whose logits are computed, if an output layer gets only these.
    """

    index: tuple[int, ...] = ()
    heads: tuple[str, ...] | None = ()
    exact: bool = True
    host: Tensor = _NONE
    slots: Tensor = _NONE
    is_packed: bool = False
    outputs: SlotRows | None = None
    _made: dict[int, RowGroups] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def placed(cls, host: Tensor, device: torch.device, is_packed: bool = False) -> Self:
        """Return the rows of a batch.

        Args:
            host: see the class.
            device: device of the model.
            is_packed: see the class.
        """
        count = host.shape[1]
        # a number for each row; their count is checked as for any batch
        return cls((0,) * count, host=host, slots=host.to(device), is_packed=is_packed)

    def groups(self, shelf: int, count: int) -> RowGroups:
        """Return the slot of a shelf for each row.

        Args:
            shelf: the shelf's number.
            count: number of rows that a layer got.

        Raises:
            BatchError: the number of rows is wrong.
        """
        own = self.host.shape[1]
        times, rest = (1, 0) if count == own else divmod(count, own)
        if rest or (times != 1 and self.is_packed):
            raise BatchError(
                f"rows of a batch: an adapted layer got {count} rows, but {own} were named. Name "
                f"an adapter, or None, for each row."
            )
        if torch.compiler.is_compiling():
            both = (t[shelf].repeat_interleave(times) for t in (self.host, self.slots))
            return RowIndex(*both)
        if (found := self._made.get(shelf)) is None or len(found.host) != count:
            found = Groups.of(self.host[shelf].repeat_interleave(times))
            self._made[shelf] = found
        return found


def numbered(parts: Sequence[Child]) -> tuple[tuple[Child, ...], tuple[int, ...]]:
    """Return the distinct compositions of the rows, and the number of each row's."""
    numbers: Mapping[Child, int] = {p: i for i, p in enumerate(dict.fromkeys(parts))}
    return tuple(numbers), tuple(numbers[p] for p in parts)


def parts_of(setup: Node) -> tuple[tuple[Child, ...], RowMap | None]:
    """Return the distinct compositions of a batch and the rows of each; None if all are the same.

    Raises:
        CompositionError: the composition divides the batch in two ways that do not match.
    """
    if not has_rows(setup):
        return (setup,), None
    names = tuple(node.tasks for node in setup.nodes() if isinstance(node, MultiTask))
    if not names:
        found, repeats, exact = rows_of(setup)
        parts, index = numbered(found)
        return parts, RowMap(index, repeats, exact=exact)
    # the same task_ids must work for all
    numbers = {name: number for own in names for number, name in enumerate(own)}
    alike = all(n is None or numbers[n] == i for own in names for i, n in enumerate(own))
    if len({len(own) for own in names}) > 1 or not alike:
        raise CompositionError(
            f"{setup!r}: one task_ids gives the task of a row for each MultiTask. "
            f"Write as many children in each, in one order."
        )
    # the row of each task; all tasks divide the batch in the same way
    each = [rows_of(_at_task(setup, task)) for task in range(len(names[0]))]
    parts, order = numbered([part for found, _, _ in each for part in found])
    (found, repeats, exact), size = each[0], len(each[0][0])
    table = tuple(order[i : i + size] for i in range(0, len(order), size))
    rows = RowMap(table[0], repeats, exact=exact, tasks=RowTasks(names, table), known=len(parts))
    return parts, rows


class ActiveHeads(NamedTuple):
    """Heads that are active together.

    Attributes:
        names: names of the heads, in order; a name may come twice.
        setup: their composition; None for a name or a list of names.
    """

    names: tuple[str, ...] = ()
    setup: Node | None = None

    @property
    def given(self) -> Node | list[str] | str | None:
        """The argument that a user writes for these heads."""
        if self.setup is not None:
            return self.setup
        if len(self.names) < 2:
            return self.names[0] if self.names else None
        return list(self.names)

    @property
    def rows(self) -> tuple[int, ...] | None:
        """The head number of each row; None if the composition does not divide the batch."""
        if not isinstance(self.setup, BatchSplit):
            return None
        return tuple(n for n, size in enumerate(self.setup.batch_sizes) for _ in range(size))


def parse_heads(given: object) -> ActiveHeads:
    """Return the heads that a user's argument describes; do not check whether they exist.

    Args:
        given: a name, a list of names, a `BatchSplit`, `Parallel` or `Stack` of names, or None.

    Raises:
        CompositionError: the argument is another composition.
    """
    if given is None:
        return ActiveHeads()
    if isinstance(given, Node):
        names = tuple(child for child in given if isinstance(child, str))
        if not isinstance(given, (BatchSplit, Parallel, Stack)) or len(names) < len(given):
            first, second = (*given.flatten(), "a", "b")[:2]
            raise CompositionError(
                f"{given!r}: heads are a BatchSplit, Parallel or Stack of names. Write {first!r}, "
                f"[{first!r}, {second!r}], or BatchSplit({first!r}, {second!r}, batch_sizes=[…])."
            )
        # `adapters` turns a name into a stack of one
        return ActiveHeads(names, None if isinstance(given, Stack) and len(names) == 1 else given)
    one = isinstance(given, str) or not isinstance(given, Iterable)
    listed = cast("Iterable[str]", (given,) if one else given)
    return ActiveHeads(tuple(name for name in listed if name != ""))


def heads_of_rows(names: Sequence[str], rows: RowMap | None) -> ActiveHeads:
    """Return the heads of the parts of a batch: a `BatchSplit` if the adapters divide it so.

    Args:
        names: the head of each part, or one for all.
        rows: rows of the composition of adapters.
    """
    heads = ActiveHeads(tuple(names))
    if rows is None or not rows.exact or rows.repeats > 1 or rows.tasks is not None:
        return heads
    in_order = list(rows.index) == sorted(rows.index)
    if not in_order or len(names) != rows.parts or len(names) < 2:
        return heads
    sizes = [rows.index.count(part) for part in range(rows.parts)]
    return heads._replace(setup=BatchSplit(*names, batch_sizes=sizes))
