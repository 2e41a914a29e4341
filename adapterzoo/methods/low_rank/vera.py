"""VeRA — Vector-based Random Matrix Adaptation, and DVoRA — DoRA with the update of VeRA.

Papers: Kopiczko et al. 2023, arXiv:2310.11454, eq. 2 and §3.2; DVoRA: Liu et al. 2024,
arXiv:2402.09353, §5.3.
VeRA:  y = W x + b + Λ_b B Λ_d A x
DVoRA: W' = m · V / ‖V‖ with V = W + Λ_b B Λ_d A, the norm taken over d_in for each output row;
gradients treat the norm as a constant.
A `[r, d_in]` and B `[d_out, r]` are random, frozen and shared by all layers; Λ_d and Λ_b are
diagonal and trained. The widest layer sets the size of A and B; other layers take the first columns
of A and rows of B.

Differs from the papers: nothing; dropout before A is off by default; m stays in float32 over
half-precision layers. Differs from PEFT: a layer that is adapted twice keeps one copy of A and B;
vectors have the dtype of their layer; it has no DVoRA. Differs from adapters: in all of this,
except with `convention="adapterhub"`, which computes the same: dense trained matrices `[r, r]` and
`[d_out, d_out]` in place of Λ, and a factor alpha / r, which is not in the norm of DVoRA;
gradients pass through that norm, and the bias is also multiplied by m / ‖V‖.
Cost per site: r + d_out parameters, LoRA's products; r · (d_in + d_out) numbers once for all. A
step keeps only A x; PEFT also keeps B Λ_d A x, and saves one product. DVoRA: d_out more parameters,
DoRA's products.
Cannot do: embeddings; DVoRA also layers without a floating-point weight, which has norms.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from adapterzoo.anatomy import Site
from adapterzoo.config import (
    FACTOR,
    Choice,
    Maybe,
    Placement,
    Range,
    Share,
    config_class,
    field,
    method_config,
)
from adapterzoo.contracts import BaseLayer, WeightAdapter
from adapterzoo.errors import ConfigError
from adapterzoo.kernels.grouped import RowGroups, grouped_low_rank
from adapterzoo.kernels.low_rank import expand
from adapterzoo.kernels.ops import exactly
from adapterzoo.methods._init import DTYPE, constant, drawn, dtype_named, generator, normal
from adapterzoo.methods._targets import RANK, TargetedConfig, check_site, refuse_larger

from .dora import Magnitudes
from .factors import Factors


@config_class
class ProjectedConfig(TargetedConfig):
    """Base of the configs with shared projections; `TargetedConfig` chooses the layers.

    Attributes:
        r: rank of the shared matrices, 1 to 65,536.
        vera_d: initial value of Λ_d.
        vera_b: initial value of Λ_b; 0 leaves the model unchanged.
        dropout: probability, 0 to below 1, of dropping an input feature on the way to A.
        projection_prng_key: seed of A and B, from 0.
        init_weights: "vera": the two values above; "random": Λ_d is normal and Λ_b one, as in PEFT.
        init_weights_seed: seed of A and B instead of `projection_prng_key`, as in adapters.
        convention: "paper", which is also PEFT's; or "adapterhub": dense matrices, times alpha / r.
        alpha: alpha of the convention "adapterhub".
        dtype: dtype of the parameters, by name ("float32"); None for that of the layer.
    """

    r: int = field(256, RANK)
    vera_d: float = field(0.1, FACTOR)
    vera_b: float = field(0.0, FACTOR)
    dropout: float = field(0.0, Share())
    projection_prng_key: int = field(0, Range(0, 2**63 - 1))
    init_weights: str = field("vera", Choice("vera", "random"))
    init_weights_seed: int | None = field(None, Maybe(Range(0, 2**63 - 1)))
    convention: str = field("paper", Choice("paper", "adapterhub"))
    alpha: float = field(8, FACTOR, needs="convention='adapterhub'")
    dtype: str | None = field(None, DTYPE)

    @property
    def slot_fields(self) -> frozenset[str]:
        """The fields of initial values; also the rank, if no scaling depends on it."""
        paper = frozenset({"r", "alpha"}) if self.convention == "paper" else frozenset()
        return super().slot_fields | paper | {"vera_d", "vera_b"}

    def of_rank(self, rank: int) -> Self:
        """Return the config with the rank; in the paper, no scaling depends on it."""
        if self.convention != "paper":
            return self
        refuse_larger(self, rank, (self.r,))
        return self.replace(r=rank)

    @property
    def starts_as_identity(self) -> bool:
        """Whether Λ_b starts as zero."""
        return self.vera_b == 0.0 and self.init_weights == "vera"

    def shared(
        self, placements: Sequence[Placement], device: torch.device, dtype: torch.dtype
    ) -> Projections:
        """Return A and B of all layers, as wide as the widest."""
        sites = [placement.site for placement in placements]
        return Projections(self, sites, device, dtype)


@method_config("vera")
class VeraConfig(ProjectedConfig):
    """Config of VeRA; `TargetedConfig` chooses the layers, `ProjectedConfig` the rest.

    Attributes:
        save_projection: whether files in PEFT's format hold A and B; if not, PEFT and this library
            draw them again from `projection_prng_key`. Other formats always hold them.
    """

    training_fields = ProjectedConfig.training_fields | {"save_projection"}

    save_projection: bool = field(True, ours=True)


@method_config("dvora")
class DvoRAConfig(ProjectedConfig):
    """Config of DVoRA; `TargetedConfig` chooses the layers, `ProjectedConfig` the rest.

    In the convention "adapterhub" the norm is that of W + B A without the factor alpha / r,
    gradients pass through it, and the bias is multiplied by m / ‖V‖.
    """

    @property
    def gradients_are_exact(self) -> bool:
        """False in the paper's convention, which treats the norm as a constant (§4.3)."""
        return self.convention == "adapterhub"


class Projections(nn.Module):
    """The frozen A and B of all layers of an adapter.

    Attributes:
        lora_A: `[r, widest d_in]`.
        lora_B: `[widest d_out, r]`.
    """

    lora_A: Tensor  # noqa: N815
    lora_B: Tensor  # noqa: N815

    def __init__(
        self,
        config: ProjectedConfig,
        sites: Sequence[Site],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Draw A, then B, from one generator, as PEFT does, for all layers of the adapter.

        They are rounded to `dtype`, the layers' dtype, even if the adapter's is wider.
        """
        super().__init__()
        seed = config.init_weights_seed
        source = torch.Generator().manual_seed(config.projection_prng_key if seed is None else seed)
        kaiming = partial(nn.init.kaiming_uniform_, generator=source)
        d_in, d_out = max(site.d_in for site in sites), max(site.d_out for site in sites)
        # buffers: saved and moved, but never trained
        for name, shape in (("lora_A", (config.r, d_in)), ("lora_B", (d_out, config.r))):
            made = drawn(shape, kaiming, device, dtype).detach()
            self.register_buffer(name, made.to(dtype_named(config.dtype, dtype)))


class Projected(WeightAdapter):
    """Base of the adapters with the update s · Λ_b B Λ_d A.

    Attributes:
        lambda_d: the diagonal `[r]`, with experts first if the site has any; dense `[r, r]`
            in the convention of adapters.
        lambda_b: the diagonal `[d_out]`, likewise; dense `[d_out, d_out]`.
        scaling: the factor s, 1 in the paper.
        dropout: probability on the way to A.
    """

    container = "loras"

    def __init__(
        self, config: ProjectedConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Create the scales.

        Args:
            config: the adapter's config.
            site: the site, which sets the widths.
            device: device for the parameters.
            dtype: the layer's dtype.

        Raises:
            ConfigError: the site cannot have such an adapter.
        """
        super().__init__()
        self.dense = config.convention == "adapterhub"
        check_site(config, site, "dropout")
        if self.dense and site.is_only_read:
            raise ConfigError(
                f"{type(config).__name__}(convention='adapterhub') at {site.path!r}: it is only "
                f"for layers that are called. Write convention='paper'."
            )
        dtype = dtype_named(config.dtype, dtype)
        self.scaling = config.alpha / config.r if self.dense else 1.0
        self.dropout = config.dropout
        self.d_in, self.d_out = site.d_in, site.d_out
        self.lambda_d = self._scales((*site.lead, config.r), config.vera_d, device, dtype)
        self.lambda_b = self._scales((*site.lead, site.d_out), config.vera_b, device, dtype)
        if config.init_weights == "random":
            source = generator(config.init_weights_seed, f"{site.path}{site.role}")
            fill = normal(1.0, source)
            self.lambda_d = drawn((*site.lead, config.r), fill, device, dtype)
            self.lambda_b = drawn((*site.lead, site.d_out), constant(1.0), device, dtype)

    def _scales(
        self, shape: tuple[int, ...], value: float, device: torch.device, dtype: torch.dtype
    ) -> nn.Parameter:
        if not self.dense:
            return drawn(shape, constant(value), device, dtype)
        size = shape[-1]
        return drawn((size, size), lambda t: t.zero_().fill_diagonal_(value), device, dtype)

    def projections(self, base: BaseLayer, like: Tensor) -> Factors:
        """Return the part of A `[r, d_in]` and B `[d_out, r]`, with device and dtype of `like`."""
        shared = cast("Projections", base.shared(self))
        a, b = shared.lora_A[:, : self.d_in], shared.lora_B[: self.d_out]
        return a.to(like.device, like.dtype), b.to(like.device, like.dtype)

    def factors(self, base: BaseLayer, like: Tensor) -> Factors:
        """Return Λ_d A `[*experts, r, d_in]` and Λ_b B `[*experts, d_out, r]`, likewise."""
        a, b = self.projections(base, like)
        d, s = self.lambda_d.to(a.dtype), self.lambda_b.to(b.dtype)
        return (d @ a, s @ b) if self.dense else (d.unsqueeze(-1) * a, s.unsqueeze(-1) * b)


class Vera(Projected):
    """y = base(x) + s · Λ_b B Λ_d A dropout(x), with s = 1 in the paper."""

    is_additive = True

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output with the update. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y = base(x)
        a, b = self.projections(base, self.lambda_d)
        t = linear(dropout(x.to(a.dtype), self.dropout, self.training), a)  # [*batch, r]
        if self.dense:
            update = linear(linear(linear(t, self.lambda_d), b), self.lambda_b)  # [*batch, d_out]
            return torch.add(y, update.to(y.dtype), alpha=self.scaling)
        # with all scales in one small matrix, only A x is kept, and no pass over y is added
        scaled = b * torch.outer(self.lambda_b, self.lambda_d)  # Λ_b B Λ_d [d_out, r]
        return expand(y, t, scaled, self.scaling)

    @property
    def row_options(self) -> Hashable | None:
        """Dtype and dropout; None with experts."""
        is_one = self.dense or self.lambda_d.dim() == 1
        return (self.lambda_d.dtype, self.dropout) if is_one else None

    def row_tensors(self, base: BaseLayer, dtype: torch.dtype) -> Mapping[str, Tensor | float]:
        """Return Λ_d A, Λ_b B and s."""
        a, b = self.factors(base, self.lambda_d)
        return {"lora_A": a, "lora_B": b, "scaling": self.scaling}

    def forward_rows(
        self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row with its own update. `x` `[rows, *tokens, d_in]`."""
        a, b, scaling = stacks["lora_A"], stacks["lora_B"], stacks["scaling"]
        return grouped_low_rank(base(x), x, a, b, scaling, groups, self.dropout, self.training)

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + s · Λ_b B Λ_d A, `[*experts, d_out, d_in]`."""
        with exactly(w.device):
            a, b = self.factors(base, w)
            return w + self.scaling * (b @ a)

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> Factors:
        """Return Λ_d A and s · Λ_b B."""
        with exactly(w.device):
            a, b = self.factors(base, w)
        return a, self.scaling * b


VeraConfig.adapter_class = Vera


class DvoRA(Magnitudes, Projected):
    """y = g (W x + s · Λ_b B Λ_d A dropout(x)) + bias with g = m / ‖W + s · Λ_b B Λ_d A‖."""

    factor = "lambda_d"

    def update_factors(self, base: BaseLayer) -> Factors:
        """Return Λ_d A and Λ_b B."""
        with exactly(self.lambda_d.device):
            return self.factors(base, self.lambda_d)

    def sources_of_gain(self, base: BaseLayer) -> list[Tensor]:
        """Return the tensors that g is computed from, including the projections."""
        return [*super().sources_of_gain(base), *base.shared(self).buffers()]


DvoRAConfig.adapter_class = DvoRA
