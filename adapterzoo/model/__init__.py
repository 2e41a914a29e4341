"""A model with named adapters and heads."""

from __future__ import annotations

from .hf.factory import init, load_model
from .mixin import AdapterModelMixin
from .setup import AdapterSetup

__all__ = ["AdapterModelMixin", "AdapterSetup", "init", "load_model"]
