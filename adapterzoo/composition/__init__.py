"""Composition: how several adapters act together.

Semantics: https://docs.adapterhub.ml/adapter_composition.html.

A composition names adapters. It is data: immutable, compared by value, checked when created. A
child is the name of an adapter or another composition; where the batch or the sequence is divided,
it may also be None, the base model. Any composition can contain any other, except those that it
names in `refused`.

An adapter is a function around its layer, so `Stack(a, b)` is function composition at a site: the
deltas of weight adapters add, bottlenecks chain. `BatchSplit`, `Parallel`, `MultiTask` with
`task_ids` and the argument `adapter_names` all give rows of a batch to different adapters: `rows`
assigns a composition to each row. `compile` prunes compositions to the adapters that are present at
a site; the result, a `Step`, is what the site evaluates in each forward.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, ClassVar, TypeAlias

from adapterzoo.errors import CompositionError, SetupError, StateError, listing
from adapterzoo.names import FUSION

__all__ = [
    "AdapterCompositionBlock", "Average", "BatchSplit", "Composition", "Fuse", "MultiTask",
    "Parallel", "Split", "Stack", "parse", "parse_composition", "validate_composition",
]  # fmt: skip

Child: TypeAlias = "str | Node | None"
Setup: TypeAlias = "Child | Sequence[Child]"
"""What users write for a composition: also a name, a list, or None for the base model."""


class Names(tuple[str, ...]):
    """Names of adapters in order; equal to a set of the same names, as in `adapters`."""

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
        takes_none: whether a child may be None, the base model.
        refused: kinds of nodes that it cannot contain, at any depth.
        reason: why it cannot.
        example: arguments of a valid call, shown in errors.
    """

    children: tuple[Child, ...]

    takes_none: ClassVar[bool] = False
    refused: ClassVar[tuple[str, ...]] = ()
    reason: ClassVar[str] = ""
    example: ClassVar[str] = "'a', Stack('b', 'c')"

    def __init__(self, *children: Child) -> None:
        """Compose the children.

        Raises:
            CompositionError: no child, or one that is not allowed here.
        """
        object.__setattr__(self, "children", children)
        self._check_children()

    def __iter__(self) -> Iterator[Child]:
        """Return the children, in order."""
        return iter(self.children)

    def __len__(self) -> int:
        """Return the number of children."""
        return len(self.children)

    def __getitem__(self, number: int) -> Child:
        """Return a child by its number."""
        return self.children[number]

    def __repr__(self) -> str:
        """Return a constructor call."""
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{type(self).__name__}({', '.join([*map(repr, self.children), *options])})"

    @property
    def options(self) -> Mapping[str, Any]:
        """The keyword arguments that create the same composition, together with the children."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "children"}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    def nodes(self) -> Iterator[Node]:
        """Yield the composition itself and all compositions inside it, outermost first."""
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.nodes()

    def flatten(self) -> Names:
        """Return all names in the composition, each once, in order."""
        names: dict[str, None] = {}
        for child in self.children:
            for name in child.flatten() if isinstance(child, Node) else (child,):
                if name is not None:
                    names[name] = None
        return Names(names)

    @property
    def parallel_channels(self) -> int:
        """The number of copies of the batch that `Parallel` makes; 1 without it."""
        return max(len(node) if isinstance(node, Parallel) else 1 for node in self.nodes())

    def first(self) -> str | None:
        """Return the name that acts first."""
        child = self.children[0]
        return child.first() if isinstance(child, Node) else child

    def last(self) -> str | None:
        """Return the name that acts last, which selects the head."""
        child = self.children[-1]
        return child.last() if isinstance(child, Node) else child

    def with_children(self, children: Sequence[Child]) -> Node | None:
        """Return the same composition with other children, equal in number; None if all are None.

        None, the base model, is allowed only where the batch or the sequence is divided.
        """
        options = dict(self.options)
        kept = [number for number, child in enumerate(children) if child is not None]
        if not self.takes_none:
            children = [children[number] for number in kept]
            if "weights" in options:
                options["weights"] = [options["weights"][number] for number in kept]
        return type(self)(*children, **options) if kept else None

    def _check_children(self) -> None:
        kind = type(self).__name__
        given = f"{kind}({', '.join(map(repr, self.children))})"
        legal = (str, Node, type(None)) if self.takes_none else (str, Node)
        inside = [child for child in self.children if isinstance(child, Node)]
        names = [type(node).__name__ for child in inside for node in child.nodes()]
        if not self.children or any(not isinstance(child, legal) for child in self.children):
            why = "children are names of adapters and compositions, at least one"
        elif wrong := [name for name in names if name in self.refused]:
            article = "an" if wrong[0][0] in "AEIOU" else "a"
            why = f"a {kind} cannot contain {article} {wrong[0]}: it {self.reason}"
        else:
            return
        raise CompositionError(f"{given}: {why}. Write {kind}({self.example}).")


Composition: TypeAlias = Node


class Stack(Node):
    """Adapters that act one after another: `Stack("language", "task")`; the first acts first."""

    example = "'a', 'b'"

    def __init__(self, *children: Child) -> None:
        """Stack the adapters.

        Args:
            children: names of adapters, each once, and compositions; a nested stack becomes part of
                this one.

        Raises:
            CompositionError: no child, a name twice, or a child that is neither of these.
        """
        inside = [c.children if isinstance(c, Stack) else (c,) for c in children]
        children = tuple(child for part in inside for child in part)
        super().__init__(*children)
        names = [c for c in children if isinstance(c, str)]
        if len(set(names)) != len(names):
            once = ", ".join(map(repr, dict.fromkeys(children)))
            raise CompositionError(f"{self!r}: an adapter acts once in it. Write Stack({once}).")


@dataclass(frozen=True, init=False, repr=False)
class Fuse(Node):
    """AdapterFusion: attention over the outputs of the adapters, `Fuse("a", "b")`.

    Pfeiffer et al. 2020, arXiv:2005.00247.

    Attributes:
        fusion: the name of the fusion layers; None if they are the children's names.
    """

    fusion: str | None

    refused = "Average", "BatchSplit", "Fuse", "MultiTask", "Parallel", "Split"
    reason = "attends to the outputs of single adapters"

    def __init__(self, *children: Child, name: str | None = None) -> None:
        """Fuse the adapters.

        Args:
            children: names of adapters, or stacks of them.
            name: name of the fusion layers; None: the names of the children, joined by commas.

        Raises:
            CompositionError: no child, or one that cannot be fused.
        """
        object.__setattr__(self, "fusion", name)
        super().__init__(*children)

    @property
    def name(self) -> str:
        """The name of the fusion layers."""
        return self.fusion or ",".join(self.fused)

    @property
    def fused(self) -> tuple[str, ...]:
        """The adapters whose outputs the fusion weighs, the last of each child."""
        return tuple(str(c.last() if isinstance(c, Node) else c) for c in self.children)

    def _check_children(self) -> None:
        super()._check_children()
        # Fuse("a,b", "c") and Fuse("a", "b,c") would have the same layers
        comma = [name for name in self.fused if "," in name and self.fusion is None]
        if comma:
            raise CompositionError(
                f"{self!r}: a fusion is named by its adapters, joined by commas, and {comma[0]!r} "
                f"has a comma. Write Fuse(…, name='my_fusion')."
            )

    @property
    def options(self) -> Mapping[str, Any]:
        """The name, if one was given."""
        return {} if self.fusion is None else {"name": self.fusion}


@dataclass(frozen=True, init=False, repr=False)
class Split(Node):
    """Each adapter on its part of the sequence: `Split("a", "b", splits=[32, 96])`.

    Attributes:
        splits: number of tokens of each child.
    """

    splits: tuple[int, ...]

    takes_none = True
    example = "'a', Stack('b', 'c'), splits=[32, 96]"

    def __init__(self, *children: Child, splits: Sequence[int] | int) -> None:
        """Divide the sequence.

        Args:
            children: names of adapters and compositions; None: the base model.
            splits: number of tokens of each child, or one number for all.

        Raises:
            CompositionError: no child, one that is not allowed here, or lengths that do not fit.
        """
        super().__init__(*children)
        object.__setattr__(self, "splits", _sizes(self, "splits", splits))


@dataclass(frozen=True, init=False, repr=False)
class BatchSplit(Node):
    """Each adapter on its rows of the batch: `BatchSplit("a", "b", batch_sizes=[2, 6])`.

    Attributes:
        batch_sizes: number of rows of each child.
    """

    batch_sizes: tuple[int, ...]

    takes_none = True
    refused = "MultiTask", "Parallel"
    reason = "fixes the rows of each child"
    example = "'a', Stack('b', 'c'), batch_sizes=[2, 6]"

    def __init__(self, *children: Child, batch_sizes: Sequence[int] | int) -> None:
        """Divide the batch.

        Args:
            children: names of adapters and compositions; None: the base model.
            batch_sizes: number of rows of each child, or one number for all.

        Raises:
            CompositionError: no child, one that is not allowed here, or sizes that do not fit.
        """
        super().__init__(*children)
        object.__setattr__(self, "batch_sizes", _sizes(self, "batch_sizes", batch_sizes))


class Parallel(Node):
    """Each adapter on a copy of the whole batch: `Parallel("a", "b")`, one output for each."""

    takes_none = True
    refused = ("Parallel",)
    example = "'a', 'b', 'c'"
    reason = "repeats the batch once for each child"


class MultiTask(Node):
    """Each adapter on the rows of its task: `MultiTask("a", "b")`.

    `model(…, task_ids=[0, 1, 1, 0])` gives the task of each row, by the number or the name of a
    child.
    """

    takes_none = True
    refused = "BatchSplit", "MultiTask", "Parallel"
    reason = "assigns the rows itself"

    @property
    def tasks(self) -> tuple[str | None, ...]:
        """The name of each task, that of the last adapter in each child."""
        return tuple(c.last() if isinstance(c, Node) else c for c in self.children)


@dataclass(frozen=True, init=False, repr=False)
class Average(Node):
    """The weighted average of the adapters' outputs: `Average("a", "b")`.

    Attributes:
        weights: a weight for each child; their sum is 1 unless `normalize_weights` was False.
    """

    weights: tuple[float, ...]

    example = "'a', Stack('b', 'c'), weights=[0.3, 0.7]"

    def __init__(
        self,
        *children: Child,
        weights: Sequence[float] | None = None,
        normalize_weights: bool = True,
    ) -> None:
        """Average the adapters.

        Args:
            children: names of adapters and compositions.
            weights: a weight for each child; None: equal weights.
            normalize_weights: whether to divide them by their sum. If not, the adapters' changes
                are added with these weights.

        Raises:
            CompositionError: no child, one that is not allowed here, or weights that do not fit.
        """
        super().__init__(*children)
        object.__setattr__(self, "weights", _weights(self, weights, normalize_weights))

    @property
    def options(self) -> Mapping[str, Any]:
        """The normalized weights."""
        return {**super().options, "normalize_weights": False}


def _sizes(node: Node, option: str, given: Sequence[int] | int) -> tuple[int, ...]:
    count = len(node)
    sizes = tuple(given) if isinstance(given, Iterable) else (given,) * count
    legal = all(isinstance(s, Integral) and not isinstance(s, bool) and s > 0 for s in sizes)
    if len(sizes) != count or not legal:
        raise CompositionError(
            f"{type(node).__name__}(…, {option}={given!r}): {option} is a positive number for each "
            f"of the {count} children, or one for all. Write {option}={[2] * count}."
        )
    return tuple(int(s) for s in sizes)


def _weights(node: Node, given: Sequence[float] | None, normalize: bool) -> tuple[float, ...]:
    count = len(node)
    if given is None:
        return (1.0 / count,) * count
    # accepts NumPy's numbers
    weights = tuple(given) if isinstance(given, Iterable) else ()
    legal = all(isinstance(w, Real) and not isinstance(w, bool) and abs(w) < 1e30 for w in weights)
    if not legal or len(weights) != count:
        raise CompositionError(
            f"Average(…, weights={given!r}): weights are {count} numbers, one for each child. "
            f"Write weights={[round(1 / count, 3)] * count}."
        )
    total = sum(weights) if normalize else 1.0
    if not total:
        raise CompositionError(
            f"Average(…, weights={given!r}): they sum to 0 and cannot be normalized. "
            f"Write normalize_weights=False."
        )
    return tuple(float(w) / float(total) for w in weights)


_KINDS: Mapping[str, type[Node]] = {
    cls.__name__: cls for cls in (Stack, Fuse, Split, BatchSplit, Parallel, MultiTask, Average)
}


def parse(setup: object) -> Node | None:
    """Return the composition that a user's argument describes.

    Args:
        setup: a name, a list of names (a stack), a composition, or None for no adapter.

    Raises:
        CompositionError: a composition in it is invalid.
        SetupError: the argument is none of these.
    """
    if setup is None or isinstance(setup, Node):
        return setup
    if isinstance(setup, str):
        return Stack(setup)
    if isinstance(setup, (list, tuple)):
        return Stack(*setup) if setup else None
    raise SetupError(
        f"active adapters {setup!r}: expected a name, a list of names or a composition, got a "
        f"{type(setup).__name__}. Write 'a' or Stack('a', 'b')."
    )


def validate_composition(adapter_composition: object) -> None:
    """Check a user's argument for the active adapters; compositions check themselves.

    Raises:
        CompositionError: the argument is not valid.
    """
    parse(adapter_composition)


def fusion_key(name: str) -> str:
    """Return the key under which a site keeps a fusion layer; no adapter can have this name."""
    return FUSION + name


def fusions_of(setup: Child) -> tuple[Fuse, ...]:
    """Return the fusions in a composition."""
    nodes = setup.nodes() if isinstance(setup, Node) else ()
    return tuple(node for node in nodes if isinstance(node, Fuse))


def last_adapter(setup: Child) -> str | None:
    """Return the adapter that determines the output; None if several do, or none.

    The last adapter of a `Fuse`, `Average` or `Split` does not determine its output.
    """
    while isinstance(setup, Stack):
        setup = setup.children[-1]
    return setup if isinstance(setup, str) else None


def without(
    setup: Node | None, removed: Collection[str], fusions: Collection[str] = ()
) -> Node | None:
    """Return a composition without some of its adapters; None if nothing is left.

    If the batch or the sequence is divided, the base model takes the place of a removed adapter. An
    average whose weights sum to 1 is normalized again; any other average keeps the remaining
    weights. A fusion is kept whole or removed.

    Args:
        setup: the composition.
        removed: names of adapters.
        fusions: names of fusions to remove.
    """
    left = _without(setup, removed, fusions)
    return Stack(left) if isinstance(left, str) else left


def _without(child: Child, removed: Collection[str], fusions: Collection[str]) -> Child:
    if not isinstance(child, Node):
        return None if child in removed else child
    if isinstance(child, Fuse):
        return None if child.name in fusions or set(child.flatten()) & set(removed) else child
    left = [_without(c, removed, fusions) for c in child.children]
    if left == list(child.children):
        return child
    made = child.with_children(left)
    # weights with another sum were given with normalize_weights=False
    total = sum(child.weights) if isinstance(child, Average) else 0.0
    if isinstance(made, Average) and math.isclose(total, 1.0, rel_tol=1e-9):
        scale = 1.0 / (sum(made.weights) or 1.0)
        weights = [w * scale for w in made.weights]
        return Average(*made.children, weights=weights, normalize_weights=False)
    return made


def to_json(setup: Node | None) -> Any:
    """Return the composition as JSON values: a stack of names as a list, any other as an object."""
    if setup is None:
        return []
    if isinstance(setup, Stack) and all(isinstance(c, str) for c in setup):
        return list(setup)
    children = [to_json(c) if isinstance(c, Node) else c for c in setup]
    return {"type": type(setup).__name__, "children": children, **setup.options}


def from_json(values: Any) -> Node | None:
    """Return the composition from the result of `to_json`.

    Raises:
        CompositionError: the values are not a composition.
    """
    if not isinstance(values, Mapping):
        return parse(values)
    options = dict(values)
    kind, children = _KINDS.get(str(options.pop("type", None))), options.pop("children", None)
    if kind is None or not isinstance(children, list):
        raise CompositionError(
            f"composition {values!r}: the type is one of {', '.join(sorted(_KINDS))}, with a list "
            f"of children. Write {{'type': 'Stack', 'children': ['a', 'b']}}."
        )
    made = [from_json(c) if isinstance(c, (Mapping, list)) else c for c in children]
    return kind(*made, **options)


def are_merged(names: Collection[str]) -> str:
    """Return the beginning of a message about merged adapters, such as `'a' is merged`."""
    return f"{listing(names)} {'is' if len(names) == 1 else 'are'} merged"


def merged_act(names: Collection[str]) -> str:
    """Return the beginning of a message about merged adapters, such as `'a' is merged and acts`."""
    return f"{are_merged(names)} and {'acts' if len(names) == 1 else 'act'}"


def refuse_merged_unless_stacked(setup: Node | None, merged: Collection[str]) -> None:
    """Refuse a setup with a merged adapter, which acts on all inputs, that is not a plain stack.

    Raises:
        StateError: the setup has a merged adapter, and is not a stack of names.
    """
    if setup is None or (isinstance(setup, Stack) and all(isinstance(c, str) for c in setup)):
        return
    if inside := [name for name in setup.flatten() if name in merged]:
        raise StateError(
            f"{merged_act(inside)} on every input, and {setup!r} is not a plain stack. "
            f"Write reset_adapter() first, or {Stack(*setup.flatten())!r}."
        )


# their names in `adapters`
AdapterCompositionBlock = Composition
parse_composition = parse


def __dir__() -> list[str]:
    return __all__
