"""Checkpoints: the formats of adapters and heads on disk."""

from . import native, adapterhub, peft  # noqa: I001  each registers itself; asked in this order
from .checkpoint import KINDS, Base, Kind, encoded, exported, formats, of, read, write

__all__ = ["KINDS", "Base", "Kind", "adapterhub", "encoded", "exported", "formats", "native", "of",
           "peft", "read", "write"]  # fmt: skip
