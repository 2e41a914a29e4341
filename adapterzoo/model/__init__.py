"""A model with named adapters and heads."""

from __future__ import annotations

import importlib

from .activation import AdapterSetup
from .hf.factory import init, load_model
from .mixin import AdapterModelMixin

# their names in `adapters`
ModelAdaptersMixin = ModelWithHeadsAdaptersMixin = AdapterModelMixin

# the peers' methods stand above the model, and a model has them however the package is imported
importlib.import_module("adapterzoo.compat")

__all__ = ["AdapterModelMixin", "AdapterSetup", "init", "load_model"]
