"""The base of all compositions: children, options, and legal nesting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from adapterzoo.errors import CompositionError

Child: TypeAlias = "str | Node | None"

EXAMPLES: Mapping[str, str] = {
    "Stack": "Stack('a', 'b')",
    "Fuse": "Fuse('a', Stack('b', 'c'))",
    "Split": "Split('a', Stack('b', 'c'), splits=[32, 96])",
    "BatchSplit": "BatchSplit('a', Stack('b', 'c'), batch_sizes=[2, 6])",
    "Parallel": "Parallel('a', Stack('b', 'c'))",
    "Average": "Average('a', Stack('b', 'c'), weights=[0.3, 0.7])",
    "MultiTask": "MultiTask('a', Stack('b', 'c'))",
}
"""A legal call of each, shown in errors."""

_OUTPUTS = "attends to the outputs of single adapters", "Fuse('a', Stack('b', 'c'))"
_ROWS = "assigns each row by itself", "MultiTask('a', 'b', 'c')"
REFUSED: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Fuse": dict.fromkeys(
        ("Average", "BatchSplit", "Fuse", "MultiTask", "Parallel", "Split"), _OUTPUTS
    ),
    "Parallel": {"Parallel": ("repeats the batch once for each child", "Parallel('a', 'b', 'c')")},
    "BatchSplit": {
        "MultiTask": ("divides the batch by numbers of rows, and not by tasks", _ROWS[1]),
        "Parallel": (
            "cannot repeat only a part of the batch",
            "Parallel(BatchSplit('a', 'b', batch_sizes=1), 'c')",
        ),
    },
    "MultiTask": {
        "BatchSplit": _ROWS,
        "MultiTask": _ROWS,
        "Parallel": (
            "cannot repeat only a part of the batch",
            "Parallel(MultiTask('a', 'b'), 'c')",
        ),
    },
}
"""The nodes that each cannot contain, at any depth: the reason, and what to write."""


class Names(tuple[str, ...]):
    """Names of adapters in order; it equals a set of the same names, as in `adapters`."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Return whether the names are the same."""
        if isinstance(other, (set, frozenset)):
            return set(self) == other
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        """Return whether the names differ."""
        return not self == other

    __hash__ = tuple.__hash__


@dataclass(frozen=True, init=False, repr=False)
class Node:
    """Base of all compositions.

    Attributes:
        children: names of adapters and compositions, in order.
    """

    children: tuple[Child, ...]

    takes_none: ClassVar[bool] = False

    def __init__(self, *children: Child) -> None:
        """Compose the children.

        Raises:
            CompositionError: no child, or one that is not legal here.
        """
        object.__setattr__(self, "children", children)
        self._check_children()

    def __iter__(self) -> Iterator[Child]:
        """Return the children, in order."""
        return iter(self.children)

    def __len__(self) -> int:
        """Return how many children there are."""
        return len(self.children)

    def __getitem__(self, number: int) -> Child:
        """Return a child by its number."""
        return self.children[number]

    def __repr__(self) -> str:
        """Return a constructor call."""
        options = [f"{name}={value!r}" for name, value in self.shown.items()]
        return f"{type(self).__name__}({', '.join([*map(repr, self.children), *options])})"

    @property
    def options(self) -> Mapping[str, Any]:
        """The keyword arguments that, with the children, make the same composition."""
        return {}

    @property
    def shown(self) -> Mapping[str, Any]:
        """The options to print: those that differ from the defaults."""
        return self.options

    def flatten(self) -> Names:
        """Return all the names in it, each once, in order."""
        names: dict[str, None] = {}
        for child in self.children:
            for name in child.flatten() if isinstance(child, Node) else (child,):
                if name is not None:
                    names[name] = None
        return Names(names)

    @property
    def parallel_channels(self) -> int:
        """How many copies of the batch `Parallel` makes; 1 without one."""
        own = [c.parallel_channels for c in self.children if isinstance(c, Node)]
        return max(own, default=1)

    def first(self) -> str | None:
        """Return the name that acts first."""
        child = self.children[0]
        return child.first() if isinstance(child, Node) else child

    def last(self) -> str | None:
        """Return the name that acts last, which selects the head."""
        child = self.children[-1]
        return child.last() if isinstance(child, Node) else child

    def with_children(self, children: Sequence[Child]) -> Node:
        """Return the same composition with other children, equal in number."""
        return type(self)(*children, **self.options)

    def _check_children(self) -> None:
        kind = type(self).__name__
        example = EXAMPLES[kind]
        if not self.children:
            what = "names of adapters" if kind == "Stack" else "names or compositions"
            raise CompositionError(
                f"{kind}(): a {kind} takes {what}, at least one. Write {example}."
            )
        for child in self.children:
            if child is None and self.takes_none:
                continue
            if not isinstance(child, (str, Node)):
                raise CompositionError(
                    f"{kind}({', '.join(map(repr, self.children))}): {child!r} is neither the "
                    f"name of an adapter nor a composition. Write {example}."
                )
            if isinstance(child, Node):
                self._check_nesting(child)

    def _check_nesting(self, inside: Node) -> None:
        kind, inner = type(self).__name__, type(inside).__name__
        why, write = REFUSED.get(kind, {}).get(inner, ("", ""))
        if why:
            raise CompositionError(
                f"{kind}({', '.join(map(repr, self.children))}): a {kind} cannot contain a "
                f"{inner}: it {why}. Write {write}."
            )
        for child in inside.children:
            if isinstance(child, Node):
                self._check_nesting(child)


Composition: TypeAlias = Node
