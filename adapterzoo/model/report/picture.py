"""The heat map of a report: blocks × kinds of layers, ‖ΔW‖ / ‖W‖ as a shade.

It is readable without colors: larger changes have darker shades, and faults are labeled or hatched.
"""

from __future__ import annotations

import functools
import io
import math
import os
import textwrap
from pathlib import Path
from typing import Any

from adapterzoo.errors import ConfigError, StateError

from .sites import DEAD, LEFT_OUT, Cell, number

# inches
_COLUMN, _ROW, _LOW_ROW, _LINE, _LETTER = 1.0, 0.3, 0.12, 0.18, 0.078
_SCALE, _BAR = 1.2, 3.0
# with more rows than this, the cells have no text
_MOST = 64
# orders of magnitude that the shades cover, so that one change near zero does not use them all up
_DECADES = 2.5
_WIDEST = 14
_LIGHT, _DARK, _INK, _FAULT = "#ffffff", "#d9d9d9", "#1a1a1a", "#a31515"


def draw(report: Any, path: str | os.PathLike[str] | None) -> Any:
    """Return the figure; see `AdapterReport.plot`.

    Args:
        report: the report to draw.
        path: the file to write, or None.

    Raises:
        ConfigError: the path has no image suffix.
        StateError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise StateError("a heat map needs matplotlib. Write pip install matplotlib.") from error
    # the same bytes each time, with text that can be searched
    rules: Any = {"svg.hashsalt": "adapterzoo", "svg.fonttype": "none", "hatch.linewidth": 0.6}
    with mpl.rc_context({**rules, "font.size": 9}):
        figure = _figure(report, Figure, mpl)
        if path is not None:
            _write(figure, path)
    return displayed(figure)


def displayed(figure: Any) -> Any:
    """Return the figure; notebooks then show it whether or not pyplot has been imported.

    Args:
        figure: of matplotlib.
    """
    figure._repr_png_ = functools.partial(_png, figure)
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80, bbox_inches="tight")
    return file.getvalue()


def _write(figure: Any, path: str | os.PathLike[str]) -> None:
    ending = Path(path).suffix.lower()
    known = figure.canvas.get_supported_filetypes()
    if ending[1:] not in known:
        raise ConfigError(f"{os.fspath(path)!r} has no image suffix. Write 'report.svg'.")
    dated = {"metadata": {"Date": None}} if ending == ".svg" else {}
    figure.savefig(path, dpi=150, **dated)


def _figure(report: Any, make: Any, mpl: Any) -> Any:
    kinds, blocks = report.shown_kinds(), report.blocks if report.shown_kinds() else ()
    labels = [report._label(n) for n in range(len(blocks))]
    row = _ROW if len(blocks) <= _MOST else _LOW_ROW
    left = 0.25 + _LETTER * max(map(len, labels), default=0)
    wide = max(left + _COLUMN * len(kinds) + _SCALE, 6.5)
    letters = int(wide / _LETTER) - 4
    above = _wrapped(report.summary, letters)
    faults = [f"fault: {fault}" for fault in report.faults()]
    below = _wrapped([*_outside(report), *faults], letters)
    titles = [_title(kind) for kind in kinds]
    over = max((title.count("\n") + 1 for title in titles), default=0)
    tall, bottom = row * len(blocks), 0.5 + _LINE * len(below)
    whole = 0.3 + _LINE * (len(above) + over) + tall + bottom
    figure = make(figsize=(wide, whole), facecolor="white")

    def write(lines: list[str], y: float) -> None:
        for line in lines:
            color = _FAULT if line.startswith("fault: ") else _INK
            weight = "bold" if line is above[0] or color == _FAULT else "normal"
            figure.text(0.15 / wide, y / whole, line, va="top", color=color, weight=weight)
            y -= _LINE

    write(above, whole - 0.12)
    write(below, bottom - 0.42)
    columns, rows = max(len(kinds), 1), max(len(blocks), 1)
    box = left / wide, bottom / whole, _COLUMN * columns / wide, row * rows / whole
    axes = figure.add_axes(box)
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    axes.set_xticks([n + 0.5 for n in range(len(kinds))], titles)
    axes.set_yticks([n + 0.5 for n in range(len(blocks))], labels)
    axes.tick_params(axis="y", labelsize=9 if row == _ROW else 6)
    axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    shades = _Shades(report, mpl)
    for number_, kind, cell in report.cells():
        if kind in kinds:
            at = kinds.index(kind), number_
            misses = kind in report.kinds or number_ in report.blocks_left_out
            _draw_cell(axes, mpl, at, cell, misses, shades, row == _ROW)
    for number_ in range(1, len(blocks)):
        if blocks[number_].stack != blocks[number_ - 1].stack:
            axes.axhline(number_, color=_INK, linewidth=1.2)
    if shades.norm is not None:
        high = min(tall, _BAR)
        box = 1 - 0.85 / wide, (bottom + tall - high) / whole, 0.16 / wide, high / whole
        bar = figure.add_axes(box)
        mapped = mpl.cm.ScalarMappable(norm=shades.norm, cmap=shades.map)
        steps = [shades.norm.inverse(step / 3) for step in range(4)]
        figure.colorbar(mapped, cax=bar).set_ticks(steps, labels=map(number, steps))
        bar.minorticks_off()
        bar.set_title("‖ΔW‖ / ‖W‖", fontsize=9, pad=10)
    if kinds:
        _draw_legend(axes, mpl, report, row * len(blocks))
    return figure


class _Shades:
    """The mapping from relative changes to shades, on a logarithmic scale.

    Attributes:
        map: the color map, from light to dark in print too.
        norm: maps changes to 0 … 1; None if no change is known.
    """

    def __init__(self, report: Any, mpl: Any) -> None:
        found = [cell.relative for _, _, cell in report.cells()]
        values = [v for v in found if v and math.isfinite(v)]
        # changes larger than the weight all have the darkest shade
        top = min(max(values, default=0.0), 1.0)
        self.map = mpl.colormaps["viridis_r"]
        self.norm = None
        if values:
            low = max(min(min(values), top / 10), top / 10**_DECADES)
            self.norm = mpl.colors.LogNorm(low, top, clip=True)

    def of(self, relative: float) -> Any:
        """Return the color of a change."""
        if self.norm is None or not relative:
            return _LIGHT
        return self.map(float(self.norm(min(relative, self.norm.vmax))))


def _draw_cell(
    axes: Any, mpl: Any, at: tuple[int, int], cell: Cell, misses: bool, shades: _Shades,
    has_room: bool,
) -> None:  # fmt: skip
    color, hatch, text, edge = _LIGHT, "", str(cell), _DARK
    relative, weight = cell.relative, "normal"
    if not cell.sites:
        hatch, text = ("////", LEFT_OUT) if misses else ("", "–")
    elif relative is None:
        color = _DARK
    elif math.isfinite(relative):
        color = shades.of(relative)
    is_wrong = cell.is_dead or "NaN" in text or (relative is not None and relative > 1.0)
    if cell.is_dead:
        hatch, text = "xxxx", DEAD if len(cell.sites) == 1 else text
    if is_wrong:
        weight, edge = "bold", _FAULT
    box = mpl.patches.Rectangle(
        at, 1, 1, facecolor=color, edgecolor=edge, hatch=hatch, linewidth=2.0 if is_wrong else 0.8,
        zorder=3 if is_wrong else 2,
    )  # fmt: skip
    axes.add_patch(box)
    if not has_room:
        return
    dark = mpl.colors.rgb_to_hsv(mpl.colors.to_rgb(color))[2] < 0.62
    behind = {"facecolor": _LIGHT, "edgecolor": "none", "pad": 1.5} if hatch else None
    ink = _LIGHT if dark and not hatch else _FAULT if is_wrong else _INK
    axes.text(
        at[0] + 0.5, at[1] + 0.53, text, ha="center", va="center", color=ink, weight=weight,
        fontsize=8, bbox=behind, zorder=4,
    )  # fmt: skip


def _draw_legend(axes: Any, mpl: Any, report: Any, tall: float) -> None:
    patch = mpl.patches.Patch
    shown = [patch(facecolor=_LIGHT, edgecolor=_DARK, label="not chosen")]
    if report.left_out or report.blocks_left_out:
        shown.append(patch(facecolor=_LIGHT, edgecolor=_DARK, hatch="////", label=LEFT_OUT))
    if report.dead:
        label = "dead: no gradient"
        shown.append(patch(facecolor=_LIGHT, edgecolor=_FAULT, hatch="xxxx", label=label))
    shown.append(patch(facecolor=_LIGHT, edgecolor=_LIGHT, label="blank: no such layer"))
    axes.legend(
        handles=shown, loc="upper left", bbox_to_anchor=(0.0, -0.05 / tall), ncols=len(shown),
        frameon=False, borderaxespad=0.0, fontsize=8,
    )  # fmt: skip


def _title(kind: str) -> str:
    """Return the title of a column, broken into lines that fit."""
    lines = kind.replace(".", ".\n").replace(" ", "\n").split("\n")
    broken = (textwrap.wrap(line.replace("_", "_ "), _WIDEST) for line in lines)
    return "\n".join(part.replace("_ ", "_") for parts in broken for part in parts)


def _outside(report: Any) -> list[str]:
    sites = [site for site in report.sites if site.block < 0][:6]
    return [f"outside blocks: {site.path or site.kind} {Cell((site,), 1)}" for site in sites]


def _wrapped(lines: Any, letters: int) -> list[str]:
    return [
        part for line in lines for part in textwrap.wrap(line, letters, subsequent_indent="      ")
    ]
