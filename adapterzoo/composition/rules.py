"""Parse compositions, convert them to JSON and back, and remove deleted adapters from them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from adapterzoo.errors import CompositionError, SetupError, StateError, listing

from . import nodes
from ._node import Child, Node
from .nodes import Average, Stack

_KINDS: Mapping[str, type[Node]] = {
    cls.__name__: cls
    for cls in vars(nodes).values()
    if isinstance(cls, type) and issubclass(cls, Node) and cls is not Node
}


def parse(setup: object) -> Node | None:
    """Return the composition that a user's argument describes.

    Args:
        setup: a name, a list of names (a stack), a composition, or None for no adapter.

    Raises:
        CompositionError: a composition in it is not legal.
        SetupError: it is none of these.
    """
    if setup is None or (isinstance(setup, (list, tuple)) and not setup):
        return None
    if isinstance(setup, Node):
        return setup
    if isinstance(setup, str):
        return Stack(setup)
    if isinstance(setup, (list, tuple)):
        return Stack(*setup)
    raise SetupError(
        f"active adapters {setup!r}: expected a name, a list of names or a composition, got a "
        f"{type(setup).__name__}. Write 'a' or Stack('a', 'b')."
    )


def validate_composition(adapter_composition: object) -> None:
    """Check what a user may pass as a set of active adapters; compositions check themselves.

    Raises:
        CompositionError: it is none.
    """
    parse(adapter_composition)


def fusions_of(setup: Child) -> tuple[nodes.Fuse, ...]:
    """Return the fusions in a composition."""
    if isinstance(setup, nodes.Fuse):
        return (setup,)
    children = setup.children if isinstance(setup, Node) else ()
    return tuple(fuse for child in children for fuse in fusions_of(child))


def fused(fuse: nodes.Fuse) -> tuple[str, ...]:
    """Return the adapters whose outputs a fusion weighs."""
    lasts = (c.last() if isinstance(c, Node) else c for c in fuse.children)
    return tuple(str(last) for last in lasts)


def last_adapter(setup: Child) -> str | None:
    """Return the adapter that determines the output; None if several do, or none.

    The last adapter of a `Fuse`, `Average` or `Split` does not determine its output.
    """
    while isinstance(setup, Stack):
        setup = setup.children[-1]
    return setup if isinstance(setup, str) else None


def without(
    setup: Node | None, gone: Collection[str], fusions: Collection[str] = ()
) -> Node | None:
    """Return the composition without some of its adapters; None if nothing is left.

    If the batch or the sequence is divided, the base model takes the part of a removed adapter. An
    average whose weights sum to 1 is normalized again; any other average keeps the remaining
    weights. A fusion is kept whole or removed.

    Args:
        setup: the composition.
        gone: names of adapters to remove.
        fusions: names of fusions to remove.
    """
    left = _without(setup, gone, fusions)
    return Stack(left) if isinstance(left, str) else left


def _without(child: Child, gone: Collection[str], fusions: Collection[str]) -> Child:
    if not isinstance(child, Node):
        return None if child in gone else child
    if isinstance(child, nodes.Fuse):
        return None if child.name in fusions or set(child.flatten()) & set(gone) else child
    left = [_without(c, gone, fusions) for c in child.children]
    if left == list(child.children):
        return child
    if not any(c is not None for c in left):
        return None
    if child.takes_none:
        return child.with_children(left)
    kept = [c for c in left if c is not None]
    if isinstance(child, Average):
        weights = [w for w, c in zip(child.weights, left, strict=True) if c is not None]
        total = sum(weights)
        # weights with another sum were given with normalize_weights=False
        normalized = math.isclose(sum(child.weights), 1.0, rel_tol=1e-9)
        scale = 1.0 / total if normalized and total else 1.0
        return Average(*kept, weights=[w * scale for w in weights], normalize_weights=False)
    return child.with_children(kept)


def to_json(setup: Node | None) -> Any:
    """Return the composition as JSON values: a stack of names as a list, others as objects."""
    if setup is None:
        return []
    if isinstance(setup, Stack) and all(isinstance(c, str) for c in setup):
        return list(setup)
    children = [to_json(c) if isinstance(c, Node) else c for c in setup]
    return {"type": type(setup).__name__, "children": children, **setup.options}


def from_json(values: Any) -> Node | None:
    """Return the composition that `to_json` wrote.

    Raises:
        CompositionError: it is not a composition.
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
    try:
        return kind(*made, **options)
    except CompositionError:
        raise
    except TypeError as error:
        raise CompositionError(
            f"composition {values!r}: {error}. Write the options that {kind.__name__} takes."
        ) from error


def refuse_merged_part(setup: Node | None, merged: Collection[str]) -> None:
    """Raise if a setup uses a merged adapter, which acts on all inputs, on part of them.

    Raises:
        StateError: the setup uses a merged adapter on part of its input.
    """
    inside = [] if setup is None else [n for n in setup.flatten() if n in merged]
    stacked = isinstance(setup, Stack) and all(isinstance(c, str) for c in setup)
    if inside and not stacked:
        raise StateError(
            f"{listing(inside)} is merged and acts on every input, but {setup!r} applies it to a "
            f"part. Write reset_adapter(), or Stack('a', 'b')."
        )
