"""Adapters at a model whose layers are plain ones again after quantisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from adapterzoo.inject import quantised

from .adapters import AdaptersMixin


class QuantisedMixin(AdaptersMixin):
    """`dequantize`."""

    def dequantize(self, dtype: torch.dtype | None = None) -> Any:
        """Make quantised layers plain ones, as transformers does; their adapters stay with them.

        What was frozen and in which mode each module is stays, too.

        Args:
            dtype: of the weights; None: that of the model's config.

        Returns:
            The model itself.

        Raises:
            ValueError: transformers has not quantised the model.
            NotImplementedError: transformers cannot do it for this way of quantising.
        """
        model = cast("nn.Module", self)
        # transformers would misread what has been put into another order for inference
        quantised.settle(model)
        modes = {path: module.training for path, module in model.named_modules()}
        packed = [path for path, module in model.named_modules() if quantised.is_quantised(module)]
        installed = dict(self._adapter_state.records)
        modules = {name: dict(self.adapter_modules(name)) for name in installed}
        for name in installed:
            self._remove(name)
        try:
            cast("Any", super()).dequantize(dtype)
            for path in packed:
                cast("nn.Parameter", model.get_submodule(path).weight).requires_grad_(False)
        finally:
            for path, module in model.named_modules():
                module.training = modes.get(path, module.training)
            for name, record in installed.items():
                made = {p: (m, list(record.places[p])) for p, m in modules[name].items()}
                self._install(name, record.config, made, record.meta)
        self._adapter_state.anatomy = None
        return self


@contextmanager
def trainable_when_quantised(model: Any) -> Iterator[None]:
    """Let Trainer take a quantised model: it knows only peft's adapters on one.

    Args:
        model: for as long as the context lasts it does not say that it is quantised.
    """
    quantised = getattr(model, "is_quantized", False)
    if quantised:
        model.is_quantized = False
    try:
        yield
    finally:
        if quantised:
            model.is_quantized = True
