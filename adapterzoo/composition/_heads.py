"""Heads that are active together, and the rows of the batch that each of them reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from adapterzoo.errors import CompositionError

from ._node import Node
from ._rows import RowMap
from .nodes import BatchSplit, Parallel, Stack


class ActiveHeads(NamedTuple):
    """Heads that are active together.

    Attributes:
        names: of the heads, in order; a name may come twice.
        setup: their composition; None for a name or a list of names.
    """

    names: tuple[str, ...] = ()
    setup: Node | None = None

    @property
    def given(self) -> Node | list[str] | str | None:
        """What a user writes for these heads."""
        if self.setup is not None:
            return self.setup
        if len(self.names) < 2:
            return self.names[0] if self.names else None
        return list(self.names)

    @property
    def rows(self) -> tuple[int, ...] | None:
        """The number of the head of each row; None if the composition does not divide the batch."""
        if not isinstance(self.setup, BatchSplit):
            return None
        return tuple(n for n, size in enumerate(self.setup.batch_sizes) for _ in range(size))


def parse_heads(given: object) -> ActiveHeads:
    """Return the heads that a user's argument describes; whether they exist is not checked.

    Args:
        given: a name, a list of names, a `BatchSplit`, `Parallel` or `Stack` of names, or None.

    Raises:
        CompositionError: it is another composition.
    """
    if given is None:
        return ActiveHeads()
    if isinstance(given, Node):
        names = tuple(child for child in given if isinstance(child, str))
        if not isinstance(given, (BatchSplit, Parallel, Stack)) or len(names) < len(given):
            first, second = (*given.flatten(), "a", "b")[:2]
            raise CompositionError(
                f"{given!r} is not a composition of heads: those are a BatchSplit, Parallel or "
                f"Stack of names. Write {first!r}, [{first!r}, {second!r}], or "
                f"BatchSplit({first!r}, {second!r}, batch_sizes=[…])."
            )
        # a stack of one is what `adapters` makes of a name
        return ActiveHeads(names, None if isinstance(given, Stack) and len(names) == 1 else given)
    one = isinstance(given, str) or not isinstance(given, Iterable)
    listed = cast("Iterable[str]", (given,) if one else given)
    return ActiveHeads(tuple(name for name in listed if name != ""))


def heads_of_rows(names: Sequence[str], rows: RowMap | None) -> ActiveHeads:
    """Return the heads of the parts of a batch: a `BatchSplit` where the adapters divide it so.

    Args:
        names: the head of each part, or one for all.
        rows: of the composition of adapters.
    """
    heads = ActiveHeads(tuple(names))
    if rows is None or not rows.exact or rows.repeats > 1 or rows.tasks is not None:
        return heads
    in_order = list(rows.index) == sorted(rows.index)
    if not in_order or len(names) != rows.parts or len(names) < 2:
        return heads
    sizes = [rows.index.count(part) for part in range(rows.parts)]
    return heads._replace(setup=BatchSplit(*names, batch_sizes=sizes))
