"""DoRA — Weight-Decomposed Low-Rank Adaptation.

Paper: Liu et al. 2024, arXiv:2402.09353, eq. 5 and §4.3.
W' = m · (W + s · B A) / ‖W + s · B A‖, the norm taken over d_in for each output row, so that
y = g (W x + s · B A x) + bias with g = m / ‖W + s · B A‖; gradients treat the norm as a constant.

Differs from the paper: dropout before A, as in all implementations. Differs from PEFT: m starts as
a float32 norm and stays in float32 over half-precision layers, also when these are cast; dropout
does not reach W x and so costs no second product with W; layers that read one input may drop the
same features of it; a row of zeros keeps its output instead of turning into NaN. Differs from
adapters: in all of this, except with `convention="adapterhub"`, which computes the same.
Cost per site: rank · (d_in + d_out) + d_out parameters; LoRA's two products, one pass over the
output, and one over the weight for the norm: in each forward of training, in evaluation once.
Cannot do: layers without a floating-point weight to take norms of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.averaging import Combination, weighted_sum
from adapterzoo.configs import architectures, config_strings
from adapterzoo.contracts import BaseLayer, compute_dtype
from adapterzoo.fields import Choice, field
from adapterzoo.kernels.compose import compose
from adapterzoo.kernels.dora import direction_reference, row_norm
from adapterzoo.kernels.grouped import Groups, grouped_expand, grouped_shrink, stacked
from adapterzoo.spelling import spelled

from . import _dora_spelling
from ._init import constant, drawn
from ._keep_in_fp32 import KeepInFP32
from ._low_rank import LowRank
from ._low_rank_config import LowRankConfig
from ._rows import features, restored
from ._weight_cache import WeightCache


@architectures.register("dora")
@config_strings.register("dora")
@spelled(_dora_spelling.adapterhub, _dora_spelling.peft)
@dataclass(frozen=True, kw_only=True)
class DoRAConfig(LowRankConfig):
    """Config of DoRA; `TargetedConfig` chooses the layers, `LowRankConfig` how large they are.

    Attributes:
        convention: "paper", which is PEFT's too; or "adapterhub": the norm is of W + B A without
            the factor s, gradients pass through it, and the bias is multiplied by g as well.
    """

    architecture: ClassVar[str] = "dora"

    convention: str = field("paper", Choice("paper", "adapterhub"))

    @property
    def gradients_are_exact(self) -> bool:
        """The paper's treat the norm as a constant (§4.3)."""
        return self.convention == "adapterhub"

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> DoRA:
        """Return a fresh adapter for the site; `init_from_layer` gives it its magnitudes."""
        return DoRA(self, site, device, dtype)


class DoRA(KeepInFP32, LowRank):
    """y = g (W x + s · B A dropout(x)) + bias with g = m / ‖W + s · B A‖.

    In a `Stack` each adapter adds its change of the untouched layer, (g − 1) W x + g s · B A x.

    Attributes:
        m: the magnitudes, `[d_out]`, with experts in front where the site has them; no cast to a
            half-precision dtype reaches them.
        adapterhub: whether the convention is that of adapters.
        kept_gain: the factors g of evaluation.
    """

    wide = ("m",)

    def __init__(
        self, config: DoRAConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters; the magnitudes are ones until `init_from_layer`.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the parameters.
            dtype: of the layer.

        Raises:
            ConfigError: there is dropout, and the site has no features to drop.
        """
        super().__init__(config, site, device, dtype)
        self.adapterhub = config.convention == "adapterhub"
        # a rounded magnitude would not be the norm, and a fresh adapter not the identity
        self.m = drawn(self.lora_B.shape[:-1], constant(1.0), device, compute_dtype(dtype))
        self.kept_gain = WeightCache()

    def init_from_layer(self, base: BaseLayer) -> None:
        """The magnitudes start as the norms of the layer's rows, ‖W‖."""
        self.m.copy_(self.identity_values(base)["m"])

    def identity_values(self, base: BaseLayer) -> Mapping[str, Tensor]:
        """Return the magnitudes that change nothing, ‖W‖."""
        return {"m": row_norm(base.weight, self.lora_A, torch.zeros_like(self.lora_B), 1.0)}

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Combine several adapters.

        "cat" and the strategies with SVD add up changes of the weight, Σ wᵢ (Wᵢ' − W), each other
        one combines m linearly. With c = 1 + Σ wᵢ (gᵢ − 1) the sum is the change to
        c (W + Σ wᵢ s gᵢ/c · Bᵢ Aᵢ): each Bᵢ is multiplied by gᵢ/c, and m = c ‖W + B A‖.
        """
        if strategy.target not in ("ranks", "change"):
            self.combine_factors(adapters, weights, strategy)
            self.combine_linearly(["m"], adapters, weights, strategy, base)
            return
        gains = [adapter.gain(base.weight) for adapter in adapters]  # [*experts, d_out] each
        c = 1 + weighted_sum([gain - 1 for gain in gains], weights)
        self.combine_factors(adapters, weights, strategy, [gain / c for gain in gains])
        norm = row_norm(base.weight, self.lora_A, self.lora_B, self.scaling)
        strategy.fill(self.m, c * norm, "m")

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer with the change; in an embedding `x` is token numbers `[*batch]`.

        `x` `[*batch, d_in]` → `[*batch, d_out]`.
        """
        y, plain = base(x), base.original(x)  # [*batch, d_out]
        looks_up = self.looks_up
        t = self.looked_up(x, base) * base.scale if looks_up else base.from_input(self, x)
        gain = self.gain(base.weight)
        bias = None if self.adapterhub else base.bias
        if plain is y:
            return compose(y, gain, bias, t, self.lora_B, self.scaling)
        whole = compose(plain.to(gain.dtype), gain, bias, t, self.lora_B, self.scaling)
        return (y + (whole - plain)).to(y.dtype)

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether they are of the same dtypes, dropout and convention, on features."""
        kinds = {(a.lora_A.dtype, a.m.dtype, a.dropout, a.adapterhub) for a in adapters}
        return len(kinds) == 1 and not any(a.looks_up or a.m.dim() > 1 for a in adapters)

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row of the batch with its own change. `x` `[rows, *tokens, d_in]`."""
        one, y, plain = adapters[0], base(x), base.original(x)  # [rows, *tokens, d_out]
        gains = [a.gain(base.weight) for a in adapters]  # [d_out] each
        factors = [a.lora_A for a in adapters], [a.lora_B for a in adapters]
        stack = stacked(*factors, [a.scaling for a in adapters])
        t = grouped_shrink(x, stack.a, groups, one.dropout, one.training)  # [rows, *tokens, rank]
        wide = plain.to(gains[0].dtype)
        whole = grouped_expand(wide, t, stack.b, stack.scaling, groups)  # [rows, *tokens, d_out]
        change = features(gains, groups, y.dim()) - 1  # [rows, 1, …, d_out]
        bias = None if one.adapterhub else base.bias
        whole = whole + change * (whole if bias is None else whole - bias)
        out = whole if plain is y else y + (whole - plain)
        return restored(out.to(y.dtype), y, groups)

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + (g (W + s · B A) − W), `[d_out, d_in]`, experts in front."""
        own = base.weight
        direction = direction_reference(own, self.lora_A, self.lora_B, self.scaling)
        return w + (self.gain(own).unsqueeze(-1) * direction - own)

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias `[d_out]`: the layer's, times g in the convention of adapters."""
        if not self.adapterhub or base.bias is None:
            return b
        return b + (self.gain(base.weight) - 1) * base.bias

    def gain(self, w: Tensor) -> Tensor:
        """Return g `[*experts, d_out]` for the untouched weight, in float32 or float64."""
        sources = w, self.lora_A, self.lora_B, self.m
        return self.kept_gain.get(lambda: self._gain(w), *sources, facts=self.scaling)

    def _gain(self, w: Tensor) -> Tensor:
        # the norm of adapters leaves out s and is differentiated; the paper's is a constant
        with torch.set_grad_enabled(self.adapterhub and torch.is_grad_enabled()):
            s = 1.0 if self.adapterhub else self.scaling
            norm = row_norm(w, self.lora_A, self.lora_B, s)  # [*experts, d_out]
        # a row of zeros has no direction to change: it stays as it is
        zero = norm == 0
        return torch.where(zero, 1.0, self.m.to(norm.dtype) / norm.masked_fill(zero, 1.0))
