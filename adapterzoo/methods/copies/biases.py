"""Biases of layers, one for each adapter: `bias="all"` and `bias="lora_only"`.

Paper: Ben Zaken et al. 2021, arXiv:2106.10199 (BitFit). y + b' − b with the bias b' of the adapter,
initially the layer's own b.

Differs from PEFT: there the biases of the base model itself are trained, so that one adapter can
have some, and the model without it has them too.
Cost: d_out parameters at each layer, one addition.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.config import AdapterConfig, Placement, config_class
from adapterzoo.contracts import BaseLayer, replaced
from adapterzoo.errors import SiteError, listing

from .base import Copy


@config_class
class BiasConfig(AdapterConfig):
    """The part of a config that its `bias` adds.

    Attributes:
        paths: of the layers; None for all that have a bias.
    """

    architecture: ClassVar[str] = "bias"

    paths: tuple[str, ...] | None = None

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each of the layers that has a bias.

        Raises:
            SiteError: none has, or one has a bias that is not simply added to its output.
        """
        wanted = None if self.paths is None else {*self.paths}
        odd = [path for path in anatomy.odd_biases if wanted is None or path in wanted]
        if odd:
            raise SiteError(
                f"the bias of {listing(odd)} is not simply added to the output. Write bias='none', "
                f"or bias='lora_only' if they have no adapter."
            )
        sites = [s for s in anatomy.biases if wanted is None or s.path in wanted]
        if not sites:
            raise SiteError("there is no bias to train. Write bias='none'.")
        return [Placement(site, self, "bias") for site in sites]

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> OwnBias:
        """Return a fresh adapter for the site."""
        return OwnBias(site, device, dtype)


class OwnBias(Copy):
    """y = base(x) + b' − b."""

    noun: ClassVar[str] = "a bias"
    keeps_weight: ClassVar[bool] = True

    def __init__(self, site: Site, device: torch.device, dtype: torch.dtype) -> None:
        """Make the bias.

        Args:
            site: gives the width.
            device: of the bias.
            dtype: of the layer.
        """
        super().__init__()
        # the output of a convolution, or a norm of channels, is [batch, d_out, *places]
        self.is_spatial = site.kind == "layer"
        self.own = nn.Parameter(torch.zeros(site.d_out, device=device, dtype=dtype))

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer with the other bias. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y = base(x)
        if base.bias is None:
            return y
        change = self.own - base.bias  # [d_out]
        if self.is_spatial:
            # a convolution may have no batch
            weight = base.parameters.get("weight")
            like = y if weight is None or weight.dim() < 3 else weight
            change = change.view(-1, *(1 for _ in like.shape[2:]))  # [d_out, *ones]
        return y + change.to(y.dtype)

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the weight, which does not change."""
        return w

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias, `[d_out]`."""
        if base.bias is None:
            return b
        return replaced(b, self.own.to(b.dtype), base.bias.to(b.dtype))

    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return the values of the layer."""
        return {} if base.bias is None else {"own": base.bias}
