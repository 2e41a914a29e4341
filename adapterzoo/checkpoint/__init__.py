"""Checkpoints: formats of adapters and heads on disk, and atomic files."""

from . import native, adapterhub, peft  # noqa: F401, I001  each registers itself; asked in this order
