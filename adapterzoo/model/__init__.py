"""A model with named adapters and heads."""

from __future__ import annotations

import importlib

from .activation import AdapterSetup
from .hf.factory import init, load_model
from .mixin import AdapterModelMixin

# their names in `adapters`
ModelAdaptersMixin = ModelWithHeadsAdaptersMixin = AdapterModelMixin

# the layer above: it gives every model the methods of the peers, however the package is imported
importlib.import_module("adapterzoo.compat")

__all__ = ["AdapterModelMixin", "AdapterSetup", "init", "load_model"]
