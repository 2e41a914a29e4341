"""Serving: exports to other servers, with a proof, and transformers' own server with adapters."""

from __future__ import annotations

from .export import Export
from .verify import Proof, Wrong, verify

__all__ = ["Export", "Proof", "Wrong", "verify"]
