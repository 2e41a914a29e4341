"""The compositions as data: immutable, compared by value, checked when they are made.

A child is the name of an adapter or another composition; where the batch or the sequence is
divided, it may also be None, the base model. Any composition can contain any other,
except those in `REFUSED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

from adapterzoo.errors import CompositionError

from ._node import Child, Node


@dataclass(frozen=True, init=False, repr=False)
class Stack(Node):
    """Adapters that act one after another: `Stack("language", "task")`; the first acts first."""

    def __init__(self, *children: Child) -> None:
        """Stack the adapters.

        Args:
            children: names of adapters, each once, and compositions; a stack among them is
                part of this one.

        Raises:
            CompositionError: no child, a name twice, or a child that is neither.
        """
        inside = [c.children if isinstance(c, Stack) else (c,) for c in children]
        children = tuple(child for part in inside for child in part)
        super().__init__(*children)
        names = [c for c in children if isinstance(c, str)]
        if len(set(names)) != len(names):
            once = ", ".join(repr(c) for c in dict.fromkeys(children))
            raise CompositionError(
                f"{self!r}: an adapter can act once in a stack. Write Stack({once})."
            )


@dataclass(frozen=True, init=False, repr=False)
class Fuse(Node):
    """AdapterFusion: attention over the outputs of the adapters, `Fuse("a", "b")`.

    Pfeiffer et al. 2021, arXiv:2005.00247.

    Attributes:
        fusion: the name of the fusion layers; None if it consists of the children's names.
    """

    fusion: str | None

    def __init__(self, *children: Child, name: str | None = None) -> None:
        """Fuse the adapters.

        Args:
            children: names of adapters, or stacks of them.
            name: of the fusion layers; None: the names of the children, joined by commas.

        Raises:
            CompositionError: no child, or one that cannot be fused.
        """
        object.__setattr__(self, "fusion", name)
        super().__init__(*children)

    @property
    def name(self) -> str:
        """The name of the fusion layers."""
        return self.fusion or ",".join(self._lasts)

    @property
    def _lasts(self) -> list[str]:
        return [str(c.last() if isinstance(c, Node) else c) for c in self.children]

    def _check_children(self) -> None:
        super()._check_children()
        # Fuse("a,b", "c") and Fuse("a", "b,c") would have the same layers
        comma = [name for name in self._lasts if "," in name and self.fusion is None]
        if comma:
            raise CompositionError(
                f"{self!r}: the layers are named like the adapters, joined by commas, and the name "
                f"{comma[0]!r} has a comma. Write Fuse(…, name='my_fusion')."
            )

    @property
    def options(self) -> Mapping[str, Any]:
        """The name, if one was given."""
        return {} if self.fusion is None else {"name": self.fusion}


@dataclass(frozen=True, init=False, repr=False)
class Split(Node):
    """Each adapter on its part of the sequence: `Split("a", "b", splits=[32, 96])`.

    Attributes:
        splits: how many tokens each child gets.
    """

    splits: tuple[int, ...]

    takes_none: ClassVar[bool] = True

    def __init__(self, *children: Child, splits: Sequence[int] | int) -> None:
        """Divide the sequence.

        Args:
            children: names of adapters and compositions; None: the base model.
            splits: tokens of each child; one number applies to all.

        Raises:
            CompositionError: no child, one that is not legal here, or lengths that do not fit.
        """
        object.__setattr__(self, "splits", _sizes("Split", "splits", children, splits))
        super().__init__(*children)

    @property
    def options(self) -> Mapping[str, Any]:
        """The lengths."""
        return {"splits": list(self.splits)}


@dataclass(frozen=True, init=False, repr=False)
class BatchSplit(Node):
    """Each adapter on its rows of the batch: `BatchSplit("a", "b", batch_sizes=[2, 6])`.

    Attributes:
        batch_sizes: how many rows each child gets.
    """

    batch_sizes: tuple[int, ...]

    takes_none: ClassVar[bool] = True

    def __init__(self, *children: Child, batch_sizes: Sequence[int] | int) -> None:
        """Divide the batch.

        Args:
            children: names of adapters and compositions; None: the base model.
            batch_sizes: rows of each child; one number applies to all.

        Raises:
            CompositionError: no child, one that is not legal here, or sizes that do not fit.
        """
        sizes = _sizes("BatchSplit", "batch_sizes", children, batch_sizes)
        object.__setattr__(self, "batch_sizes", sizes)
        super().__init__(*children)

    @property
    def options(self) -> Mapping[str, Any]:
        """The sizes."""
        return {"batch_sizes": list(self.batch_sizes)}


@dataclass(frozen=True, init=False, repr=False)
class Parallel(Node):
    """Each adapter on a copy of the whole batch: `Parallel("a", "b")`, one output for each."""

    takes_none: ClassVar[bool] = True

    @property
    def parallel_channels(self) -> int:
        """How many copies of the batch it makes."""
        return len(self.children)


@dataclass(frozen=True, init=False, repr=False)
class MultiTask(Node):
    """Each row of the batch to the adapter of its task: `MultiTask("a", "b")`.

    `model(…, task_ids=[0, 1, 1, 0])` says the task of each row, by the number or the name of a
    child.
    """

    takes_none: ClassVar[bool] = True

    @property
    def tasks(self) -> tuple[str | None, ...]:
        """The name of each task, that of the adapter that acts last in each child."""
        return tuple(c.last() if isinstance(c, Node) else c for c in self.children)


@dataclass(frozen=True, init=False, repr=False)
class Average(Node):
    """The weighted average of the adapters' outputs: `Average("a", "b")`.

    Attributes:
        weights: one for each child; their sum is 1 unless `normalize_weights` was False.
    """

    weights: tuple[float, ...]

    def __init__(
        self,
        *children: Child,
        weights: Sequence[float] | None = None,
        normalize_weights: bool = True,
    ) -> None:
        """Average the adapters.

        Args:
            children: names of adapters and compositions.
            weights: one for each child; None: equal weights.
            normalize_weights: whether to divide them by their sum. If not, the adapters' changes
                are added with these weights.

        Raises:
            CompositionError: no child, one that is not legal here, or weights that do not fit.
        """
        object.__setattr__(self, "weights", _weights(children, weights, normalize_weights))
        super().__init__(*children)

    @property
    def options(self) -> Mapping[str, Any]:
        """The normalized weights."""
        return {"weights": list(self.weights), "normalize_weights": False}

    @property
    def shown(self) -> Mapping[str, Any]:
        """The normalized weights, unless they are all equal."""
        if self.weights == _weights(self.children, None, True):
            return {}
        total = sum(self.weights)
        as_given = bool(total) and tuple(w / total for w in self.weights) == self.weights
        flag = {} if as_given else {"normalize_weights": False}
        return {"weights": list(self.weights), **flag}


def _sizes(
    kind: str, option: str, children: tuple[Child, ...], given: Sequence[int] | int
) -> tuple[int, ...]:
    if not children:
        # the node's own check refuses this
        return ()
    sizes = tuple(given) if isinstance(given, Iterable) else (given,) * len(children)
    legal = all(isinstance(s, Integral) and not isinstance(s, bool) and s > 0 for s in sizes)
    if len(sizes) != len(children) or not legal:
        hint = [2] * len(children)
        raise CompositionError(
            f"{kind}({', '.join(map(repr, children))}, {option}={given!r}): {option} is a positive "
            f"number for each of the {len(children)} children, or one for all. "
            f"Write {option}={hint}."
        )
    return tuple(int(s) for s in sizes)


def _weights(
    children: tuple[Child, ...], given: Sequence[float] | None, normalize: bool
) -> tuple[float, ...]:
    if not children:
        # as above
        return ()
    if given is None:
        return (1.0 / len(children),) * len(children)
    # accepts NumPy's numbers
    weights = tuple(given) if isinstance(given, Iterable) else ()
    legal = all(isinstance(w, Real) and not isinstance(w, bool) for w in weights)
    if len(weights) != len(children) or not legal or not all(abs(w) < 1e30 for w in weights):
        what = f"weights are {len(children)} numbers, one for each child"
    elif normalize and not sum(weights):
        what = "the weights sum to 0 and cannot be normalized"
    else:
        total = sum(weights) if normalize else 1.0
        return tuple(float(w) / float(total) for w in weights)
    hint = [round(1 / len(children), 3)] * len(children)
    raise CompositionError(
        f"Average({', '.join(map(repr, children))}, weights={given!r}): {what}. "
        f"Write weights={hint}{', normalize_weights=False' if 'sum' in what else ''}."
    )
