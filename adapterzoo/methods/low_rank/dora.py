"""DoRA — Weight-Decomposed Low-Rank Adaptation.

Paper: Liu et al. 2024, arXiv:2402.09353, eq. 5 and §4.3.
W' = m · (W + s · B A) / ‖W + s · B A‖, the norm taken over d_in for each output row, so that
y = g (W x + s · B A x) + bias with g = m / ‖W + s · B A‖; gradients treat the norm as a constant.

Differs from the paper: dropout before A, as in all implementations. Differs from PEFT: m starts as
a float32 norm and stays in float32 over half-precision layers, also when these are cast; dropout
does not reach W x and so costs no second product with W; a row of zeros keeps its output instead of
turning into NaN. Differs from adapters: in all of this, except with `convention="adapterhub"`,
which computes the same.
Cost per site: rank · (d_in + d_out) + d_out parameters; LoRA's two products, one pass over the
output, and one over the weight for the norm: in each forward of training, in evaluation once.
Cannot do: layers without a floating-point weight to take norms of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.averaging import Combination, weighted_sum
from adapterzoo.config_base import config_class
from adapterzoo.configs import architectures, config_strings
from adapterzoo.contracts import BaseLayer
from adapterzoo.fields import Choice, field
from adapterzoo.kernels.dora import row_norm
from adapterzoo.spelling import spelled

from . import _dora_spelling
from ._low_rank import LowRank
from ._low_rank_config import LowRankConfig
from ._magnitudes import Magnitudes
from ._targets import PLACES


@architectures.register("dora")
@config_strings.register("dora")
@spelled(_dora_spelling.adapterhub, _dora_spelling.peft)
@config_class
class DoRAConfig(LowRankConfig):
    """Config of DoRA; `TargetedConfig` chooses the layers, `LowRankConfig` how large they are.

    Attributes:
        convention: "paper", which is PEFT's too; or "adapterhub": the norm is of W + B A without
            the factor s, gradients pass through it, and the bias is multiplied by g as well.
    """

    architecture: ClassVar[str] = "dora"

    convention: str = field("paper", Choice("paper", "adapterhub"))

    @property
    def slot_fields(self) -> frozenset[str]:
        """No other scaling where the norm leaves it out."""
        return PLACES if self.convention == "adapterhub" else super().slot_fields

    def of_rank(self, rank: int) -> Self:
        """Return the config of the rank; itself where the norm leaves out the scaling."""
        return self if self.convention == "adapterhub" else super().of_rank(rank)

    @property
    def gradients_are_exact(self) -> bool:
        """The paper's treat the norm as a constant (§4.3)."""
        return self.convention == "adapterhub"

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> DoRA:
        """Return a fresh adapter for the site; `init_from_layer` gives it its magnitudes."""
        return DoRA(self, site, device, dtype)


class DoRA(Magnitudes, LowRank):
    """y = g (W x + s · B A dropout(x)) + bias with g = m / ‖W + s · B A‖."""

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
        self.make_magnitudes(self.lora_B.shape[:-1], config.convention, device, dtype)

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

    def projected(self, x: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor]:
        """Return A dropout(x) and B; in an embedding `x` is token numbers `[*batch]`."""
        t = self.looked_up(x, base) * base.scale if self.looks_up else self.down(x)
        return t, self.lora_B

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether they are of the same dtypes, dropout and convention, on features."""
        kinds = {(a.lora_A.dtype, a.m.dtype, a.dropout, a.adapterhub) for a in adapters}
        return len(kinds) == 1 and not any(a.looks_up or a.m.dim() > 1 for a in adapters)

    def low_rank(self, base: BaseLayer) -> tuple[Tensor, Tensor]:
        """Return A and B."""
        return self.lora_A, self.lora_B

    def gain_at(self, base: BaseLayer) -> Tensor:
        """Return g `[*experts, d_out]`."""
        return self.gain(base.weight)

    def gain(self, w: Tensor) -> Tensor:
        """Return g `[*experts, d_out]` for the untouched weight, in float32 or float64."""
        a, b = self.lora_A, self.lora_B
        sources = w, a, b, self.m
        return self.kept_gain.get(lambda: self.gain_of(w, a, b), *sources, facts=self.scaling)
