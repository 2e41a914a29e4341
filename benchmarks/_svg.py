"""SVG written by hand: the same figures give the same file anywhere.

One file is readable on light and on dark pages.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_STYLE = """\
text { font-family: Arial, Helvetica, 'Liberation Sans', sans-serif; font-size: 13px }
.page { fill: #ffffff; stroke: #d9dde2 } .grid { stroke: #e9ecef }
.text { fill: #1f2328 } .muted { fill: #5f6771 } .title { font-size: 17px; font-weight: bold }
.rule { stroke: #5f6771; fill: none } .line { stroke-width: 0.8; opacity: 0.75 }
"""
_DARK = """\
.page { fill: #14171c; stroke: #30363f } .grid { stroke: #262b33 }
.text { fill: #e8eaed } .muted { fill: #a0a8b2 } .rule { stroke: #a0a8b2 }
"""


def opening(
    title: str,
    width: int,
    height: int,
    colors: Mapping[str, tuple[str, str]],
    rules: tuple[str, str] = ("", ""),
) -> str:
    """Return the start of a file, up to the page.

    Args:
        title: of the image.
        width: of the image.
        height: of the image.
        colors: class → its color on light and on dark pages; `-s` is appended for strokes.
        rules: more CSS, for all pages and for dark ones.
    """

    def style(dark: bool) -> str:
        painted = " ".join(
            f".{name} {{ fill: {color[dark]} }} .{name}-s {{ stroke: {color[dark]} }}"
            for name, color in colors.items()
        )
        return f"{(_STYLE, _DARK)[dark]}{painted}\n{rules[dark]}"

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{title}</title>\n<style>\n{style(False)}"
        f"@media (prefers-color-scheme: dark) {{\n{style(True)}}}\n</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    )


def marker(family: str, shape: str, x: float, y: float) -> str:
    """Return a marker of a class: circle, ring, square, triangle or diamond."""
    if shape == "circle":
        return f'<circle class="{family}" cx="{x:g}" cy="{y:g}" r="5"/>'
    if shape == "ring":
        return (
            f'<circle class="page {family}-s" cx="{x:g}" cy="{y:g}" r="4.5" '
            f'style="stroke-width: 2"/>'
        )
    paths = {
        "square": f"M{x - 4.5:g} {y - 4.5:g}h9v9h-9z",
        "triangle": f"M{x:g} {y - 5.5:g}l5.5 9.5h-11z",
        "diamond": f"M{x:g} {y - 6:g}l6 6l-6 6l-6 -6z",
    }
    return f'<path class="{family}" d="{paths[shape]}"/>'


# --- labels beside the points of a plot, none over another label or over a point ---


# widths of Arial, Helvetica and Liberation Sans, in thousandths of the size
_WIDTHS = {
    **dict.fromkeys("ijl", 222), **dict.fromkeys(" ft,./[]", 278), **dict.fromkeys("r-()", 333),
    **dict.fromkeys("ckszvxy", 500), '"': 355, "m": 833, "w": 722, "+": 584, "=": 584,
}  # fmt: skip
_ANY_WIDTH = 560
_HALF_MARKER = 6
_DISTANCES = (9, 15, 22, 30, 40, 52, 66, 84, 104)
# places of a label that are looked at, and orders in which labels are moved
_KEPT, _TRIES = 48, 12
# right, left, above, below, then between
_DIRECTIONS = ((2, 0), (-2, 0), (0, -2), (0, 2), (2, -1), (2, 1), (-2, -1), (-2, 1),
               (1, -2), (1, 2), (-1, -2), (-1, 2))  # fmt: skip


@dataclass(frozen=True)
class Box:
    """A rectangle, with y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Return the area of both."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0) * max(height, 0)

    def meets(self, other: Box) -> bool:
        """Return whether they share a point."""
        return (
            self.left <= other.right
            and other.left <= self.right
            and self.top <= other.bottom
            and other.top <= self.bottom
        )

    def __contains__(self, other: Box) -> bool:
        """Return whether the other is inside."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """Return the point of the rectangle that is nearest to another one."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)

    def crosses(self, line: tuple[float, float, float, float]) -> bool:
        """Return whether a part of a line from (x, y) to (x, y) is inside."""
        x, y, to_x, to_y = line
        first, last = 0.0, 1.0
        for start, change, low, high in (
            (x, to_x - x, self.left, self.right),
            (y, to_y - y, self.top, self.bottom),
        ):
            if change == 0:
                if not low < start < high:
                    return False
                continue
            ends = sorted(((low - start) / change, (high - start) / change))
            first, last = max(first, ends[0]), min(last, ends[1])
        return first < last


@dataclass(frozen=True)
class Label:
    """A placed label: its text, its rectangle, and the line to its point if it is far from it."""

    text: str
    box: Box
    line: tuple[float, float, float, float] | None


@dataclass(frozen=True)
class _Candidate:
    label: Label
    # rectangle around label and line
    hull: Box
    # grows with the distance
    cost: float


def width(text: str, size: float) -> int:
    """Return the width of a text, rounded up."""
    return -int(-sum(_WIDTHS.get(c, _ANY_WIDTH) for c in text) * size // 1000)


def placed(
    points: Sequence[tuple[int, int, str]],
    frame: Box,
    taken: Sequence[Box],
    size: int,
) -> list[Label]:
    """Return a label for each point.

    Args:
        points: x, y and text.
        frame: where labels may be.
        taken: where they may not.
        size: of the font.
    """
    markers = [
        Box(x - _HALF_MARKER, y - _HALF_MARKER, x + _HALF_MARKER, y + _HALF_MARKER)
        for x, y, _ in points
    ]
    candidates = []
    for i, (x, y, text) in enumerate(points):
        others = [*taken, *markers[:i], *markers[i + 1 :]]
        around = [
            _alone(label, others) for label in _around(x, y, text, size) if label.box in frame
        ]
        candidates.append(sorted(around, key=lambda c: c.cost)[:_KEPT])
    tries = [_settled(candidates, random.Random(number)) for number in range(_TRIES)]
    return [candidate.label for candidate in min(tries, key=_total)]


def _settled(candidates: list[list[_Candidate]], draw: random.Random) -> list[_Candidate]:
    """Return labels of which none has a better place, the others being where they are."""
    chosen = [options[0] for options in candidates]
    order = list(range(len(chosen)))
    for _ in range(30):
        before = list(chosen)
        draw.shuffle(order)
        for i in order:
            rest = chosen[:i] + chosen[i + 1 :]
            chosen[i] = min(
                candidates[i], key=lambda c: c.cost + sum(_conflict(c, other) for other in rest)
            )
        if chosen == before:
            break
    return chosen


def _total(chosen: Sequence[_Candidate]) -> float:
    pairs = itertools.combinations(chosen, 2)
    return sum(c.cost for c in chosen) + sum(_conflict(one, other) for one, other in pairs)


def _around(x: int, y: int, text: str, size: int) -> list[Label]:
    wide, high = width(text, size) + 4, size + 2
    found = []
    for distance in _DISTANCES:
        for right, down in _DIRECTIONS:
            # the nearest point of the rectangle
            near_x, near_y = x + right * distance // 2, y + down * distance // 2
            left = near_x - (wide if right < 0 else 0 if right > 0 else wide // 2)
            top = near_y - (high if down < 0 else 0 if down > 0 else high // 2)
            if abs(right) == 1:
                left = near_x - (wide * 3 // 4 if right < 0 else wide // 4)
            box = Box(left, top, left + wide, top + high)
            line = None if distance == _DISTANCES[0] else (x, y, *box.nearest(x, y))
            found.append(Label(text, box, line))
    return found


def _alone(label: Label, others: Sequence[Box]) -> _Candidate:
    box, cost = label.box, 100 * sum(label.box.overlap(other) for other in others)
    if label.line is None:
        return _Candidate(label, box, cost)
    x, y, to_x, to_y = label.line
    cost += 10 + 2 * (abs(to_x - x) + abs(to_y - y))
    cost += sum(150 for other in others if other.crosses(label.line))
    hull = Box(min(x, box.left), min(y, box.top), max(x, box.right), max(y, box.bottom))
    return _Candidate(label, hull, cost)


def _conflict(one: _Candidate, other: _Candidate) -> float:
    if not one.hull.meets(other.hull):
        return 0
    a, b = one.label, other.label
    cost = 100 * a.box.overlap(b.box)
    if a.line is not None:
        cost += 400 * b.box.crosses(a.line)
        cost += 150 * (b.line is not None and _cross(a.line, b.line))
    if b.line is not None:
        cost += 400 * a.box.crosses(b.line)
    return cost


def _cross(
    one: tuple[float, float, float, float], other: tuple[float, float, float, float]
) -> bool:
    def side(x: float, y: float, line: tuple[float, float, float, float]) -> bool:
        return (line[2] - line[0]) * (y - line[1]) > (line[3] - line[1]) * (x - line[0])

    return side(one[0], one[1], other) != side(one[2], one[3], other) and side(
        other[0], other[1], one
    ) != side(other[2], other[3], one)
