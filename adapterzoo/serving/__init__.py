"""Serving: exports with a proof, pools of adapters, and transformers' own server for them."""

from __future__ import annotations

from .export import Export
from .pool import AdapterPool
from .verify import Proof, Wrong, verify

__all__ = ["AdapterPool", "Export", "Proof", "Wrong", "verify"]


def __dir__() -> list[str]:
    return __all__
