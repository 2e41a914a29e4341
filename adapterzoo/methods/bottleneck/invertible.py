"""Invertible bottlenecks: a function of the embeddings, and its inverse before the logits.

Paper: Pfeiffer et al. 2020 (MAD-X), arXiv:2005.00052, "Invertible Adapters"; the coupling is that
of NICE, Dinh et al. 2015, arXiv:1410.8516.
With x₁, x₂ the halves of the first block's input, and F, G = W₂ φ(W₁ x + b₁) + b₂:

    y₁ = x₁ + F(x₂)        y₂ = x₂ + G(y₁)
    x₂ = y₂ − G(y₁)        x₁ = y₁ − F(x₂)

The inverse acts on the input of the last layer of a named language modeling head. φ is that of the
bottlenecks in the blocks, which do not change (`bottleneck`).

Differs from the paper: nothing. Differs from adapters: all adapters of a `Stack` act, with their
inverses in the opposite order, while adapters uses only the first; each row of a batch has its own.
As in adapters, a head of a task class of transformers does not get the inverse, and in an
encoder-decoder the function acts in the encoder.
Cost: 2 · width · (d_model + 1) + d_model parameters, once for all layers, where width is
(d_model / 2) // inv_adapter_reduction_factor.
A fusion attends to the changes f(x) − x, and has no inverse; with `entry="first"` the function
of the first adapter acts instead, as in adapters.
Cannot do: merging; averages and splits; the logits of a fusion; "glow".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adapterzoo.activations import activation
from adapterzoo.contracts import BaseLayer, FusibleAdapter, InvertibleAdapter, SharedModules
from adapterzoo.errors import ConfigError
from adapterzoo.methods._init import dtype_named, generator, normal
from adapterzoo.methods._parts import Affine, affine


class NiceBlock(nn.Module):
    """The parameters of F and G, and the function that they define.

    Attributes:
        F: W₁, b₁ as "0" and W₂, b₂ as "2".
        G: the same for G.
    """

    def __init__(self, config: Any, d: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make the parameters: weights N(0, 0.02), biases 0.

        Args:
            config: a `BnConfig`.
            d: input width of the first block.
            device: device for the parameters.
            dtype: dtype of the parameters, if the config has none.

        Raises:
            ConfigError: the width is odd, or half of it is too small.
        """
        super().__init__()
        half, factor = d // 2, config.inv_adapter_reduction_factor or 1
        width = int(half // factor)
        if d % 2 or not width:
            hint = "inv_adapter=None" if d % 2 else "inv_adapter_reduction_factor=2"
            raise ConfigError(
                f"{type(config).__name__}(inv_adapter_reduction_factor={factor!r}): the layers "
                f"would have {half / factor:g} features, of a half of {d / 2:g}. Write {hint}."
            )
        dtype = dtype_named(config.dtype, dtype)
        self.activation = activation(config.non_linearity)
        for name in ("F", "G"):
            fill = normal(0.02, generator(config.init_weights_seed, f"invertible/{name}"))
            first = affine((width, half), fill, device, dtype)
            last = affine((half, width), fill, device, dtype)
            self.add_module(name, nn.ModuleDict({"0": first, "2": last}))

    def forward(self, x: Tensor, rev: bool = False) -> Tensor:
        """Return the function of `x` `[*batch, d]`, or its inverse with `rev`; same shape."""
        if rev:
            return self.inverse(x)
        x1, x2 = x.chunk(2, -1)  # [*batch, d / 2] each
        y1 = x1 + self._of("F", x2)
        y2 = x2 + self._of("G", y1)
        return torch.cat([y1, y2], -1)  # [*batch, d]

    def inverse(self, y: Tensor) -> Tensor:
        """Return the `x` for which `forward` returns `y` `[*batch, d]`."""
        y1, y2 = y.chunk(2, -1)  # [*batch, d / 2] each
        x2 = y2 - self._of("G", y1)
        x1 = y1 - self._of("F", x2)
        return torch.cat([x1, x2], -1)  # [*batch, d]

    def _of(self, name: str, x: Tensor) -> Tensor:
        """Return F(x) or G(x), `[*batch, d / 2]`, in the dtype of `x`."""
        layers = cast("nn.ModuleDict", self._modules[name])
        t = x
        for number in ("0", "2"):
            layer = cast("Affine", layers[number])
            bias = cast("Tensor", layer.bias)
            # the head may be on another device than the embeddings
            t = linear(t.to(layer.weight.dtype), layer.weight.to(t.device), bias.to(t.device))
            t = self.activation(t) if number == "0" else t
        return t.to(x.dtype)


class InvertibleModules(SharedModules):
    """Shared modules with an invertible function; called as a module, they compute it."""

    container = "invertible_adapters"

    def forward(self, x: Tensor, rev: bool = False) -> Tensor:
        """Return the function of `x` `[*batch, d]`, or its inverse with `rev`; same shape."""
        return cast("Tensor", self["invertible"](x, rev=rev))


class NiceAdapter(InvertibleAdapter, FusibleAdapter):
    """The function at the first block's input; it shares its parameters with the head."""

    container = InvertibleModules.container

    def __init__(self, *, is_unscaled: bool) -> None:
        """Store whether the function reads a table's output without its scale."""
        super().__init__()
        self.is_unscaled = is_unscaled

    def update(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return how the function changes `x` `[*batch, d]`, same shape."""
        return self._applied(x, base) - x

    def forward(
        self, x: Tensor, base: BaseLayer, instead: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the first block's input `[*batch, d]`; `x` is the input of the module there."""
        y = base(x)
        return self._applied(y, base) if instead is None else y + instead(y).to(y.dtype)

    def _applied(self, y: Tensor, base: BaseLayer) -> Tensor:
        # called as a module, so that a user's hooks run
        function = base.shared(self)
        if self.is_unscaled:
            return cast("Tensor", base.scale * function(y / base.scale))
        return cast("Tensor", function(y))

    def inverse(self, y: Tensor, base: BaseLayer) -> Tensor:
        """Return the input of the head's last layer. `y` `[*batch, d]`, same shape."""
        return cast("Tensor", base.shared(self)(y, rev=True))
