"""Copies of whole layers, one for each adapter: norms, and the modules in `modules_to_save`.

y = f_θ'(x) with the function f of the layer and parameters θ' of the adapter, initially the layer's
own θ. After other adapters in a stack it adds its change: y + f_θ'(x) − f_θ(x).

Differs from PEFT: several can act in one call, in a stack or an average, and each row of a batch
can have its own, whatever the layer; merging writes the values into the layer.
Cost: the parameters of the layer for each adapter; alone, nothing in the forward.
Cannot do: layers that are called with more than one input, quantized ones, batch norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.func import functional_call

from adapterzoo.anatomy import Site
from adapterzoo.averaging import Combination
from adapterzoo.config_base import config_class
from adapterzoo.configs import AdapterConfig
from adapterzoo.contracts import BaseLayer, CopyAdapter, replaced


@config_class
class CopyConfig(AdapterConfig):
    """Base of the configs whose adapters are copies of layers."""

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> LayerCopy:
        """Return an adapter that does not have its copy yet."""
        return LayerCopy(site.transposed or site.kind == "embedding")


class LayerCopy(CopyAdapter):
    """y = layer(x) with a copy of the layer."""

    def __init__(self, transposed: bool) -> None:
        """Wait for the copy.

        Args:
            transposed: whether the layer stores its weight as `[d_in, d_out]`.
        """
        super().__init__()
        self.transposed = transposed

    def init_from_layer(self, base: BaseLayer) -> None:
        """Take the values of the layer."""
        with torch.no_grad():
            for name, value in base.parameters.items():
                self._own(name).copy_(value)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output of the copy, or with earlier adapters add its change."""
        if base.is_original:
            return self._run(x, base)
        y, plain = base(x), base.original(x)
        own = self._run(x, base)
        return own if y is plain else y + (own - plain)

    def _run(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the copy's output; values of another dtype are cast to that of the layer."""
        like = base.parameters
        out: Tensor
        if all(self._own(name).dtype is value.dtype for name, value in like.items()):
            out = self.layer(x)
        else:
            cast = {name: self._own(name).to(value.dtype) for name, value in like.items()}
            out = functional_call(self.layer, cast, (x,))
        return out

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight, `[d_out, d_in]`."""
        own = self._own("weight").to(w.dtype)
        return replaced(w, own.mT if self.transposed else own, base.weight.to(w.dtype))

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias, `[d_out]`."""
        return b if base.bias is None else self.parameter("bias", b, base)

    def parameter(self, name: str, value: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged value of any parameter, as the layer stores it."""
        plain = base.parameters[name].to(value.dtype)
        return replaced(value, self._own(name).to(value.dtype), plain)

    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return the values of the layer."""
        return {f"layer.{name}": value for name, value in base.parameters.items()}

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Combine the parameters linearly.

        Raises:
            CompositionError: the strategy leaves out entries.
        """
        strategy.refuse_pruning("a copy of a layer")
        names = [name for name, _ in self.named_parameters()]
        self.combine_linearly(names, adapters, weights, strategy, base)

    def _own(self, name: str) -> Tensor:
        own: Tensor = self.layer._parameters[name]  # type: ignore[assignment]
        return own
