"""Checkpoints: the formats of adapters and heads on disk."""

from . import native, adapterhub, peft  # noqa: I001  each registers itself; asked in this order
from .checkpoint import (
    KINDS, Base, Kind, below, encoded, exported, formats, head_document, of, read, write,
)  # fmt: skip

__all__ = ["KINDS", "Base", "Kind", "adapterhub", "below", "encoded", "exported", "formats",
           "head_document", "native", "of", "peft", "read", "write"]  # fmt: skip
