"""A model with named adapters and heads."""

from __future__ import annotations

from .hf.initialization import init, load_model
from .mixin import AdapterModelMixin
from .setup import AdapterSetup

# their names in `adapters`
ModelAdaptersMixin = ModelWithHeadsAdaptersMixin = AdapterModelMixin

__all__ = ["AdapterModelMixin", "AdapterSetup", "init", "load_model"]
