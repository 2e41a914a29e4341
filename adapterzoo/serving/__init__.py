"""Serving: adapters for other servers, with a proof; pools of adapters; transformers' server."""

from __future__ import annotations

from .export import Export
from .pool import AdapterPool
from .verify import Proof, Wrong, verify

__all__ = ["AdapterPool", "Export", "Proof", "Wrong", "verify"]
