"""Composition: how several adapters act together. Data, a compiler and one evaluator.

Semantics: https://docs.adapterhub.ml/adapter_composition.html.

A composition names adapters. `compile_site` prunes it to the adapters that are present at one
site; the result, a `Step`, is what the site evaluates in each forward. An adapter is a function
around its layer, so `Stack(a, b)` is function composition: the deltas of weight adapters add,
bottlenecks chain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from .contracts import Adapter, Base, SharingAdapter
from .errors import CompositionError

Step: TypeAlias = tuple[str, ...]
"""The names of the adapters at one site, in the order in which they nest, innermost first."""


@dataclass(frozen=True, init=False)
class Stack:
    """Adapters one on top of the other: `Stack("language", "task")`; the first acts first."""

    children: tuple[str, ...]

    def __init__(self, *children: str) -> None:
        """Put the adapters on top of each other.

        Args:
            children: names of adapters, each once.

        Raises:
            CompositionError: no name, a name twice, or something that is no name.
        """
        if not children or not all(isinstance(c, str) for c in children):
            raise CompositionError(
                f"Stack{children!r}: a stack takes names of adapters, at least one. "
                f"Write Stack('a', 'b')."
            )
        if len(set(children)) != len(children):
            once = ", ".join(repr(c) for c in dict.fromkeys(children))
            raise CompositionError(
                f"Stack{children!r}: an adapter can act once in a stack. Write Stack({once})."
            )
        object.__setattr__(self, "children", children)

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which they act."""
        return iter(self.children)

    def __len__(self) -> int:
        """How many adapters there are."""
        return len(self.children)

    def __repr__(self) -> str:
        """A constructor call."""
        return f"Stack({', '.join(map(repr, self.children))})"

    def flatten(self) -> tuple[str, ...]:
        """All the names in it."""
        return self.children


Composition: TypeAlias = Stack


def parse(setup: object) -> Composition | None:
    """Whatever a user may pass as a set of active adapters, as a composition.

    Args:
        setup: a name, a list of names (a stack), a composition, or None for no adapter.

    Raises:
        CompositionError: it is none of these.
    """
    if setup is None or setup == [] or setup == ():
        return None
    if isinstance(setup, Stack):
        return setup
    if isinstance(setup, str):
        return Stack(setup)
    if isinstance(setup, (list, tuple)):
        return Stack(*setup)
    raise CompositionError(
        f"active adapters {setup!r}: expected a name, a list of names or a composition, got a "
        f"{type(setup).__name__}. Write 'a' or Stack('a', 'b')."
    )


def compile_site(
    setup: Composition, present: Collection[str], adapter_of: Callable[[str], Adapter]
) -> Step | None:
    """What one site has to do, None when no adapter of the composition is present there.

    Args:
        setup: what is active.
        present: the names that have an adapter at the site.
        adapter_of: the adapter of a name at the site.
    """
    names = tuple(name for name in setup if name in present)
    if not names:
        return None
    # an adapter on the input acts before everything that it encloses: the first is outermost
    outer = [n for n in names if adapter_of(n).acts_on == "input"]
    inner = [n for n in names if adapter_of(n).acts_on != "input"]
    return (*inner, *reversed(outer))


def evaluate(step: Step, adapters: Mapping[str, Adapter], x: Tensor, base: Base) -> Tensor:
    """The output of a site under its step. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
    for name in step[:-1]:
        base = Nested(adapters[name], base)
    adapted: Tensor = adapters[step[-1]](x, base)
    return adapted


class Nested(Base):
    """A layer with an adapter, or several, around it, as the base of the next one."""

    __slots__ = ("_adapter", "_inner")

    def __init__(self, adapter: Callable[[Tensor, Base], Tensor], inner: Base) -> None:
        """Put the adapter around the layer.

        Args:
            adapter: an adapter, or another function of an input and its base.
            inner: the layer, with the adapters before.
        """
        self._adapter = adapter
        self._inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        """The output with the adapters."""
        adapted: Tensor = self._adapter(x, self._inner)
        return adapted

    def plain(self, x: Tensor) -> Tensor:
        """The untouched output."""
        return self._inner.plain(x)

    @property
    def weight(self) -> Tensor:
        """The untouched weight."""
        return self._inner.weight

    @property
    def bias(self) -> Tensor | None:
        """The untouched bias."""
        return self._inner.bias

    @property
    def scale(self) -> float | Tensor:
        """The factor of the output."""
        return self._inner.scale

    @property
    def residual(self) -> Tensor:
        """The residual stream before the sub-layer."""
        return self._inner.residual

    def from_input(self, adapter: SharingAdapter, x: Tensor) -> Any:
        """What the adapter needs of x."""
        return self._inner.from_input(adapter, x)
