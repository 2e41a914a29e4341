"""Serving: what leaves for servers, and the proof that it is computed there as here."""

from __future__ import annotations

from adapterzoo.model.exporting import Export

from .verify import Proof, Wrong, verify

__all__ = ["Export", "Proof", "Wrong", "verify"]
