"""A model with named adapters and heads."""

from __future__ import annotations

import importlib

from .activation import AdapterSetup
from .hf.factory import init, load_model
from .mixin import AdapterModelMixin

# their names in `adapters`
ModelAdaptersMixin = ModelWithHeadsAdaptersMixin = AdapterModelMixin

# PEFT's methods stand above the model, and a model has them however the package is imported
importlib.import_module("adapterzoo.compat.peft.methods")

__all__ = ["AdapterModelMixin", "AdapterSetup", "init", "load_model"]
