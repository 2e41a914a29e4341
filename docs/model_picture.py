"""Draws the picture of the first page: `python docs/model_picture.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from _svg import opening  # noqa: E402

TITLE = "One frozen model; each row of a batch has its own adapter and head"
COLORS = {
    "frozen": ("#e9ecef", "#262b33"),
    "edge": ("#b6bcc4", "#4a525d"),
    "reviews": ("#0b66a8", "#2f86cc"),
    "topics": ("#b04a06", "#c2641f"),
    "plain": ("#5f6771", "#a0a8b2"),
    "on": ("#ffffff", "#ffffff"),
}
WIDTH, HEIGHT = 960, 372
# of the lanes of the three rows
LANES = {"reviews": 150, "topics": 210, "plain": 270}
TOP, BOTTOM = 112, 306


def box(kind: str, x: float, y: float, width: float, height: float, edge: str = "") -> str:
    """A rounded box."""
    stroke = f' class="{kind} {edge}-s"' if edge else f' class="{kind}"'
    return f'<rect{stroke} x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'


def text(kind: str, x: float, y: float, words: str, anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def layer(x: float, width: float, name: str) -> Iterator[str]:
    """A frozen layer, which all rows pass."""
    yield box("frozen", x, TOP, width, BOTTOM - TOP, "edge")
    yield text("muted", x + width / 2, TOP + 18, name)


def piece(kind: str, x: float, lane: float, width: float, words: str) -> Iterator[str]:
    """A trained part in the lane of one row."""
    yield box(kind, x, lane - 14, width, 28)
    yield text("on", x + width / 2, lane + 4.5, words)


def drawn() -> Iterator[str]:
    """The lines of the file."""
    yield opening(TITLE, WIDTH, HEIGHT, COLORS)
    yield text("text title", 24, 36, TITLE, "start")
    yield text("muted", 24, 58, "grey: pretrained and frozen, computed once for the whole batch; "
               "in color: what is trained, saved and shared", "start")  # fmt: skip
    rows = {"reviews": "“A film to remember.”", "topics": "“Rain by noon.”", "plain": "“Hello.”"}
    yield text("muted", 24, 98, "a batch", "start")
    yield text("muted", 512, 98, "block, × 12")
    yield text("muted", 846, 98, "heads")
    yield '<path class="edge-s" style="fill: none" d="M274 104h482"/>'
    yield from layer(174, 84, "embeddings")
    yield from layer(280, 150, "attention")
    yield from layer(462, 130, "feed-forward")
    for kind, lane in LANES.items():
        yield text("text", 24, lane + 4.5, rows[kind], "start")
        yield (
            f'<path class="{kind}-s" style="fill: none; stroke-width: 2.5" d="M160 {lane}h614"/>'
            f'<path class="{kind}" d="M774 {lane - 6}l11 6l-11 6z"/>'
        )
    yield from piece("reviews", 296, LANES["reviews"], 118, "+ LoRA “reviews”")
    yield from piece("topics", 606, LANES["topics"], 140, "bottleneck “topics”")
    yield from piece("reviews", 790, LANES["reviews"], 146, "“reviews”: fresh")
    yield from piece("topics", 790, LANES["topics"], 146, "“topics”: weather")
    yield text("muted", 790, LANES["plain"] + 4.5, "plain hidden states", "start")
    code = "model(**batch, adapter_names=[&quot;reviews&quot;, &quot;topics&quot;, None])"
    yield (
        f'<text class="text" x="24" y="{HEIGHT - 24}" '
        f'style="font-family: Menlo, Consolas, monospace">{code}</text>'
    )
    yield "</svg>"


if __name__ == "__main__":
    (ROOT / "docs" / "_static" / "model.svg").write_text("\n".join(drawn()) + "\n", "utf-8")
