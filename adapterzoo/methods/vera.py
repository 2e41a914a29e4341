"""VeRA — Vector-based Random Matrix Adaptation.

Paper: Kopiczko et al. 2023, arXiv:2310.11454, eq. 2 and §3.2.
y = W x + b + Λ_b B Λ_d A x with A `[r, d_in]` and B `[d_out, r]` random, frozen and shared by all
layers; Λ_d and Λ_b are diagonal and trained. Wider layers set the size of A and B, others take the
first columns of A and rows of B.

Differs from the paper: nothing; dropout before A is off by default. Differs from PEFT: a layer that
is adapted twice keeps one copy of A and B; the vectors live in the dtype of their layer. Differs
from adapters: all of it but `convention="adapterhub"`, which is what adapters computes: dense
trained matrices `[r, r]` and `[d_out, d_out]` in the place of Λ, and a factor alpha / r.
Cost per site: r + d_out parameters, LoRA's products; r · (d_in + d_out) numbers once for all. A
step keeps A x alone; PEFT keeps B Λ_d A x too, and saves one product.
Cannot do: embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from adapterzoo.anatomy import Site
from adapterzoo.config_base import config_class
from adapterzoo.configs import architectures, config_strings
from adapterzoo.contracts import BaseLayer
from adapterzoo.fields import field
from adapterzoo.kernels.grouped import Groups, grouped_low_rank
from adapterzoo.kernels.low_rank import expand
from adapterzoo.kernels.ops import exactly
from adapterzoo.spelling import spelled

from . import _vera_spelling
from ._projections import Projected, ProjectedConfig


@architectures.register("vera")
@config_strings.register("vera")
@spelled(_vera_spelling.adapterhub, _vera_spelling.peft)
@config_class
class VeraConfig(ProjectedConfig):
    """Config of VeRA; `TargetedConfig` says where the adapters sit, `ProjectedConfig` the rest.

    Attributes:
        save_projection: whether files in PEFT's format hold A and B; if not, PEFT and this library
            draw them again from `projection_prng_key`. Other formats always hold them.
    """

    architecture: ClassVar[str] = "vera"
    training_fields = ProjectedConfig.training_fields | {"save_projection"}

    save_projection: bool = field(True, ours=True)

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Vera:
        """Return a new adapter for the site."""
        return Vera(self, site, device, dtype)


class Vera(Projected):
    """y = base(x) + s · Λ_b B Λ_d A dropout(x), with s = 1 in the paper."""

    is_additive = True

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output with the update. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y = base(x)
        a, b = self.projections(base, self.lambda_d)
        if self.dense:
            update = linear(linear(self.shrunk(x, a), b), self.lambda_b)  # [*batch, d_out]
            return torch.add(y, update.to(y.dtype), alpha=self.scaling)
        # with all scales in one small matrix, nothing is kept but A x, and no pass over y is added
        scaled = b * torch.outer(self.lambda_b, self.lambda_d)  # Λ_b B Λ_d [d_out, r]
        return expand(y, self.down(x, a), scaled, self.scaling)

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether dtype and dropout are equal and there are no experts."""
        kinds = {(a.lambda_d.dtype, a.dropout) for a in adapters}
        return len(kinds) == 1 and all(a.dense or a.lambda_d.dim() == 1 for a in adapters)

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Apply to each row its own update. `x` `[rows, *tokens, d_in]`."""
        factors = [adapter.factors(base, x) for adapter in adapters]
        a, b = [a for a, _ in factors], [b for _, b in factors]
        scaling, one = [adapter.scaling for adapter in adapters], adapters[0]
        return grouped_low_rank(base(x), x, a, b, scaling, groups, one.dropout, one.training)

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + s · Λ_b B Λ_d A, `[*experts, d_out, d_in]`."""
        with exactly(w.device):
            a, b = self.factors(base, w)
            return w + self.scaling * (b @ a)

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor]:
        """Return Λ_d A and s · Λ_b B."""
        with exactly(w.device):
            a, b = self.factors(base, w)
        return a, self.scaling * b
