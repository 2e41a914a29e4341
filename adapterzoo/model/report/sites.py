"""The parts of a report: sites, blocks, heads, and the cells of its table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEFT_OUT = "left out"
DEAD = "dead"


@dataclass(frozen=True, slots=True)
class SiteReport:
    """An adapter at one layer, or at one part of a fused layer.

    Attributes:
        path: the path of the layer, with its parameter and the role of its part; empty for modules
            that the layers share.
        block: the number of the block; −1 outside blocks.
        kind: the kind of the layer in its block, such as "query" or "mamba.in_proj"; for methods
            that act on the stream, the location, such as "output_adapter".
        parameters: the number of the adapter's parameters here.
        is_dead: whether none of these parameters got a nonzero gradient; None before a backward
            pass, without parameters, if all gradients of the adapter are zero, as under a head that
            is zero, and for shared parameters whose gradients are zero.
        change: ‖ΔW‖, the Frobenius norm of the change of the weight; None if the method does not
            change weights, or they cannot be read.
        weight: ‖W‖ of the base model's weight; None as for `change`.
        is_finite: whether all values of the parameters are finite; True if not checked.
    """

    path: str
    block: int
    kind: str
    parameters: int
    is_dead: bool | None = None
    change: float | None = None
    weight: float | None = None
    is_finite: bool = True

    @property
    def relative(self) -> float | None:
        """‖ΔW‖ / ‖W‖; infinite if W is zero and changed."""
        return _relative([self])


@dataclass(frozen=True, slots=True)
class BlockReport:
    """A block of the model.

    Attributes:
        path: the path of the block.
        stack: the path of the container of blocks.
        kinds: the kinds of its layers with a weight matrix, and of the adapter's places in it, with
            the number of each.
    """

    path: str
    stack: str
    kinds: dict[str, int]


@dataclass(frozen=True, slots=True)
class HeadReport:
    """A head that is used with the adapter.

    Attributes:
        name: the name of the head, or the class of its layer if it has no name.
        parameters: the number of its parameters, without those of the base model.
        is_trained: whether any of them is trainable.
        is_dead: whether none of them got a nonzero gradient; None before a backward pass.
    """

    name: str
    parameters: int
    is_trained: bool
    is_dead: bool | None


@dataclass(frozen=True, slots=True)
class Cell:
    """The layers of one kind in one block, with the adapter at them.

    Attributes:
        sites: the layers that have the adapter.
        there: the number of layers of the kind in the block.
    """

    sites: tuple[SiteReport, ...]
    there: int

    @property
    def relative(self) -> float | None:
        """‖ΔW‖ / ‖W‖ of all these layers together; None if it is unknown for one of them."""
        return _relative(self.sites)

    @property
    def is_dead(self) -> bool:
        """Whether any of its sites is dead."""
        return any(site.is_dead for site in self.sites)

    def __str__(self) -> str:
        """Return the relative change, or a word such as "adapted" if no weight changes."""
        if not self.sites:
            return LEFT_OUT
        relative = self.relative
        words = ["adapted" if relative is None else number(relative)]
        if relative is None and not all(site.is_finite for site in self.sites):
            words = ["NaN"]
        if self.is_dead:
            words.append(DEAD)
        if len(self.sites) < self.there:
            words.append(f"{len(self.sites)} of {self.there}")
        return ", ".join(words)


def number(value: float) -> str:
    """Return a ratio with two significant digits, short enough for a cell."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞"
    if value >= 10.0:
        return f"{value:,.0f}" if value < 1e6 else f"{value:.0e}"
    return f"{value:.2g}" if value >= 1e-4 or not value else f"{value:.0e}"


def _relative(sites: Sequence[SiteReport]) -> float | None:
    pairs = [(site.change, site.weight) for site in sites]
    known = [(c, w) for c, w in pairs if c is not None and w is not None]
    if not known or len(known) < len(pairs):
        return None
    change, weight = (math.hypot(*values) for values in zip(*known, strict=True))
    if not all(math.isfinite(c) for c, _ in known):
        return math.nan
    return change / weight if weight else math.inf if change else 0.0
