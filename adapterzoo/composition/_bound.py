"""A step with its adapters: what a plan holds for each site.

`torch.compile` compiles a forward for the names that it reads. A site therefore numbers its
adapters: compiled code reads the numbers, and runs for all compositions of equal structure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from adapterzoo.contracts import Adapter

from ._steps import Chain, Step


@dataclass(frozen=True, slots=True)
class BoundStep:
    """What a site evaluates; equal to another one if its step has the same names.

    Attributes:
        step: the step; it names adapters by keys of `adapters`.
        adapters: number → adapter; None if the step has the names of adapters at the layer.
        named: the step with the names of adapters.
        only: the adapter, if the site evaluates nothing else and neither captures nor shares
            inputs; None for other sites.
    """

    step: Step = field(compare=False, repr=False)
    adapters: Mapping[str, Any] | None = field(compare=False, repr=False)
    named: Step
    only: Adapter | None = field(default=None, compare=False, repr=False)

    def by_name(self) -> BoundStep:
        """Return the site for a copy of the layer, which has its own adapters."""
        return self if self.adapters is None else BoundStep(self.named, None, self.named)


def by_name(step: Step) -> BoundStep:
    """Return a site whose adapters are looked up at the layer in each call."""
    return BoundStep(step, None, step)


def bound(
    step: Step, adapters: Mapping[str, Adapter | Callable[..., Any]], alone: bool = False
) -> BoundStep:
    """Return a site that holds its adapters.

    Args:
        step: with the names of adapters.
        adapters: those at the site, by name; if one is missing, they are looked up in each call.
        alone: whether the plan has only the step for the site, no captured or shared inputs.
    """
    if isinstance(step, tuple) and len(set(step)) == len(step):
        numbers = _numbers(len(step))
        held = dict(zip(numbers, map(adapters.__getitem__, step), strict=True))
        only = cast("Adapter", held[numbers[0]]) if alone and len(step) == 1 else None
        return BoundStep(numbers, held, step, only)
    found: dict[str, str] = {}
    numbered = _renamed(step, lambda name: found.setdefault(name, str(len(found))))
    if not found.keys() <= adapters.keys():
        return by_name(step)
    return BoundStep(numbered, {number: adapters[name] for name, number in found.items()}, step)


@functools.cache
def _numbers(count: int) -> Chain:
    return tuple(map(str, range(count)))


def _renamed(step: Any, rename: Callable[[str], str]) -> Any:
    """Return a step, or a part of one, with other names."""
    if step is None:
        return None
    if isinstance(step, str):
        return rename(step)
    if isinstance(step, tuple):
        return tuple(_renamed(part, rename) for part in step)
    return step.renamed(lambda part: _renamed(part, rename))
