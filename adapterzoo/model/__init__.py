"""A model with named adapters and heads."""

from __future__ import annotations

from .activation import AdapterSetup
from .hf.factory import init, load_model
from .mixin import AdapterModelMixin

__all__ = ["AdapterModelMixin", "AdapterSetup", "init", "load_model"]
