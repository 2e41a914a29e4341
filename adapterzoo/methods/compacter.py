"""Compacter — bottlenecks whose matrices are sums of Kronecker products, and Compacter++.

Papers: Mahabadi et al. 2021, arXiv:2106.04647; the sums are the hypercomplex multiplications of
Zhang et al. 2021, arXiv:2102.08597.
Both matrices of the bottleneck of `methods/bottleneck.py` are

    y = x H + b        H = Σᵢ Rᵢ ⊗ Wᵢ        Wᵢ = Lᵢ Tᵢ

over n = `phm_dim` products, with Rᵢ `[n, n]` shared by all layers, Lᵢ `[d_in / n, rank]` and Tᵢ
`[rank, d_out / n]`. H is never built. As x H = Σᵢ Rᵢᵀ X Lᵢ Tᵢ with X `[n, d_in / n]` the parts of
x, the down projection multiplies each part by all Lᵢ at once, and then by all Rᵢ ⊗ Tᵢ; the up
projection by all Rᵢ ⊗ Lᵢ, and then each part by all Tᵢ.

Differs from the papers: nothing. Differs from adapters: `hypercomplex_nonlinearity` is how W is
drawn, where adapters always draws glorot-normal; `learn_phm=False` freezes shared rules too; the
width is at least phm_dim; shared W that are not factorized, and init_weights="mam_adapter" (T of
the up projection zero), work. A seed gives each site values of its own. Not in PEFT.
Cost per site: 2 · rank · (d_model + width) + width + d_model parameters, and n³ numbers once for
all layers. Per token n · rank · (d_model + n · width) multiplications for each projection, where
a bottleneck has d_model · width. W that is not factorized, or of a rank above about width / n,
costs n · d_model · width multiplications per call to build H, then those of a bottleneck: with as
many numbers in W there is no cheaper product.
Cannot do: merging; init_weights="houlsby".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import nn

from adapterzoo.config_base import config_class
from adapterzoo.configs import config_strings
from adapterzoo.errors import ConfigError, listing

from ._bottleneck_sites import BnConfig
from ._hypercomplex import HypercomplexFields, Projection, projections
from ._hypercomplex_tensors import Drawing, check_widths, held, names, whole
from ._init import constant, drawn
from ._products import Product


@config_strings.register("compacter")
@config_class
class CompacterConfig(BnConfig):
    """Mahabadi et al. 2021: behind attention and behind the feed-forward part."""

    mh_adapter: bool = True
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 32
    non_linearity: str = "gelu"
    phm_layer: bool = True


@config_strings.register("compacter++")
@config_class
class CompacterPlusPlusConfig(CompacterConfig):
    """Mahabadi et al. 2021: behind the feed-forward part alone."""

    mh_adapter: bool = False
    original_ln_before: bool = True


@projections.register("phm")
class HypercomplexProjection(Projection):
    """y = x Σᵢ Rᵢ ⊗ Wᵢ + b.

    Attributes:
        phm_rule: R `[n, n, n]`; or `phm_rule_left` `[n, n, 1]` and `phm_rule_right` `[n, 1, n]`.
        W: `[n, d_in / n, d_out / n]`; or `W_left` `[n, d_in / n, rank]` and `W_right`
            `[n, rank, d_out / n]`.
        b: `[d_out]`, or None.
    """

    b: nn.Parameter | None

    def __init__(
        self,
        config: HypercomplexFields,
        part: Literal["down", "up"],
        d_in: int,
        d_out: int,
        *,
        zero: bool,
        source: torch.Generator | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make what the layer does not share; the bias starts as zero."""
        super().__init__(
            config, part, d_in, d_out, zero=zero, source=source, device=device, dtype=dtype
        )
        check_widths(config, d_in, d_out)
        self.d_in, self.d_out, self.n = d_in, d_out, config.phm_dim
        self.shares_rule, self.shares_w = config.shared_phm_rule, config.shared_W_phm
        self.rule_names = names("phm_rule", config.factorized_phm_rule)
        own_w = names("W", config.factorized_phm_W)
        self.w_names = names(f"W_{part}", config.factorized_phm_W) if self.shares_w else own_w
        narrow, wide = sorted((d_in, d_out))
        products = self.n * config.phm_rank * (wide + self.n * narrow)
        self.is_low_rank = config.factorized_phm_W and products < d_in * d_out
        put = Drawing(config, source, device, dtype)
        if not self.shares_rule:
            # the peer's deviations: those of a shared rule are a field
            put.rule(self, 0.01, 0.01)
        if not self.shares_w:
            put.w(self, own_w, d_in, d_out, zero)
        bias = drawn((d_out,), constant(0.0), device, dtype) if config.phm_bias else None
        self.register_parameter("b", bias)
        self.phm_rank = config.phm_rank

    @classmethod
    def shared(
        cls,
        config: HypercomplexFields,
        widths: Collection[tuple[int, int]],
        *,
        zero: bool,
        source: torch.Generator | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Return the shared R, and W as `W_down` and `W_up`."""
        made, put = nn.Module(), Drawing(config, source, device, dtype)
        if config.shared_phm_rule:
            put.rule(made, config.phm_init_range, 1.0)
        if config.shared_W_phm:
            if len(widths) > 1:
                shown = listing(f"{d_model} → {width}" for d_model, width in sorted(widths))
                raise ConfigError(
                    f"{type(config).__name__}(shared_W_phm=True): bottlenecks of widths {shown} "
                    f"cannot share one W. Write shared_W_phm=False, or leave_out=[…] and one "
                    f"reduction_factor."
                )
            ((d_model, width),) = widths
            check_widths(config, d_model, width)
            for part, sizes, is_zero in (
                ("down", (d_model, width), False),
                ("up", (width, d_model), zero),
            ):
                put.w(made, names(f"W_{part}", config.factorized_phm_W), *sizes, is_zero)
        return made

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Shapes and dtype."""
        own = next((t.dtype for t in self.state_dict().values()), None)
        forms = self.rule_names, self.w_names, self.phm_rank, self.b is None
        return self.d_in, self.d_out, self.n, own, *forms

    def product(self, shared: nn.Module | None, device: torch.device) -> Product:
        """Return H as two matrices, or one, each `[out, in]`."""
        w = held(shared if self.shares_w else self, self.w_names)
        w = tuple(t.to(device) for t in w)
        rule = whole(held(shared if self.shares_rule else self, self.rule_names))
        rule = rule.to(device, w[0].dtype)  # [n, n, n]
        bias = None if self.b is None else self.b.to(w[0].dtype)
        if not self.is_low_rank:
            h = torch.einsum("iac,ibd->cdab", rule, whole(w))
            return Product((h.reshape(self.d_out, self.d_in),), (1,), bias)
        left, right = w
        n, rank = self.n, left.shape[2]
        # the rule goes to the narrower side
        if self.d_in >= self.d_out:
            first = left.transpose(1, 2).reshape(n * rank, -1)  # [n · rank, d_in / n]
            last = torch.einsum("iac,ikd->cdaik", rule, right).reshape(self.d_out, -1)
            return Product((first, last), (n, 1), bias)
        first = torch.einsum("iac,ibk->cikab", rule, left).reshape(-1, self.d_in)
        last = right.permute(2, 0, 1).reshape(-1, n * rank)  # [d_out / n, n · rank]
        return Product((first, last), (1, n), bias)

    def extra_repr(self) -> str:
        """Return widths and sizes."""
        return f"d_in={self.d_in}, d_out={self.d_out}, phm_dim={self.n}"
