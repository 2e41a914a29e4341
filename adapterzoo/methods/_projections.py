"""Random projections that all layers of an adapter share, with scales for each layer.

The update is s · Λ_b B Λ_d A with A `[r, d_in]` and B `[d_out, r]` random and frozen, as wide as
the widest layer; others take the first columns of A and rows of B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from adapterzoo.anatomy import Site
from adapterzoo.config_base import config_class
from adapterzoo.configs import Placement
from adapterzoo.contracts import BaseLayer, WeightAdapter
from adapterzoo.errors import ConfigError
from adapterzoo.fields import FACTOR, MAX_WIDTH, Choice, Maybe, Range, Share, field

from ._init import DTYPE, DTYPES, constant, drawn
from ._slots import refuse_larger
from ._targets import TargetedConfig


@config_class
class ProjectedConfig(TargetedConfig):
    """Base of the configs with shared projections.

    Attributes:
        r: rank of the shared matrices, 1 to 65,536.
        vera_d: initial value of Λ_d.
        vera_b: initial value of Λ_b; 0 leaves the model as it was.
        dropout: probability, 0 to below 1, of dropping an input feature on the way to A.
        projection_prng_key: seed of A and B, from 0.
        init_weights: must be "vera", as above.
        init_weights_seed: seed of A and B instead of `projection_prng_key`, as in adapters.
        convention: "paper", which is PEFT's too; or "adapterhub": dense matrices, times alpha / r.
        alpha: of the convention "adapterhub".
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    r: int = field(256, Range(1, MAX_WIDTH))
    vera_d: float = field(0.1, FACTOR)
    vera_b: float = field(0.0, FACTOR)
    dropout: float = field(0.0, Share())
    projection_prng_key: int = field(0, Range(0, 2**63 - 1))
    init_weights: str = field("vera", Choice("vera"))
    init_weights_seed: int | None = field(None, Maybe(Range(0, 2**63 - 1)))
    convention: str = field("paper", Choice("paper", "adapterhub"))
    alpha: float = field(8, FACTOR)
    dtype: str | None = field(None, DTYPE)

    @property
    def slot_fields(self) -> frozenset[str]:
        """The initial values; the rank where no scaling depends on it."""
        paper = frozenset({"r", "alpha"}) if self.convention == "paper" else frozenset()
        return super().slot_fields | paper | {"vera_d", "vera_b"}

    def of_rank(self, rank: int) -> Self:
        """Return the config with the rank, which no scaling depends on in the paper."""
        if self.convention != "paper":
            return self
        refuse_larger(self, rank, (self.r,))
        return self.replace(r=rank)

    @property
    def starts_as_identity(self) -> bool:
        """Whether Λ_b starts as zero."""
        return self.vera_b == 0.0

    def shared(
        self, placements: Sequence[Placement], device: torch.device, dtype: torch.dtype
    ) -> Projections:
        """Return A and B of all layers, as wide as the widest."""
        sites = [placement.site for placement in placements]
        return Projections(self, sites, device, dtype)

    def dtype_at(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the parameters at a layer of the given dtype."""
        return DTYPES[self.dtype] if self.dtype else dtype


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

        They are rounded to `dtype`, that of the layers, also if the adapter's is wider.
        """
        super().__init__()
        seed = config.init_weights_seed
        source = torch.Generator().manual_seed(config.projection_prng_key if seed is None else seed)

        def kaiming(t: Tensor) -> Tensor:
            return nn.init.kaiming_uniform_(t, generator=source)

        d_in, d_out = max(site.d_in for site in sites), max(site.d_out for site in sites)
        # buffers: they are saved and moved, and never trained
        for name, shape in (("lora_A", (config.r, d_in)), ("lora_B", (d_out, config.r))):
            made = drawn(shape, kaiming, device, dtype).detach()
            self.register_buffer(name, made.to(config.dtype_at(dtype)))


class Projected(WeightAdapter):
    """Base of the adapters with the update s · Λ_b B Λ_d A.

    Attributes:
        lambda_d: the diagonal `[r]`, with experts in front where the site has them; dense `[r, r]`
            in the convention of adapters.
        lambda_b: the diagonal `[d_out]`, likewise; dense `[d_out, d_out]`.
        scaling: the factor s, 1 in the paper.
        dropout: probability on the way to A.
    """

    container = "loras"

    def __init__(
        self, config: ProjectedConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the scales.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the parameters.
            dtype: of the layer.

        Raises:
            ConfigError: the site cannot have such an adapter.
        """
        super().__init__()
        self.dense = config.convention == "adapterhub"
        if site.kind == "embedding" or (site.is_only_read and (self.dense or config.dropout)):
            plain = "" if site.kind == "embedding" else "convention='paper', dropout=0.0, or "
            what = "a parameter of its module" if plain else "an embedding"
            raise ConfigError(
                f"{type(config).__name__}(convention={config.convention!r}, "
                f"dropout={config.dropout}) at {site.path!r}: the method cannot adapt {what} in "
                f"this way. Write {plain}exclude_modules=[{site.path!r}]."
            )
        dtype = config.dtype_at(dtype)
        lead = (site.experts,) if site.experts else ()
        self.scaling = config.alpha / config.r if self.dense else 1.0
        self.dropout = config.dropout
        self.d_in, self.d_out = site.d_in, site.d_out
        self.lambda_d = self._scales((*lead, config.r), config.vera_d, device, dtype)
        self.lambda_b = self._scales((*lead, site.d_out), config.vera_b, device, dtype)

    def _scales(
        self, shape: tuple[int, ...], value: float, device: torch.device, dtype: torch.dtype
    ) -> nn.Parameter:
        if not self.dense:
            return drawn(shape, constant(value), device, dtype)
        size = shape[-1]
        return drawn((size, size), lambda t: t.zero_().fill_diagonal_(value), device, dtype)

    def projections(self, base: BaseLayer, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's part of A `[r, d_in]` and B `[d_out, r]`, where and as `like` is."""
        shared = cast("Projections", base.shared(self))
        a, b = shared.lora_A[:, : self.d_in], shared.lora_B[: self.d_out]
        return a.to(like.device, like.dtype), b.to(like.device, like.dtype)

    def factors(self, base: BaseLayer, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return Λ_d A `[*experts, r, d_in]` and Λ_b B `[*experts, d_out, r]`, as `like` is."""
        a, b = self.projections(base, like)
        d, s = self.lambda_d.to(a.dtype), self.lambda_b.to(b.dtype)
        return (d @ a, s @ b) if self.dense else (d.unsqueeze(-1) * a, s.unsqueeze(-1) * b)

    def down(self, x: Tensor, a: Tensor) -> Tensor:
        """Return A dropout(x), `[*batch, d_in]` → `[*batch, r]`."""
        return linear(dropout(x.to(a.dtype), self.dropout, self.training), a)

    def shrunk(self, x: Tensor, a: Tensor) -> Tensor:
        """Return Λ_d A dropout(x), `[*batch, d_in]` → `[*batch, r]`."""
        t = self.down(x, a)
        return linear(t, self.lambda_d) if self.dense else t * self.lambda_d

    def extra_repr(self) -> str:
        """Return widths and rank."""
        return f"d_in={self.d_in}, d_out={self.d_out}, rank={self.lambda_d.shape[-1]}"
