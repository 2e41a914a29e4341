"""The part of the base weight that an adapter of LoRA replaces, as PiSSA and OLoRA do.

PEFT subtracts s · B₀ A₀ from the base weight. Here the base stays as it is and the adapter
subtracts it: y = W x + s · (B A − B₀ A₀) x, which equals a LoRA of rank 2r with A' = [A; A₀] and
B' = [B, −B₀]. Files of the peers hold that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.averaging import Combination
from adapterzoo.configs import AdapterConfig
from adapterzoo.contracts import BaseLayer, compute_dtype
from adapterzoo.errors import ConfigError
from adapterzoo.fields import field

from ._init import generator
from ._low_rank import LowRank
from ._low_rank_config import LowRankConfig
from ._starts import Factors, Starts, factors, replaces_weight


@dataclass(frozen=True, kw_only=True)
class StartedConfig(LowRankConfig):
    """Base of the configs whose initial values may replace a part of the base weight.

    Attributes:
        init_weights: also "pissa", the principal part of the weight, by an exact SVD;
            "pissa_niter_4", by that many iterations of a randomized one; "olora", by QR.
    """

    init_weights: str = field("lora", Starts())

    @property
    def plain(self) -> LowRankConfig:
        """The config of an equal adapter without a start, of rank 2r."""
        if not replaces_weight(self.init_weights):
            return super().plain
        # the scaling stays as it is
        factor = math.sqrt(2) if self.use_rslora else 2
        return self.replace(
            init_weights="lora", r=2 * self.r, alpha=factor * self.alpha,
            rank_pattern={key: 2 * rank for key, rank in self.rank_pattern.items()},
            alpha_pattern={key: factor * alpha for key, alpha in self.alpha_pattern.items()},
        )  # fmt: skip

    def plain_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of the adapter of `plain`."""
        return joined(tensors) if replaces_weight(self.init_weights) else tensors

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> LowRankConfig:
        """Return the config of the combination, which has no start."""
        return super().combined([config.plain for config in configs], strategy, anatomy)


class Start(nn.Module):
    """The frozen factors A₀ and B₀ of an adapter whose initial values replace a part of W.

    Attributes:
        lora_A: A₀ `[*experts, r, d_in]`.
        lora_B: B₀ `[*experts, d_out, r]`.
    """

    lora_A: Tensor  # noqa: N815  as in files
    lora_B: Tensor  # noqa: N815

    def __init__(self, config: LowRankConfig, site: Site, a: Tensor, b: Tensor) -> None:
        """Make the factors, without values.

        Args:
            config: of the adapter.
            site: of the adapter.
            a: the adapter's A.
            b: the adapter's B.

        Raises:
            ConfigError: the site cannot have such initial values.
        """
        super().__init__()
        check_site(config, site)
        place = f"{site.path}{site.role}/start"
        self.drawing = config.init_weights, config.init_weights_seed, place
        self.register_buffer("lora_A", torch.empty_like(a.detach()))
        self.register_buffer("lora_B", torch.empty_like(b.detach()))

    def fill(self, w: Tensor, s: float) -> Factors:
        """Set the factors to those of a weight `[*experts, d_out, d_in]`, and return them.

        Args:
            w: the weight.
            s: the scaling.
        """
        name, seed, place = self.drawing
        w = w.detach().to(compute_dtype(w.dtype))
        a, b = factors(name, w, self.lora_A.shape[-2], s, generator(seed, place))
        self.lora_A.copy_(a)
        self.lora_B.copy_(b)
        # rounded values, so that the adapter starts as the identity
        return self.lora_A, self.lora_B

    def forward(self, x: Tensor) -> Tensor:
        """Return B₀ A₀ x, `[*batch, d_in]` → `[*batch, d_out]`, in the dtype of the factors."""
        return linear(linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an adapter with [A; A₀] and [B, −B₀] as its factors."""
    found = dict(tensors)
    a, b = found.pop("start.lora_A"), found.pop("start.lora_B")
    found["lora_A"] = torch.cat([found["lora_A"], a.to(found["lora_A"])], -2)
    found["lora_B"] = torch.cat([found["lora_B"], -b.to(found["lora_B"])], -1)
    return found


class Started(LowRank):
    """Base of the adapters with low-rank factors that may have a start.

    Attributes:
        start: the part of the base weight that the factors replace; None: none.
    """

    def __init__(
        self, config: StartedConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the factors.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the parameters.
            dtype: of the layer.

        Raises:
            ConfigError: the site cannot have the dropout or the initial values.
        """
        super().__init__(config, site, device, dtype)
        self.start: Start | None = None
        if replaces_weight(config.init_weights):
            self.start = Start(config, site, self.lora_A, self.lora_B)

    def init_from_layer(self, base: BaseLayer) -> None:
        """Take the initial values that replace a part of the weight."""
        if self.start is not None:
            a, b = self.start.fill(base.weight, self.scaling)
            self.lora_A.copy_(a)
            self.lora_B.copy_(b)

    def whole_factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B of the whole update, [A; A₀] and [B, −B₀]."""
        if self.start is None:
            return self.lora_A, self.lora_B
        both = joined(dict(self.state_dict(keep_vars=True)))
        return both["lora_A"], both["lora_B"]


def check_site(config: LowRankConfig, site: Site) -> None:
    """Check that initial values which replace a part of the weight exist at a site.

    Args:
        config: of LoRA.
        site: of the adapter.

    Raises:
        ConfigError: the layer is an embedding or too narrow, or the scaling is not positive.
    """
    rank, s, width = (
        config.rank_at(site.path),
        config.scaling_at(site.path),
        min(site.d_in, site.d_out),
    )
    hint, why = "init_weights='lora'", ""
    if site.kind == "embedding":
        why = "an embedding has no such initial values"
    elif rank > width:
        why, hint = f"a weight [{site.d_out}, {site.d_in}] has no rank {rank}", f"r={width}"
    elif not s > 0:
        why, hint = f"the scaling is {s:g}, and singular values are divided by it", "alpha=8"
    if why:
        raise ConfigError(
            f"{type(config).__name__}(init_weights={config.init_weights!r}) at {site.path!r}: "
            f"{why}. Write {hint}."
        )
