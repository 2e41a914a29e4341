"""The plot of `growth.py` and `many.py`: a panel for each cost, n on a logarithmic axis, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from xml.sax.saxutils import escape

from _svg import Box, marker, opening, width

_COLUMNS, _SIZE = 2, 13
_WIDTH, _TOP, _ROW = 960, 84, 230
# name of a curve → its marker, color on light and on dark pages
CURVES = {
    "adapterzoo": ("circle", "#0b66a8", "#6cb6f5"),
    "PEFT": ("square", "#6b7280", "#9aa2ad"),
    "Stack": ("circle", "#0b66a8", "#6cb6f5"),
    "Average": ("square", "#b04a06", "#f2a65a"),
    "Parallel": ("triangle", "#0a7554", "#4fd1a5"),
    "BatchSplit": ("diamond", "#8e3fa6", "#d69ceb"),
    "one row": ("circle", "#0b66a8", "#6cb6f5"),
    "four rows": ("square", "#b04a06", "#f2a65a"),
}


def plot(document: dict[str, Any], title: str = "How costs grow") -> str:
    """Return the plot of a report.

    Args:
        document: the report.
        title: of the plot.
    """
    panels = document["panels"]
    shared = [n for n in ("adapterzoo", "PEFT") if any(n in p["curves"] for p in panels.values())]
    height = _TOP + _ROW * math.ceil(len(panels) / _COLUMNS) + 8
    drawn = {name for panel in panels.values() for name in panel["curves"]}
    colors = {
        _class(name): (light, dark) for name, (_, light, dark) in CURVES.items() if name in drawn
    }
    parts = [
        opening(title, _WIDTH, height, colors),
        f'<text class="text title" x="24" y="36">{title}</text>',
        *_legend(shared, 24, 60),
    ]
    for number, (name, panel) in enumerate(panels.items()):
        parts += _panel(frame(number), name, panel)
    return "\n".join([*parts, "</svg>", ""])


def frame(number: int) -> Box:
    """Return where the curves of a panel are."""
    row, column = divmod(number, _COLUMNS)
    left, top = column * _WIDTH / _COLUMNS + 58, _TOP + row * _ROW + 40
    return Box(left, top, (column + 1) * _WIDTH / _COLUMNS - 24, top + _ROW - 78)


def position(box: Box, xs: list[float], top: float, x: float, y: float) -> tuple[float, float]:
    """Return where a point is: x on a logarithmic axis, y from 0 to `top`."""
    first, last = math.log(min(xs)), math.log(max(xs))
    across = (math.log(x) - first) / (last - first)
    return (
        round(box.left + 10 + across * (box.right - box.left - 20), 1),
        round(box.bottom - y / top * (box.bottom - box.top), 1),
    )


def ticks(highest: float) -> list[float]:
    """Return numbers from 0 to above the highest value, at most six."""
    power: float = 10.0 ** math.floor(math.log10(highest))
    step = next(s * power for s in (0.2, 0.5, 1, 2, 5) if highest / (s * power) <= 5)
    return [i * step for i in range(math.ceil(round(highest / step, 6)) + 1)]


def _panel(box: Box, name: str, panel: dict[str, Any]) -> Iterator[str]:
    curves = panel["curves"]
    points = [point for curve in curves.values() for point in curve]
    xs, values = sorted({x for x, _ in points}), ticks(max(y for _, y in points))
    yield f'<text class="text" x="{box.left - 34:g}" y="{box.top - 16:g}">{escape(name)}</text>'
    yield (
        f'<text class="muted" x="{box.right:g}" y="{box.top - 16:g}" '
        f'text-anchor="end">{escape(panel["unit"])}</text>'
    )
    for value in values:
        _, y = position(box, xs, values[-1], xs[0], value)
        yield f'<line class="grid" x1="{box.left:g}" y1="{y:g}" x2="{box.right:g}" y2="{y:g}"/>'
        yield (
            f'<text class="muted" x="{box.left - 8:g}" y="{y + 4:g}" '
            f'text-anchor="end">{value:g}</text>'
        )
    for x in _apart(box, xs, values[-1]):
        at, _ = position(box, xs, values[-1], x, 0)
        yield (
            f'<text class="muted" x="{at:g}" y="{box.bottom + 18:g}" '
            f'text-anchor="middle">{x:,.0f}</text>'
        )
    if set(curves) - {"adapterzoo", "PEFT"}:
        yield from _legend(list(curves), box.left + 12, box.top + 12)
    # ours last, on top
    for curve in reversed(curves):
        places = [position(box, xs, values[-1], x, y) for x, y in curves[curve]]
        line = " ".join(f"{x:g},{y:g}" for x, y in places)
        kind = _class(curve)
        yield f'<polyline class="{kind}-s" style="fill: none; stroke-width: 2" points="{line}"/>'
        yield from (marker(kind, CURVES[curve][0], x, y) for x, y in places)


def _apart(box: Box, xs: list[float], top: float) -> Iterator[float]:
    """Yield the numbers whose labels do not meet, from the right."""
    edge = math.inf
    for x in reversed(xs):
        at, _ = position(box, xs, top, x, 0)
        half = width(f"{x:,.0f}", _SIZE) / 2
        if at + half < edge - 8:
            edge = at - half
            yield x


def _legend(names: list[str], x: float, y: float) -> Iterator[str]:
    for name in names:
        yield marker(_class(name), CURVES[name][0], x + 4, y - 4)
        yield f'<text class="text" x="{x + 14:g}" y="{y:g}">{name}</text>'
        x += width(name, _SIZE) + 34


def _class(name: str) -> str:
    return name.replace(" ", "-")
