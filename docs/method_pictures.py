"""Draws the picture of each page in methods/: frozen parts grey, trained ones in colour.

    python docs/method_pictures.py     writes docs/_static/methods/*.svg

One file is readable on light and on dark pages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from _svg import opening  # noqa: E402

STATIC = ROOT / "docs" / "_static" / "methods"
WIDTH = 600
# kind → fill and line on light pages, fill and line on dark pages
KINDS = {
    "frozen": ("#e6e9ed", "#8b949e", "#2b313a", "#8b949e"),
    "trained": ("#cfe4f7", "#0b66a8", "#173f5f", "#6cb6f5"),
    "own": ("#fadfc8", "#b04a06", "#54300f", "#f2a65a"),
    "plain": ("#ffffff", "#8b949e", "#14171c", "#8b949e"),
}
_COLORS = {"flow": ("#4f5661", "#b6bcc6")}
_STYLE = """\
text { font-size: 14px } .small { font-size: 12px } .m { font-style: italic }
.way { fill: none; stroke-width: 1.5 } .random { stroke-dasharray: 4 3 }
"""
_SUB = re.compile(r"_\{([^}]*)\}")

Points = Sequence[tuple[float, float]]


def _text(label: str) -> str:
    """Return a label with its subscripts, `d_{in}`, lowered."""
    lowered = r'<tspan dy="3.5" font-size="11">\1</tspan><tspan dy="-3.5">\u200b</tspan>'
    return _SUB.sub(lowered.replace("\\u200b", "\u200b"), label)


class Picture:
    """An image that is drawn from left to right."""

    def __init__(self, title: str, height: int, legend: str = "frozen trained") -> None:
        """Begin with the page and its legend.

        Args:
            title: of the image, for readers who do not see it.
            height: of the image, with the legend.
            legend: kinds to explain, in their order.
        """
        self.height = height
        light, dark = (
            "".join(
                f".{k} {{ fill: {v[i]}; stroke: {v[i + 1]}; stroke-width: 1.5 }}\n"
                for k, v in KINDS.items()
            )
            for i in (0, 2)
        )
        self.parts = [opening(title, WIDTH, height, _COLORS, (_STYLE + light, dark))]
        names = {
            "frozen": "frozen", "trained": "trained", "own": "trained, of each task",
            "random": "random and frozen", "gate": "gate, trained",
        }  # fmt: skip
        shown = {"random": "frozen random", "gate": "own"}
        x = 24.0
        for kind in legend.split():
            self.parts.append(
                f'<rect class="{shown.get(kind, kind)}" x="{x:g}" y="{height - 26}" width="14" '
                f'height="12" rx="2"/>'
            )
            self.text(x + 21, height - 15, names[kind], "start", "muted small")
            x += 40 + 7 * len(names[kind])

    def text(
        self, x: float, y: float, label: str, anchor: str = "middle", style: str = "text"
    ) -> None:
        """Write a label at its base line; `style` is a list of classes."""
        self.parts.append(
            f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
            f"{_text(label)}</text>"
        )

    def box(
        self, x: float, y: float, w: float, h: float, kind: str, label: str = "", below: str = "",
        style: str = "text m",
    ) -> None:  # fmt: skip
        """Draw a box, with a label in it and a smaller one below that."""
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4"/>'
        )
        middle = y + h / 2 + 5
        if label:
            self.text(x + w / 2, middle - (8 if below else 0), label, style=style)
        if below:
            self.text(x + w / 2, middle + 10, below, style="muted small")

    def funnel(
        self, x: float, y: float, w: float, left: float, right: float, kind: str, label: str,
        below: str = "",
    ) -> None:  # fmt: skip
        """Draw a matrix that changes the width of the features: around `y`, `left` to `right`."""
        self.parts.append(
            f'<path class="{kind}" stroke-linejoin="round" d="M{x:g} {y - left / 2:g}L{x + w:g} '
            f'{y - right / 2:g}V{y + right / 2:g}L{x:g} {y + left / 2:g}z"/>'
        )
        self.text(x + w / 2, y + 5, label, style="text m")
        if below:
            self.text(x + w / 2, y + max(left, right) / 2 + 16, below, style="muted small")

    def flow(self, *points: tuple[float, float], head: bool = True) -> None:
        """Draw a line through points, with a head at the last one."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        ends = [*points[:-1], (x - 6 * dx, y - 6 * dy) if head else (x, y)]
        path = "L".join(f"{px:g} {py:g}" for px, py in ends)
        self.parts.append(f'<path class="way flow-s" d="M{path}"/>')
        if head:
            a, b = (
                (x - 8 * dx - 4.5 * dy, y - 8 * dy - 4.5 * dx),
                (
                    x - 8 * dx + 4.5 * dy,
                    y - 8 * dy + 4.5 * dx,
                ),
            )
            self.parts.append(
                f'<path class="flow" d="M{x:g} {y:g}L{a[0]:g} {a[1]:g}L{b[0]:g} {b[1]:g}z"/>'
            )

    def node(self, x: float, y: float, symbol: str) -> None:
        """Draw an operation between two flows."""
        self.parts.append(f'<circle class="plain" cx="{x:g}" cy="{y:g}" r="11"/>')
        self.text(x, y + 5, symbol)

    def cells(
        self, x: float, y: float, kinds: Sequence[str], w: float, h: float, down: bool = False
    ) -> None:
        """Draw a row or a column of cells."""
        for i, kind in enumerate(kinds):
            at = (x, y + i * h) if down else (x + i * w, y)
            self.parts.append(
                f'<rect class="{kind}" x="{at[0]:g}" y="{at[1]:g}" width="{w:g}" height="{h:g}"/>'
            )

    def finish(self) -> str:
        """Return the file."""
        return "\n".join([*self.parts, "</svg>", ""])


PICTURES: dict[str, Callable[[], Picture]] = {}


def picture(draw: Callable[[], Picture]) -> Callable[[], Picture]:
    """Register the picture of the page of this name."""
    PICTURES[draw.__name__] = draw
    return draw


D_IN, D_OUT = "d_{in}", "d_{out}"
SHAPE = f"{D_OUT} × {D_IN}"


def layer(p: Picture, plus: float = 480, down: float = 168, to: float = 116) -> None:
    """Draw the frozen layer above, and the way of its input to a branch below."""
    p.text(36, 75, "x", style="text m")
    p.flow((48, 70), (190, 70))
    p.box(190, 36, 150, 68, "frozen", "W", SHAPE)
    p.flow((340, 70), (plus - 11, 70))
    p.node(plus, 70, "+")
    p.flow((84, 70), (84, down), (to, down))
    p.text(570, 75, "y", style="text m")


def low_rank(p: Picture, plus: float, y: float = 168) -> None:
    """Draw A and B, and the way back to the sum."""
    p.funnel(116, y, 96, 80, 34, "trained", "A", f"r × {D_IN}")
    p.flow((212, y), (252, y))
    p.funnel(252, y, 96, 34, 80, "trained", "B", f"{D_OUT} × r")
    p.flow((348, y), (393, y))
    p.node(404, y, "s")
    p.flow((415, y), (plus, y), (plus, 81))


def magnitude(p: Picture, update: str) -> None:
    """Draw the magnitudes behind the sum."""
    p.flow((461, 70), (509, 70))
    p.node(520, 70, "×")
    p.flow((531, 70), (560, 70))
    p.box(494, 118, 52, 40, "trained", "m", "")
    p.text(522, 178, f"m / ‖W + {update}‖", style="muted small")
    p.flow((520, 118), (520, 81))


@picture
def lora() -> Picture:
    """Two thin matrices beside the weight."""
    p = Picture("LoRA: y = W x + s B A x", 260)
    layer(p)
    low_rank(p, 480)
    p.flow((491, 70), (560, 70))
    return p


@picture
def dora() -> Picture:
    """LoRA, and a magnitude for each row."""
    p = Picture("DoRA: y = m / ‖W + s B A‖ · (W x + s B A x)", 260)
    layer(p, 450)
    low_rank(p, 450)
    magnitude(p, "s B A")
    return p


def diagonal(p: Picture, x: float, y: float, size: float, places: Sequence[int]) -> None:
    """Draw a matrix of blocks: block i is in column `places[i]`."""
    part = size / len(places)
    p.parts.append(
        f'<rect class="plain" x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" rx="2"/>'
    )
    for row, column in enumerate(places):
        p.parts.append(
            f'<rect class="trained" x="{x + column * part + 1:g}" y="{y + row * part + 1:g}" '
            f'width="{part - 2:g}" height="{part - 2:g}" rx="1"/>'
        )


@picture
def boft() -> Picture:
    """Factors of rotations before the weight."""
    p = Picture("BOFT: y = σ ⊙ (W Rᵀ x) + b with R a product of block rotations", 220)
    p.text(28, 95, "x", style="text m")
    p.flow((38, 90), (62, 90))
    diagonal(p, 62, 46, 88, (0, 1, 2, 3))
    p.text(106, 154, "M_{0}", style="text m")
    p.flow((150, 90), (180, 90))
    # a butterfly: the same blocks, of features that are further apart
    p.parts.append('<rect class="plain" x="180" y="46" width="88" height="88" rx="2"/>')
    for row in range(8):
        for column in ((row % 4), (row % 4) + 4):
            p.parts.append(
                f'<rect class="trained" x="{181 + 11 * column}" y="{47 + 11 * row}" width="9" '
                f'height="9"/>'
            )
    p.text(224, 154, "M_{1}", style="text m")
    p.text(165, 176, "rotations of blocks of b features", style="muted small")
    p.flow((268, 90), (306, 90))
    p.box(306, 56, 130, 68, "frozen", "W", SHAPE)
    p.flow((436, 90), (479, 90))
    p.node(490, 90, "×")
    p.flow((501, 90), (556, 90))
    p.box(450, 136, 80, 40, "trained", "σ", "")
    p.flow((490, 136), (490, 101))
    p.text(568, 95, "y", style="text m")
    return p


@picture
def oft() -> Picture:
    """Blocks of rotations before the weight."""
    p = Picture("OFT: y = W Qᵀ x + b with Q a block-diagonal rotation", 210)
    p.text(40, 95, "x", style="text m")
    p.flow((52, 90), (120, 90))
    diagonal(p, 120, 40, 100, (0, 1, 2, 3))
    p.text(170, 162, "Q = diag(Q_{1}, Q_{2}, …), rotations of b features", style="muted small")
    p.flow((220, 90), (330, 90))
    p.box(330, 56, 150, 68, "frozen", "W", SHAPE)
    p.flow((480, 90), (552, 90))
    p.text(566, 95, "y", style="text m")
    return p


@picture
def miss() -> Picture:
    """The sum of shards through one matrix."""
    p = Picture("MiSS: y = W x + Dᵀ Σ x_k", 270)
    layer(p)
    p.cells(116, 122, ["plain"] * 4, 22, 23, down=True)
    for i in range(4):
        p.text(127, 138 + 23 * i, f"x_{{{i + 1}}}", style="text m small")
        p.flow((138, 133.5 + 23 * i), (190, 168), head=False)
    p.text(127, 232, "shards of r features", style="muted small")
    p.node(201, 168, "Σ")
    p.flow((212, 168), (262, 168))
    p.funnel(262, 168, 110, 40, 84, "trained", "D", f"r × {D_OUT}")
    p.flow((372, 168), (480, 168), (480, 81))
    p.flow((491, 70), (560, 70))
    return p


def projections(p: Picture, plus: float) -> None:
    """Draw VeRA's random matrices with a vector behind each."""
    p.funnel(116, 168, 80, 80, 48, "frozen random", "A", f"r × {D_IN}")
    p.flow((196, 168), (217, 168))
    p.node(228, 168, "×")
    p.flow((239, 168), (264, 168))
    p.funnel(264, 168, 80, 48, 80, "frozen random", "B", f"{D_OUT} × r")
    p.flow((344, 168), (369, 168))
    p.node(380, 168, "×")
    p.flow((391, 168), (plus, 168), (plus, 81))
    for x, name, size in ((228, "Λ_{d}", "r"), (380, "Λ_{b}", D_OUT)):
        p.box(x - 24, 208, 48, 28, "trained", name)
        p.text(x + 30, 227, size, "start", "muted small")
        p.flow((x, 208), (x, 179))


@picture
def vera() -> Picture:
    """Vectors around random matrices."""
    p = Picture("VeRA: y = W x + Λ_{b} B Λ_{d} A x", 286, "frozen random trained")
    layer(p)
    projections(p, 480)
    p.flow((491, 70), (560, 70))
    p.text(492, 220, "all layers", "start", "muted small")
    p.text(492, 236, "share A and B", "start", "muted small")
    return p


@picture
def dvora() -> Picture:
    """VeRA, and a magnitude for each row."""
    p = Picture("DVoRA: VeRA's update, and a magnitude for each row", 286, "frozen random trained")
    layer(p, 450)
    projections(p, 450)
    magnitude(p, "Λ_{b} B Λ_{d} A")
    return p


def product(p: Picture, x: float, y: float, names: tuple[str, str], kind: str = "trained") -> None:
    """Draw a thin column times a flat row, 108 wide, around `y`."""
    p.box(x, y - 40, 26, 80, kind)
    p.box(x + 32, y - 40, 76, 26, kind)
    p.text(x + 13, y + 58, names[0], style="text m")
    p.text(x + 70, y + 4, names[1], style="text m")


@picture
def loha() -> Picture:
    """The entrywise product of two low-rank matrices."""
    p = Picture("LoHa: W' = W + s (W1a W1b) ⊙ (W2a W2b)", 210)
    p.text(24, 90, "W′ =", "start", "text m")
    p.box(66, 45, 80, 80, "frozen", "W")
    p.text(106, 143, SHAPE, style="muted small")
    p.text(166, 90, "+")
    p.text(186, 90, "s", style="text m")
    p.text(206, 97, "(", style="text")
    product(p, 222, 85, ("W_{1a}", "W_{1b}"))
    p.node(360, 85, "⊙")
    product(p, 400, 85, ("W_{2a}", "W_{2b}"))
    p.text(520, 97, ")", style="text")
    p.text(366, 30, "rank r each, rank r² together", style="muted small")
    return p


@picture
def lokr() -> Picture:
    """The Kronecker product of two small matrices."""
    p = Picture("LoKr: W' = W + s W1 ⊗ W2", 220)
    p.text(24, 95, "W′ =", "start", "text m")
    p.box(66, 45, 90, 90, "frozen", "W")
    p.text(111, 153, SHAPE, style="muted small")
    p.text(174, 95, "+")
    p.text(194, 95, "s", style="text m")
    p.box(216, 72, 36, 36, "trained", "W_{1}")
    p.text(234, 126, "p × m", style="muted small")
    p.node(278, 90, "⊗")
    p.box(304, 60, 20, 60, "trained")
    p.box(330, 60, 56, 20, "trained")
    p.text(345, 138, "W_{2} of rank r, q × n", style="muted small")
    p.text(412, 95, "=")
    for row in range(3):
        for column in range(3):
            shade = (0.95, 0.45, 0.7, 0.3, 0.8, 0.55, 0.65, 0.35, 0.9)[3 * row + column]
            p.parts.append(
                f'<rect class="trained" fill-opacity="{shade}" x="{440 + 30 * column}" '
                f'y="{45 + 30 * row}" width="30" height="30"/>'
            )
    p.text(485, 153, "each tile is W_{2}", style="muted small")
    p.text(485, 168, "times a number of W_{1}", style="muted small")
    return p


@picture
def mtl_lora() -> Picture:
    """Shared matrices, and a small one for each task."""
    p = Picture("MTL-LoRA: y = W x + s Σ softmax(w)_j B_j Λ A x", 300, "frozen trained own")
    y = 180
    layer(p, down=y, to=104)
    p.funnel(104, y, 80, 80, 34, "trained", "A", f"r × {D_IN}")
    p.flow((184, y), (208, y))
    p.box(208, y - 22, 44, 44, "own", "Λ")
    p.text(230, y + 40, "r", style="muted small m")
    for i, dy in enumerate((-48, 0, 48)):
        p.flow((252, y), (274, y), (274, y + dy), (292, y + dy))
        p.funnel(292, y + dy, 66, 24, 42, "trained", f"B_{{{i + 1}}}")
        p.flow((358, y + dy), (388, y + dy), (410, y), head=False)
    p.node(420, y, "Σ")
    p.flow((431, y), (480, y), (480, 81))
    p.box(430, y + 36, 52, 30, "own", "w")
    p.flow((420, y + 51), (420, y + 11))
    p.flow((430, y + 51), (420, y + 51), head=False)
    p.flow((491, 70), (560, 70))
    p.text(500, y + 56, "softmax(w / τ)", "start", "muted small")
    return p


@picture
def ia3() -> Picture:
    """Vectors that scale features."""
    p = Picture("(IA)³: keys, values and inner features times a vector", 306)
    for y, first, vector, name in (
        (48, "W_{K}", "ℓ_{k}", "keys"),
        (128, "W_{V}", "ℓ_{v}", "values"),
        (208, "W_{1}", "ℓ_{ff}", "feed-forward part"),
    ):
        p.text(30, y + 5, "x", style="text m")
        p.flow((42, y), (80, y))
        p.box(80, y - 22, 84, 44, "frozen", first)
        p.box(226, y + 26, 56, 28, "trained", vector)
        p.flow((254, y + 26), (254, y + 11))
        if first == "W_{1}":
            p.flow((164, y), (191, y))
            p.node(202, y, "φ")
            p.flow((213, y), (243, y))
            p.flow((265, y), (316, y))
            p.box(316, y - 22, 84, 44, "frozen", "W_{2}")
            p.flow((400, y), (436, y))
        else:
            p.flow((164, y), (243, y))
            p.flow((265, y), (436, y))
        p.node(254, y, "×")
        p.text(446, y + 5, name, "start", "text")
    return p


@picture
def ln_tuning() -> Picture:
    """The gain and bias of a norm."""
    p = Picture("LN tuning: the gain and the bias of each norm are the adapter's own", 190)
    p.text(36, 85, "x", style="text m")
    p.flow((48, 80), (110, 80))
    p.box(110, 52, 130, 56, "frozen", "normalize", "mean 0, deviation 1", "text")
    p.flow((240, 80), (319, 80))
    p.node(330, 80, "×")
    p.flow((341, 80), (419, 80))
    p.node(430, 80, "+")
    p.flow((441, 80), (540, 80))
    p.text(556, 85, "y", style="text m")
    for x, name in ((330, "γ′"), (430, "β′")):
        p.box(x - 30, 118, 60, 32, "trained", name)
        p.flow((x, 118), (x, 91))
    return p


def bottleneck_at(p: Picture, x: float, y: float, name: str = "f") -> None:
    """Draw a bottleneck, 60 wide and 34 high, for a flow upward: down and up again."""
    p.parts.append(
        f'<path class="trained" stroke-linejoin="round" d="M{x:g} {y + 34:g}L{x + 16:g} {y + 17:g}'
        f'L{x:g} {y:g}H{x + 60:g}L{x + 44:g} {y + 17:g}L{x + 60:g} {y + 34:g}z"/>'
    )
    p.text(x + 30, y + 22, name, style="text m")


def block(p: Picture, x: float, part: str, at: Sequence[str]) -> None:
    """Draw a block from below to above, 120 wide: attention and a feed-forward part.

    Args:
        p: the picture.
        x: the left end.
        part: what the feed-forward part is called.
        at: what bottlenecks follow.
    """
    c = x + 60
    p.flow((c, 376), (c, 348))
    p.box(x + 8, 310, 104, 38, "frozen", "attention", style="text")
    for name, y, end in (("attention", 258, 214), ("feed-forward", 124, 52)):
        if name in at:
            p.flow((c, y + 52), (c, y + 34))
            bottleneck_at(p, c - 30, y)
            p.flow((c, y), (c, y - 14), head=False)
            p.flow((c, y + 43), (c + 44, y + 43), (c + 44, y - 14), (c + 11, y - 14))
            p.flow((c, y - 25), (c, end))
            p.node(c, y - 14, "+")
        else:
            p.flow((c, y + 52), (c, end))
    p.box(x + 8, 176, 104, 38, "frozen", part, style="text")


def parallel(p: Picture, x: float) -> None:
    """Draw a block with a bottleneck beside its feed-forward part."""
    c = x + 60
    p.flow((c, 376), (c, 348))
    p.box(x + 8, 310, 104, 38, "frozen", "attention", style="text")
    p.flow((c, 310), (c, 256), head=False)
    p.flow((c, 256), (x + 22, 256), (x + 22, 214))
    p.flow((c, 256), (x + 98, 256), (x + 98, 212))
    p.box(x - 10, 176, 64, 38, "frozen", "FFN", style="text")
    bottleneck_at(p, x + 68, 178)
    p.flow((x + 22, 176), (x + 22, 110), (c - 11, 110))
    p.flow((x + 98, 178), (x + 98, 110), (c + 11, 110))
    p.flow((c, 99), (c, 52))
    p.node(c, 110, "+")


@picture
def bottleneck() -> Picture:
    """Where the bottlenecks of each name are in a block."""
    p = Picture("Bottlenecks: where they are in a block", 420)
    for i, (name, at) in enumerate(
        (
            ("seq_bn", ("feed-forward",)),
            ("double_seq_bn", ("attention", "feed-forward")),
            ("par_bn", ()),
            ("adapter_plus", ("feed-forward",)),
        )
    ):
        x = 22 + 144 * i
        p.text(x + 60, 32, name, style="text")
        if at:
            block(p, x, "feed-forward", at)
        else:
            parallel(p, x)
    p.text(580, 405, "norms and the block's own additions are left out", "end", "muted small")
    return p


@picture
def invertible() -> Picture:
    """A function of halves, and its inverse."""
    p = Picture("Invertible bottlenecks: F and G at the embeddings, the inverse at the head", 250)
    p.text(22, 84, "x_{1}", "start", "text m")
    p.text(22, 164, "x_{2}", "start", "text m")
    p.flow((42, 80), (99, 80))
    p.node(110, 80, "+")
    p.flow((121, 80), (222, 80))
    p.flow((42, 160), (159, 160))
    p.node(170, 160, "+")
    p.flow((181, 160), (222, 160))
    p.box(94, 104, 32, 30, "trained", "F")
    p.flow((110, 160), (110, 134))
    p.flow((110, 104), (110, 91))
    p.box(154, 104, 32, 30, "trained", "G")
    p.flow((170, 80), (170, 104))
    p.flow((170, 134), (170, 149))
    p.text(110, 200, "embeddings", style="muted small")
    p.box(222, 56, 126, 128, "frozen")
    p.text(285, 104, "blocks", style="text")
    p.text(285, 124, "with", style="text")
    bottleneck_at(p, 255, 136)
    x = 348
    p.flow((x, 80), (x + 91, 80))
    p.node(x + 102, 80, "−")
    p.flow((x + 113, 80), (x + 150, 80))
    p.flow((x, 160), (x + 31, 160))
    p.node(x + 42, 160, "−")
    p.flow((x + 53, 160), (x + 150, 160))
    p.box(x + 26, 104, 32, 30, "trained", "G")
    p.flow((x + 42, 80), (x + 42, 104))
    p.flow((x + 42, 134), (x + 42, 149))
    p.box(x + 86, 104, 32, 30, "trained", "F")
    p.flow((x + 102, 160), (x + 102, 134))
    p.flow((x + 102, 104), (x + 102, 91))
    p.text(x + 72, 200, "the inverse", style="muted small")
    p.box(498, 56, 90, 128, "frozen")
    p.text(543, 115, "language", style="text small")
    p.text(543, 131, "modeling head", style="text small")
    return p


@picture
def compacter() -> Picture:
    """A bottleneck whose matrices are sums of Kronecker products."""
    p = Picture("Compacter: both matrices of a bottleneck are sums of Kronecker products", 280)
    p.text(36, 65, "x", style="text m")
    p.flow((48, 60), (150, 60))
    p.funnel(150, 60, 90, 64, 26, "trained", "H_{down}")
    p.flow((240, 60), (275, 60))
    p.node(286, 60, "φ")
    p.flow((297, 60), (332, 60))
    p.funnel(332, 60, 90, 26, 64, "trained", "H_{up}")
    p.flow((422, 60), (479, 60))
    p.node(490, 60, "+")
    p.flow((501, 60), (552, 60))
    p.flow((84, 60), (84, 16), (490, 16), (490, 49))
    p.text(60, 183, "H", style="text m")
    p.text(84, 183, "=")
    x = 104.0
    for i, end in ((1, "+"), (2, "+ …")):
        p.box(x, 162, 32, 32, "trained", f"R_{{{i}}}")
        p.text(x + 46, 183, "⊗")
        p.box(x + 62, 146, 16, 64, "trained")
        p.box(x + 84, 146, 54, 16, "trained")
        p.text(x + 70, 226, f"L_{{{i}}}", style="text m")
        p.text(x + 111, 180, f"T_{{{i}}}", style="text m")
        p.text(x + 160, 183, end)
        x += 180
    p.text(x + 20, 176, "n products;", "start", "muted small")
    p.text(x + 20, 192, "all layers share R", "start", "muted small")
    return p


@picture
def reft() -> Picture:
    """A few tokens are edited."""
    p = Picture("ReFT: the hidden states of the first tokens are edited after a block", 260)
    p.box(316, 160, 264, 38, "frozen", "block", style="text")
    for i in range(7):
        x = 322 + 37 * i
        p.flow((x + 15, 160), (x + 15, 120))
        p.cells(x, 52, ["trained" if i < 3 else "frozen"], 30, 68)
        p.flow((x + 15, 52), (x + 15, 24))
    p.text(374, 217, "first tokens", style="muted small")
    p.box(20, 60, 216, 52, "plain", "h + Rᵀ (A h + a − R h)")
    p.flow((236, 86), (322, 86))
    p.text(278, 78, "new h", style="muted small")
    p.box(32, 140, 84, 34, "trained", "A, a")
    p.box(140, 140, 84, 34, "trained", "R")
    p.text(74, 192, "r × d, r", style="muted small")
    p.text(182, 192, "r × d", style="muted small")
    p.flow((74, 140), (74, 112))
    p.flow((182, 140), (182, 112))
    return p


def attention(p: Picture, x: float, y: float, prefix: int, tokens: int, size: float = 26) -> None:
    """Draw the keys and values of an attention, those of a prefix first."""
    for name, dy in (("K", 0), ("V", 44)):
        p.text(x, y + dy + 18, name, "end", "text m")
        p.cells(x + 8, y + dy, ["trained"] * prefix, size, size)
        p.cells(x + 12 + size * prefix, y + dy, ["frozen"] * tokens, size, size)


@picture
def prefix_tuning() -> Picture:
    """Keys and values before those of the tokens."""
    p = Picture("Prefix tuning: trained keys and values before those of the tokens", 250)
    attention(p, 250, 62, 4, 5, 32)
    p.text(322, 48, "prefix", style="muted small")
    p.text(470, 48, "of the tokens", style="muted small")
    p.box(30, 30, 80, 36, "trained", "E")
    p.box(30, 98, 80, 40, "trained", "MLP", style="text")
    p.text(70, 156, "none if flat", style="muted small")
    p.flow((70, 66), (70, 98))
    p.flow((110, 122), (228, 122))
    p.flow((170, 122), (170, 78), (228, 78))
    p.text(142, 114, "T", style="text m")
    p.box(366, 178, 74, 34, "frozen", "query", style="text")
    p.flow((403, 178), (403, 140))
    p.text(452, 200, "attends to all of them", "start", "muted small")
    return p


@picture
def prompt_tuning() -> Picture:
    """Rows before the embedded tokens."""
    p = Picture("Prompt tuning: trained rows before the embedded tokens", 250)
    p.box(60, 40, 480, 54, "frozen", "the whole model", style="text")
    for i in range(9):
        x = 72 + 52 * i
        kind = "trained" if i < 3 else "frozen"
        p.cells(x, 132, [kind], 40, 54)
        p.flow((x + 20, 132), (x + 20, 94))
        p.text(x + 20, 164, f"E_{{{i + 1}}}" if i < 3 else f"x_{{{i - 3}}}", style="text m")
    p.text(144, 206, "P trained rows", style="muted small")
    p.text(378, 206, "embedded tokens", style="muted small")
    return p


@picture
def mam() -> Picture:
    """A prefix and a parallel bottleneck in one block."""
    p = Picture("MAM: a prefix at attention, a bottleneck beside the feed-forward part", 420)
    parallel(p, 110)
    attention(p, 322, 294, 3, 4, 28)
    p.flow((300, 329), (222, 329))
    p.text(372, 284, "prefix", style="muted small")
    p.text(472, 284, "of the tokens", style="muted small")
    p.text(254, 200, "wide bottleneck", "start", "muted small")
    return p


@picture
def unipelt() -> Picture:
    """Three methods with a gate each."""
    p = Picture(
        "UniPELT: a prefix, LoRA and a bottleneck, each with a gate", 366, "frozen trained gate"
    )
    c = 120
    p.flow((c, 314), (c, 290))
    p.box(60, 190, 120, 100, "frozen", "attention", style="text")
    p.flow((c, 190), (c, 168))
    p.box(60, 130, 120, 38, "frozen", "feed-forward", style="text")
    p.flow((c, 130), (c, 91))
    p.flow((c, 69), (c, 30))
    p.node(c, 80, "+")
    for y, end, name, what in (
        (80, c + 11, "g_{1}", "bottleneck"),
        (214, 180, "g_{2}", "LoRA at query and value"),
        (266, 180, "g_{3}", "prefix: keys and values"),
    ):
        p.box(330, y - 17, 210, 34, "trained", what, style="text")
        p.flow((330, y), (281, y))
        p.node(270, y, "×")
        p.flow((259, y), (end, y))
        below = name == "g_{3}"
        p.box(251, y + 25 if below else y - 53, 38, 28, "own", name)
        p.flow((270, y + 25 if below else y - 25), (270, y + 11 if below else y - 11))
    return p


@picture
def trainable_tokens() -> Picture:
    """Rows of the table of tokens."""
    p = Picture("Trainable tokens: some rows of the table are the adapter's own", 270)
    for i in range(8):
        own = i in (3, 6)
        y = 40 + 22 * i
        p.cells(250, y, ["trained" if own else "frozen"], 150, 22)
        if own:
            p.text(325, y + 16, f"R_{{{1 if i == 3 else 2}}}", style="text m small")
    p.text(325, 28, "table of tokens, vocabulary × d", style="muted small")
    for y, name, row in ((73, "the", 1), (117, "<tool>", 3), (183, "</tool>", 6)):
        shown = name.replace("<", "&lt;").replace(">", "&gt;")
        p.text(120, y + 5, shown, "end", "text")
        p.flow((130, y), (170, y), (170, 51 + 22 * row), (250, 51 + 22 * row))
        p.flow((400, 51 + 22 * row), (470, 51 + 22 * row))
    p.text(480, 117 + 28, "embedded", "start", "muted small")
    p.text(480, 117 + 44, "tokens", "start", "muted small")
    return p


@picture
def fusion() -> Picture:
    """Attention over the outputs of bottlenecks."""
    p = Picture("AdapterFusion: attention over the outputs of trained bottlenecks", 340)
    p.text(30, 165, "x", style="text m")
    p.flow((42, 160), (72, 160), head=False)
    for y, i in ((64, 1), (160, 2), (256, 3)):
        p.flow((72, 160), (72, y), (112, y))
        p.funnel(112, y, 34, 44, 16, "frozen", "")
        p.funnel(146, y, 34, 16, 44, "frozen", "")
        p.text(146, y + 40, f"f_{{{i}}}", style="text m small")
        p.flow((180, y), (236, y), head=False)
        p.text(208, y - 8, f"z_{{{i}}}", style="text m")
    p.flow((236, 64), (236, 256), head=False)
    p.flow((236, 112), (270, 112))
    p.flow((236, 208), (270, 208))
    p.box(270, 92, 56, 40, "trained", "K")
    p.box(270, 188, 56, 40, "trained", "V")
    p.flow((72, 64), (72, 30), (298, 30), (298, 36))
    p.box(270, 36, 56, 36, "trained", "Q")
    p.flow((326, 54), (398, 54), (398, 92))
    p.flow((326, 112), (356, 112))
    p.box(356, 92, 84, 40, "plain", "softmax", style="text")
    p.flow((398, 132), (398, 197))
    p.text(408, 168, "o_{i}", "start", "text m")
    p.flow((326, 208), (387, 208))
    p.node(398, 208, "×")
    p.flow((409, 208), (459, 208))
    p.node(470, 208, "Σ")
    p.flow((481, 208), (552, 208))
    p.text(570, 213, "y", style="text m")
    return p


def main() -> None:
    """Write all."""
    STATIC.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (STATIC / f"{name}.svg").write_text(draw().finish(), "utf-8")


if __name__ == "__main__":
    main()
