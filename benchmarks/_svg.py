"""SVG written by hand: the same figures give the same file anywhere.

One file is readable on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def opening(title: str, width: int, height: int, colors: Mapping[str, tuple[str, str]]) -> str:
    """Return the start of a file, up to the page.

    Args:
        title: of the image.
        width: of the image.
        height: of the image.
        colors: class → its color on light and on dark pages; `-s` is appended for strokes.
    """

    def rules(dark: bool) -> str:
        return " ".join(
            f".{name} {{ fill: {color[dark]} }} .{name}-s {{ stroke: {color[dark]} }}"
            for name, color in colors.items()
        )

    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}{rules(False)}\n"
        f"@media (prefers-color-scheme: dark) {{\n{_DARK}{rules(True)}\n}}\n</style>\n"
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
