"""`adapters.context`: `AdapterSetup`."""

from __future__ import annotations

from .model import AdapterSetup

__all__ = ["AdapterSetup"]
