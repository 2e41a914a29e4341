"""Checkpoints: the formats of adapters and heads on disk."""

from . import native, adapterhub, peft  # noqa: I001  each registers itself
from .checkpoint import (
    below, encoded, exported, formats, head_document, read, write,
)  # fmt: skip

__all__ = ["adapterhub", "below", "encoded", "exported", "formats",
           "head_document", "native", "peft", "read", "write"]  # fmt: skip
