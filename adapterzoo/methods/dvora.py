"""DVoRA — DoRA with the update of VeRA.

Papers: Liu et al. 2024, arXiv:2402.09353, §5.3; Kopiczko et al. 2023, arXiv:2310.11454, eq. 2.
W' = m · V / ‖V‖ with V = W + Λ_b B Λ_d A, the norm taken over d_in for each output row;
A `[r, d_in]` and B `[d_out, r]` are random, frozen and shared by all layers, the diagonals Λ and
the magnitudes m are trained; gradients treat the norm as a constant.

Differs from the paper: nothing; dropout before A is off by default, m stays in float32 over
half-precision layers. Differs from PEFT: it has no DVoRA. Differs from adapters in all of this,
except with `convention="adapterhub"`, which computes the same as adapters: dense trained matrices
in the place of Λ, a factor alpha / r on the update but not in the norm, gradients through the norm,
and the bias multiplied by m / ‖V‖ as well.
Cost per site: r + 2 · d_out parameters, DoRA's products; r · (d_in + d_out) numbers once for all.
Cannot do: embeddings, and layers without a floating-point weight to take norms of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.config_base import config_class
from adapterzoo.configs import architectures, config_strings
from adapterzoo.contracts import BaseLayer
from adapterzoo.kernels.ops import exactly
from adapterzoo.spelling import spelled

from . import _dvora_spelling
from ._magnitudes import Magnitudes
from ._projections import Projected, ProjectedConfig


@architectures.register("dvora")
@config_strings.register("dvora")
@spelled(_dvora_spelling.adapterhub)
@config_class
class DvoRAConfig(ProjectedConfig):
    """Config of DVoRA; `TargetedConfig` says where the adapters sit, `ProjectedConfig` the rest.

    In the convention "adapterhub" the norm is of W + B A without the factor alpha / r, gradients
    pass through it, and the bias is multiplied by m / ‖V‖.
    """

    architecture: ClassVar[str] = "dvora"

    @property
    def gradients_are_exact(self) -> bool:
        """The paper's treat the norm as a constant (§4.3)."""
        return self.convention == "adapterhub"

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> DvoRA:
        """Return a new adapter for the site; `init_from_layer` gives it its magnitudes."""
        return DvoRA(self, site, device, dtype)


class DvoRA(Magnitudes, Projected):
    """y = g (W x + s · Λ_b B Λ_d A dropout(x)) + bias with g = m / ‖W + s · Λ_b B Λ_d A‖."""

    def __init__(
        self, config: DvoRAConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters; the magnitudes are ones until `init_from_layer`.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the parameters.
            dtype: of the layer.

        Raises:
            ConfigError: the site cannot have such an adapter.
        """
        super().__init__(config, site, device, dtype)
        shape = (site.experts, site.d_out) if site.experts else (site.d_out,)
        self.make_magnitudes(shape, config.convention, device, dtype)

    def projected(self, x: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor]:
        """Return Λ_d A dropout(x) and Λ_b B."""
        a, _ = self.projections(base, self.lambda_d)
        _, b = self.low_rank(base)
        return self.shrunk(x, a), b

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether they are of the same dtypes, dropout and convention, without experts."""
        kinds = {(a.lambda_d.dtype, a.m.dtype, a.dropout, a.adapterhub) for a in adapters}
        return len(kinds) == 1 and not any(a.m.dim() > 1 for a in adapters)

    def low_rank(self, base: BaseLayer) -> tuple[Tensor, Tensor]:
        """Return Λ_d A and Λ_b B."""
        with exactly(self.lambda_d.device):
            return self.factors(base, self.lambda_d)

    def gain_at(self, base: BaseLayer) -> Tensor:
        """Return g `[*experts, d_out]`, in float32 or float64."""
        w = base.weight
        sources = w, self.lambda_d, self.lambda_b, self.m, *self.projections(base, self.lambda_d)
        return self.kept_gain.get(
            lambda: self.gain_of(w, *self.low_rank(base)), *sources, facts=self.scaling
        )
