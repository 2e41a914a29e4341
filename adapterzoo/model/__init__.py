"""A model with named adapters and heads."""

from __future__ import annotations

from .mixin import AdapterModelMixin, init, load_model
from .setup import AdapterSetup

__all__ = ["AdapterModelMixin", "AdapterSetup", "init", "load_model"]
