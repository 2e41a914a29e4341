"""VeRA — Vector-based Random Matrix Adaptation.

Paper: Kopiczko et al. 2023, arXiv:2310.11454, eq. 2 and §3.2.
y = W x + b + Λ_b B Λ_d A x with A `[r, d_in]` and B `[d_out, r]` random, frozen and shared by all
layers; Λ_d and Λ_b are diagonal and trained. Wider layers set the size of A and B, others take the
first columns of A and rows of B.

Differs from the paper: nothing; dropout before A is off by default. Differs from PEFT: a layer that
is adapted twice keeps one copy of A and B; the vectors live in the dtype of their layer. Differs
from adapters: all of it but `convention="adapterhub"`, which is what adapters computes: dense
trained matrices `[r, r]` and `[d_out, d_out]` in the place of Λ, and a factor alpha / r.
Cost per site: r + d_out parameters, LoRA's two products; r · (d_in + d_out) numbers once for all.
Cannot do: embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from adapterzoo.anatomy import Site
from adapterzoo.configs import Placement, architectures, config_strings
from adapterzoo.contracts import BaseLayer, WeightAdapter
from adapterzoo.errors import ConfigError
from adapterzoo.fields import FACTOR, MAX_WIDTH, Choice, Range, Share, field
from adapterzoo.kernels.exact import exactly
from adapterzoo.kernels.grouped import Groups, grouped_low_rank
from adapterzoo.spelling import spelled

from . import _vera_spelling
from ._init import DTYPE, DTYPES, constant, drawn
from ._targets import TargetedConfig


@architectures.register("vera")
@config_strings.register("vera")
@spelled(_vera_spelling.adapterhub, _vera_spelling.peft)
@dataclass(frozen=True, kw_only=True)
class VeraConfig(TargetedConfig):
    """Config of VeRA; `TargetedConfig` says where the adapters sit.

    Attributes:
        r: rank of the shared matrices, 1 to 65,536.
        vera_d: initial value of Λ_d.
        vera_b: initial value of Λ_b; 0 leaves the model as it was.
        dropout: probability, 0 to below 1, of dropping an input feature on the way to A.
        projection_prng_key: seed of A and B, from 0.
        convention: "paper", which is PEFT's too; or "adapterhub": dense matrices, times alpha / r.
        alpha: of the convention "adapterhub".
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    architecture: ClassVar[str] = "vera"

    r: int = field(256, Range(1, MAX_WIDTH))
    vera_d: float = field(0.1, FACTOR)
    vera_b: float = field(0.0, FACTOR)
    dropout: float = field(0.0, Share())
    projection_prng_key: int = field(0, Range(0, 2**63 - 1))
    convention: str = field("paper", Choice("paper", "adapterhub"))
    alpha: float = field(8, FACTOR)
    dtype: str | None = field(None, DTYPE)

    @property
    def starts_as_identity(self) -> bool:
        """Whether Λ_b starts as zero."""
        return self.vera_b == 0.0

    def shared(
        self, placements: Sequence[Placement], device: torch.device, dtype: torch.dtype
    ) -> Projections:
        """Return A and B of all layers, as wide as the widest."""
        sites = [placement.site for placement in placements]
        return Projections(self, sites, device, DTYPES[self.dtype] if self.dtype else dtype)

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Vera:
        """Return a new adapter for the site."""
        return Vera(self, site, device, DTYPES[self.dtype] if self.dtype else dtype)


class Projections(nn.Module):
    """The frozen A and B of all layers of an adapter.

    Attributes:
        lora_A: `[r, widest d_in]`.
        lora_B: `[widest d_out, r]`.
    """

    lora_A: Tensor  # noqa: N815
    lora_B: Tensor  # noqa: N815

    def __init__(
        self, config: VeraConfig, sites: Sequence[Site], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Draw A, then B, from one generator, as PEFT does, for all layers of the adapter."""
        super().__init__()
        source = torch.Generator().manual_seed(config.projection_prng_key)

        def kaiming(t: Tensor) -> Tensor:
            return nn.init.kaiming_uniform_(t, generator=source)

        d_in, d_out = max(site.d_in for site in sites), max(site.d_out for site in sites)
        # buffers: they are saved and moved, and never trained
        self.register_buffer("lora_A", drawn((config.r, d_in), kaiming, device, dtype).detach())
        self.register_buffer("lora_B", drawn((d_out, config.r), kaiming, device, dtype).detach())


class Vera(WeightAdapter):
    """y = base(x) + s · Λ_b B Λ_d A dropout(x), with s = 1 in the paper.

    Attributes:
        lambda_d: the diagonal `[r]`, with experts in front where the site has them; dense `[r, r]`
            in the convention of adapters.
        lambda_b: the diagonal `[d_out]`, likewise; dense `[d_out, d_out]`.
        scaling: the factor s.
    """

    is_additive = True

    def __init__(
        self, config: VeraConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters; raise a `ConfigError` at a site that VeRA cannot adapt."""
        super().__init__()
        self.dense = config.convention == "adapterhub"
        if site.kind == "embedding" or (site.parameter and (self.dense or config.dropout)):
            plain = "" if site.kind == "embedding" else "convention='paper', dropout=0.0, or "
            what = "a parameter of its module" if plain else "an embedding"
            raise ConfigError(
                f"VeraConfig(convention={config.convention!r}, dropout={config.dropout}) at "
                f"{site.path!r}: VeRA cannot adapt {what} in this way. Write {plain}"
                f"exclude_modules=[{site.path!r}]."
            )
        lead = (site.experts,) if site.experts else ()
        self.scaling = config.alpha / config.r if self.dense else 1.0
        self.dropout = config.dropout
        self.d_in, self.d_out = site.d_in, site.d_out
        self.lambda_d = self._diagonal((*lead, config.r), config.vera_d, device, dtype)
        self.lambda_b = self._diagonal((*lead, site.d_out), config.vera_b, device, dtype)

    def _diagonal(
        self, shape: tuple[int, ...], value: float, device: torch.device, dtype: torch.dtype
    ) -> nn.Parameter:
        if not self.dense:
            return drawn(shape, constant(value), device, dtype)
        size = shape[-1]
        return drawn((size, size), lambda t: t.zero_().fill_diagonal_(value), device, dtype)

    def _factors(self, base: BaseLayer, like: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's part of A `[r, d_in]` and B `[d_out, r]`, where and as `like` is."""
        shared = cast("Projections", base.shared(self))
        a, b = shared.lora_A[:, : self.d_in], shared.lora_B[: self.d_out]
        return a.to(like.device, like.dtype), b.to(like.device, like.dtype)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output with the update. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y = base(x)
        a, b = self._factors(base, self.lambda_d)
        t = linear(dropout(x.to(a.dtype), self.dropout, self.training), a)  # [*batch, r]
        t = linear(t, self.lambda_d) if self.dense else t * self.lambda_d
        update = linear(t, b)  # [*batch, d_out]
        update = linear(update, self.lambda_b) if self.dense else update * self.lambda_b
        return torch.add(y, update.to(y.dtype), alpha=self.scaling)

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
        factors = [adapter._scaled(*adapter._factors(base, x)) for adapter in adapters]
        a, b = [a for a, _ in factors], [b for _, b in factors]
        scaling, one = [adapter.scaling for adapter in adapters], adapters[0]
        return grouped_low_rank(base(x), x, a, b, scaling, groups, one.dropout, one.training)

    def _scaled(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Λ_d A `[*experts, r, d_in]` and Λ_b B `[*experts, d_out, r]`, in the dtype of A."""
        d, s = self.lambda_d.to(a.dtype), self.lambda_b.to(b.dtype)
        return (d @ a, s @ b) if self.dense else (d.unsqueeze(-1) * a, s.unsqueeze(-1) * b)

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + s · Λ_b B Λ_d A, `[*experts, d_out, d_in]`."""
        with exactly(w.device):
            a, b = self._scaled(*self._factors(base, w))
            return w + self.scaling * (b @ a)

    def extra_repr(self) -> str:
        """Widths and rank."""
        return f"d_in={self.d_in}, d_out={self.d_out}, rank={self.lambda_d.shape[-1]}"
