"""From a composition to the step of one site: pruned to the adapters that are present there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from adapterzoo.contracts import Adapter, FusibleAdapter, LanguageFreeAdapter, can_batch
from adapterzoo.errors import CompositionError
from adapterzoo.names import FUSION

from ._node import Child, Node
from ._steps import BatchedAdapters, Chain, Fused, Mean, Nest, RowSteps, Step, Tokens, Tree
from .nodes import Average, Fuse, Split

AdapterOf = Callable[[str], Adapter]


def compile_site(
    setup: Child,
    present: Collection[str],
    adapter_of: AdapterOf,
    unfused: Collection[str] = (),
) -> Step | None:
    """Return the step of a site; None if no adapter of the composition is present there.

    Args:
        setup: what is active; all rows of a batch take it.
        present: the names that have an adapter at the site.
        adapter_of: the adapter of a name at the site.
        unfused: the fusions without layers at the site, where the first of their adapters acts.
    """
    if not isinstance(setup, Node):
        return (setup,) if setup is not None and setup in present else None
    steps = [compile_site(child, present, adapter_of, unfused) for child in setup.children]
    if all(step is None for step in steps):
        return None
    _refuse_other_base(setup, present, adapter_of)
    acting = [step for step in steps if step is not None and not _is_base(step, adapter_of)]
    if not acting:
        # adapters of a base model without its language adapters, which do nothing else here
        return next(step for step in steps if step is not None)
    if isinstance(setup, Fuse) and setup.name in unfused:
        return steps[0]
    if isinstance(setup, (Average, Fuse, Split)):
        _refuse_unmixable(setup, present, adapter_of)
    if isinstance(setup, Fuse):
        return _fused(setup, steps, adapter_of)
    if isinstance(setup, Split):
        return Tokens(tuple(steps), setup.splits, _acts_on_all(steps, adapter_of))
    if isinstance(setup, Average):
        return Mean(tuple(steps), setup.weights, _acts_on_all(steps, adapter_of))
    parts: list[str | Tree] = []
    for step in acting:
        parts += step if isinstance(step, tuple) else [step]
    # the first adapter of a stack acts first: of those that change the input, the outermost
    outer = [part for part in parts if _acts_on(part, adapter_of) == "input"]
    inner = [part for part in parts if _acts_on(part, adapter_of) != "input"]
    nested = (*inner, *reversed(outer))
    names = tuple(part for part in nested if isinstance(part, str))
    return names if len(names) == len(nested) else Nest(nested, "output" if inner else "input")


def _is_base(step: Step, adapter_of: AdapterOf) -> bool:
    adapter = adapter_of(step[0]) if isinstance(step, tuple) and len(step) == 1 else None
    return isinstance(adapter, LanguageFreeAdapter) and adapter.is_base


def _refuse_other_base(setup: Node, present: Collection[str], adapter_of: AdapterOf) -> None:
    names = setup.flatten()
    free = {
        n: a for n in names if isinstance(a := _at(n, present, adapter_of), LanguageFreeAdapter)
    }
    other = next((n for n in names if n not in free), None)
    if free and other is not None:
        first, adapter = next(iter(free.items()))
        raise CompositionError(
            f"{setup!r}: {first!r} is an adapter of the base model without its language adapters, "
            f"and {other!r} of the one with them. Write BatchSplit({first!r}, {other!r}, …) for "
            f"different rows of a batch, or add {other!r} again for the same base model: with "
            f"{adapter.joining}."
        )


def _at(name: str, present: Collection[str], adapter_of: AdapterOf) -> Adapter | None:
    return adapter_of(name) if name in present else None


def _refuse_unmixable(setup: Node, present: Collection[str], adapter_of: AdapterOf) -> None:
    for name in setup.flatten():
        adapter = _at(name, present, adapter_of)
        fusible = isinstance(setup, Fuse) and isinstance(adapter, FusibleAdapter)
        what = "" if adapter is None or fusible else adapter.stacks_only
        if what:
            raise CompositionError(
                f"{setup!r}: {name!r} has {what}, which cannot be averaged, fused or given to a "
                f"part of the sequence. Write Stack({name!r}, …), or BatchSplit({name!r}, …) for "
                f"different rows of a batch."
            )


def _fused(setup: Fuse, steps: Sequence[Step | None], adapter_of: AdapterOf) -> Fused:
    chains: list[Chain] = []
    last_adapters: list[str] = []
    for child, step in zip(setup.children, steps, strict=True):
        last = child.last() if isinstance(child, Node) else child
        if not isinstance(step, tuple) or last is None or last not in step:
            raise CompositionError(
                f"{setup!r}: {child!r} has no adapter at a site where others of the fusion have "
                f"one. Fuse adapters with the same sites."
            )
        chains.append(step)
        last_adapters.append(last)
    acts_on = adapter_of(last_adapters[-1]).acts_on
    return Fused(
        tuple(chains),
        tuple(last_adapters),
        fusion_key(setup.name),
        "input" if acts_on == "input" else "output",
    )


def fusion_key(name: str) -> str:
    """Return the key under which a site keeps a fusion layer; no adapter can have this name."""
    return FUSION + name


def compile_rows(
    parts: Sequence[Child],
    present: Collection[str],
    adapter_of: AdapterOf,
    unfused: Collection[str] = (),
) -> Step | None:
    """Return the step of a site for a batch whose rows take different compositions.

    Args:
        parts: the compositions, each for all rows that take it.
        present: the names that have an adapter at the site.
        adapter_of: the adapter of a name at the site.
        unfused: as in `compile_site`.
    """
    steps = [compile_site(part, present, adapter_of, unfused) for part in parts]
    return join_rows(steps, adapter_of)


def join_rows(steps: Sequence[Step | None], adapter_of: AdapterOf) -> Step | None:
    """Join a site's steps for different rows to one step."""
    if all(step == steps[0] for step in steps):
        return steps[0]
    return RowSteps(tuple(steps), _layers(steps, adapter_of))


def _layers(
    steps: Sequence[Step | None], adapter_of: AdapterOf
) -> tuple[BatchedAdapters, ...] | None:
    chains = [step or () for step in steps if step is None or isinstance(step, tuple)]
    if len(chains) < len(steps):
        return None
    layers: list[BatchedAdapters] = []
    for level in range(max(map(len, chains))):
        at_level = [chain[level] if level < len(chain) else None for chain in chains]
        names = tuple(dict.fromkeys(name for name in at_level if name is not None))
        adapters = [adapter_of(name) for name in names]
        uniform = len(names) == 1 and None not in at_level
        if not uniform and not can_batch(adapters):
            return None
        numbers = tuple(None if name is None else names.index(name) for name in at_level)
        layers.append(BatchedAdapters(names, numbers))
    return tuple(layers)


def _acts_on(part: str | Tree, adapter_of: AdapterOf) -> str:
    return adapter_of(part).acts_on if isinstance(part, str) else part.acts_on


def _acts_on_all(steps: Sequence[Step | None], adapter_of: AdapterOf) -> Literal["output", "input"]:
    parts = [p for s in steps if s is not None for p in (s if isinstance(s, tuple) else (s,))]
    return "input" if all(_acts_on(p, adapter_of) == "input" for p in parts) else "output"
