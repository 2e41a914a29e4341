"""Config strings of the methods whose usual sizes are too large for tiny models."""

from __future__ import annotations

SMALL = {"miss": "miss[r=4]", "oft": "oft[oft_block_size=4]"}


def small(text: str) -> str:
    """The config string to try on a tiny model."""
    return SMALL.get(text, text)
