"""`adapters.wrappers`: adapters for models of transformers that keep their head."""

from __future__ import annotations

from .model import init, load_model

__all__ = ["init", "load_model"]
