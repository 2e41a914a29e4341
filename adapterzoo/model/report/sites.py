"""What a report has of each site, block and head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEFT_OUT = "left out"
DEAD = "dead"


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What an adapter has at one layer, or at one part of a fused layer.

    Attributes:
        path: of the layer, with its parameter and the role of its part; empty for the modules that
            the layers share.
        block: number of the block; −1 outside blocks.
        kind: what the layer is in its block, such as "query" or "mamba.in_proj"; for methods that
            act on the stream, the location, such as "output_adapter".
        parameters: how many it has.
        is_dead: whether none of its parameters got a gradient other than zero; None before a
            backward pass, without parameters, and where the whole adapter got zeros, as under a
            head that is zero.
        change: ‖ΔW‖, the Frobenius norm of the change of the weight; None if the method does not
            change weights, or the values are not at hand.
        weight: ‖W‖ of the base model's weight; None as above.
        is_finite: whether no value of its parameters is NaN or infinite; True if not looked at.
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
        """‖ΔW‖ / ‖W‖; infinite where zeros are changed."""
        return _relative([self])


@dataclass(frozen=True, slots=True)
class BlockReport:
    """A block of the model.

    Attributes:
        path: of the block.
        stack: path of the container of blocks.
        kinds: of its layers with a weight matrix, and of the places of the adapter that it has,
            with the number of each.
    """

    path: str
    stack: str
    kinds: dict[str, int]


@dataclass(frozen=True, slots=True)
class HeadReport:
    """A head that is used with the adapter.

    Attributes:
        name: of the head, or the class of the layer where it has none.
        parameters: how many it has beyond the base model's.
        is_trained: whether any of them is trainable.
        is_dead: whether none of them got a gradient other than zero; None before a backward pass.
    """

    name: str
    parameters: int
    is_trained: bool
    is_dead: bool | None


@dataclass(frozen=True, slots=True)
class Cell:
    """What an adapter does at the layers of one kind in one block.

    Attributes:
        sites: that have an adapter.
        there: how many layers of the kind the block has.
    """

    sites: tuple[SiteReport, ...]
    there: int

    @property
    def relative(self) -> float | None:
        """‖ΔW‖ / ‖W‖ of all these layers together; None if it is not known of all."""
        return _relative(self.sites)

    @property
    def is_dead(self) -> bool:
        """Whether any of its sites is dead."""
        return any(site.is_dead for site in self.sites)

    def __str__(self) -> str:
        """Return the change, or a word; "adapted" for methods that do not change weights."""
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
    """Return a ratio with two digits, short enough for a cell."""
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
