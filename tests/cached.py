"""The name that the installed transformers gives to the cache of earlier tokens."""

from __future__ import annotations

import inspect

from transformers import LlamaModel

from adapterzoo.caches import CACHES

CACHE = next(name for name in CACHES if name in inspect.signature(LlamaModel.forward).parameters)
"""An argument of models and of `generate`, and a field of their outputs."""
