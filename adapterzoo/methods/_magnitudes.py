"""Magnitudes: learned norms of a weight's rows, which DoRA and its relatives have.

Paper: Liu et al. 2024, arXiv:2402.09353, eq. 5 and §4.3.
W' = m · (W + s · B A) / ‖W + s · B A‖, the norm taken over d_in for each output row, so that
y = g (W x + s · B A x) + bias with g = m / ‖W + s · B A‖; gradients treat the norm as a constant.
In the convention of adapters the norm is of W + B A, gradients pass through it, and the bias is
multiplied by g as well.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from adapterzoo.contracts import BaseLayer, WeightAdapter, compute_dtype
from adapterzoo.kernels.compose import compose
from adapterzoo.kernels.dora import (
    direction_reference,
    divided,
    row_gain,
    row_norm,
    weight_norm,
)
from adapterzoo.kernels.grouped import (
    Groups,
    grouped_expand,
    grouped_shrink,
    stacked_down,
    stacked_up,
)

from ._init import constant, drawn
from ._keep_in_fp32 import KeepInFP32
from ._rows import features, restored
from ._weight_cache import WeightCache


class Magnitudes(KeepInFP32, WeightAdapter):
    """Base of the adapters y = g (W x + s · B A x) + bias with g = m / ‖W + s · B A‖.

    In a `Stack` each adapter adds its change of the untouched layer, (g − 1) W x + g s · B A x.

    Attributes:
        m: the magnitudes, `[d_out]`, with experts in front where the site has them; no cast to a
            half-precision dtype reaches them.
        adapterhub: whether the convention is that of adapters.
        kept_gain: the factors g of evaluation.
        scaling: the factor s.
        dropout: probability on the way to A.
    """

    wide: ClassVar[tuple[str, ...]] = ("m",)
    scaling: float
    dropout: float

    def make_magnitudes(
        self, shape: tuple[int, ...], convention: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the magnitudes; they are ones until `init_from_layer`.

        Args:
            shape: `[*experts, d_out]`.
            convention: "paper" or "adapterhub".
            device: of the parameter.
            dtype: of the layer.
        """
        self.adapterhub = convention == "adapterhub"
        # a rounded magnitude would not be the norm, and a fresh adapter not the identity
        self.m = drawn(shape, constant(1.0), device, compute_dtype(dtype))
        self.kept_gain = WeightCache()

    @abstractmethod
    def low_rank(self, base: BaseLayer) -> tuple[Tensor, Tensor]:
        """Return A `[*experts, rank, d_in]` and B `[*experts, d_out, rank]` of the update."""

    @abstractmethod
    def projected(self, x: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor]:
        """Return A dropout(x) `[*batch, rank]` and B."""

    @abstractmethod
    def gain_at(self, base: BaseLayer) -> Tensor:
        """Return g `[*experts, d_out]`, in float32 or float64, kept in evaluation."""

    def gain_of(self, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return g for the untouched weight and the factors of the update."""
        if not self.adapterhub:
            return row_gain(w, a, b, self.m, self.scaling)  # [*experts, d_out]
        # the norm of adapters leaves out s and is differentiated
        return divided(self.m, row_norm(w, a, b, 1.0))

    def init_from_layer(self, base: BaseLayer) -> None:
        """The magnitudes start as the norms of the layer's rows, ‖W‖."""
        self.m.copy_(self.identity_values(base)["m"])

    def identity_values(self, base: BaseLayer) -> Mapping[str, Tensor]:
        """Return the magnitudes that change nothing, ‖W‖."""
        return {"m": weight_norm(base.weight)}

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer with the change. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y, plain = base(x), base.original(x)  # [*batch, d_out]
        t, b = self.projected(x, base)
        gain = self.gain_at(base)
        bias = None if self.adapterhub else base.bias
        last = t, b, self.scaling
        if plain is y:
            return compose(y, gain, bias, *last)
        whole = compose(plain.to(gain.dtype), gain, bias, *last)
        return (y + (whole - plain)).to(y.dtype)

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row of the batch with its own change. `x` `[rows, *tokens, d_in]`."""
        one, y, plain = adapters[0], base(x), base.original(x)  # [rows, *tokens, d_out]
        gains = [a.gain_at(base) for a in adapters]  # [d_out] each
        factors = [adapter.low_rank(base) for adapter in adapters]
        scalings = [adapter.scaling for adapter in adapters]
        down = stacked_down([a for a, _ in factors])  # [n, rank, d_in]
        up = stacked_up([b for _, b in factors])  # [n, d_out, rank]
        t = grouped_shrink(x, down, groups, one.dropout, one.training)  # [rows, *tokens, rank]
        wide = plain.to(gains[0].dtype)
        whole = grouped_expand(wide, t, up, scalings, groups)  # [rows, *tokens, d_out]
        change = features(gains, groups, y.dim()) - 1  # [rows, 1, …, d_out]
        bias = None if one.adapterhub else base.bias
        whole = whole + change * (whole if bias is None else whole - bias)
        out = whole if plain is y else y + (whole - plain)
        return restored(out.to(y.dtype), y, groups)

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + (g (W + s · B A) − W), `[d_out, d_in]`, experts in front."""
        own = base.weight
        direction = direction_reference(own, *self.low_rank(base), self.scaling)
        return w + (self.gain_at(base).unsqueeze(-1) * direction - own)

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias `[d_out]`: the layer's, times g in the convention of adapters."""
        if not self.adapterhub or base.bias is None:
            return b
        return b + (self.gain_at(base) - 1) * base.bias
