"""Which adapters act, for a model and for a thread.

One `Selection` per model is shared by all its adapted layers. Its default holds for every thread;
`AdapterSetup` overrides it for the calling thread only. It is a `threading.local`, so reading it is
one attribute access, two threads never see each other's override, and `torch.compile` guards the
value that the calling thread sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .composition import Composition, Step
from .families import Family


@dataclass(frozen=True, slots=True)
class Plan:
    """A composition compiled for a model: what each site does in a forward.

    Attributes:
        setup: the composition it was made from; None for the plain base model.
        heads: the heads that answer; empty where the plan says nothing of heads.
        steps: site path to what the site evaluates; sites with nothing to do are absent.
        taps: path of a module to the sites that want its input.
        families: path of a module to those of its layers that read one input: each one's name in
            the module, and its adapters that can make use of it.
        skip_layers: numbers of the blocks that were left out.
    """

    setup: Composition | None = None
    heads: tuple[str, ...] = ()
    steps: Mapping[str, Step] = field(default_factory=dict)
    taps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    families: Mapping[str, tuple[tuple[str, Step], ...]] = field(default_factory=dict)
    skip_layers: tuple[int, ...] = ()


@dataclass(slots=True)
class Default:
    """The plan that holds where no override does; the one object that all threads share."""

    plan: Plan = field(default_factory=Plan)


class Selection(threading.local):
    """What is active, as the calling thread sees it."""

    def __init__(self, default: Default) -> None:
        """Start with a default plan; runs anew, with the same argument, in each thread.

        Args:
            default: shared by all threads. It must be given: what was made here would be made
                anew, and empty, in each thread.
        """
        self.default = default
        self.override: Plan | None = None
        # what blocks further out will bring back, outermost first
        self._outer: list[Plan | None] = []
        # residual inputs on their way from a tapped module to the site that takes them
        self.taps: dict[str, Tensor] = {}
        # of the module now running whose layers read one input: theirs
        self.family: Family | None = None
        # calls now running of modules that read changed parameters, innermost last, and what
        # each has read; it is dropped with the call
        self.reads: list[tuple[object, dict[tuple[object, ...], Tensor]]] = []
        self._pinned: Selection | None = None

    @property
    def plan(self) -> Plan:
        """The plan that holds for the calling thread."""
        override = self.override
        return self.default.plan if override is None else override

    @contextmanager
    def overridden(self, plan: Plan) -> Iterator[None]:
        """The plan holds for the calling thread until the context ends, however it ends."""
        self._outer.append(self.override)
        self.override = plan
        try:
            yield
        finally:
            self.override = self._outer.pop()
            self.taps.clear()

    @property
    def overrides(self) -> list[Plan]:
        """The override of the calling thread, and those that come back when its block ends."""
        return [plan for plan in (*self._outer, self.override) if plan is not None]

    def change_overrides(self, change: Callable[[Plan], Plan]) -> None:
        """Put another plan in the place of each of the calling thread's overrides."""
        self._outer = [plan and change(plan) for plan in self._outer]
        self.override = self.override and change(self.override)

    def pinned(self) -> Selection:
        """A selection of its own that holds, in every thread, what the calling thread sees now.

        It is the same one until the plan changes: the layers of a replica pass their taps on
        through it.
        """
        plan = self.plan
        if self._pinned is None or self._pinned.default.plan is not plan:
            self._pinned = Selection(Default(plan))
        return self._pinned

    def __reduce__(self) -> tuple[type[Selection], tuple[Default]]:
        """Copies and pickles keep the default; an override belongs to its thread."""
        return Selection, (self.default,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Selection:
        """A selection that shares nothing with this one; plans are immutable and stay shared."""
        copied = Selection(Default(self.default.plan))
        memo[id(self)] = copied
        return copied
