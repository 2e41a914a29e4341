"""The part of the base weight that an adapter of LoRA replaces, as PiSSA and OLoRA do.

PEFT subtracts s · B₀ A₀ from the base weight. Here the base stays as it is and the adapter
subtracts it: y = W x + s · (B A − B₀ A₀) x, which equals a LoRA of rank 2r with A' = [A; A₀] and
B' = [B, −B₀]. Files of the peers hold that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adapterzoo.anatomy import Site
from adapterzoo.contracts import BaseLayer, LayerData, OriginalWeight, compute_dtype
from adapterzoo.errors import ConfigError

from ._init import generator
from ._input_plans import OPTIONS
from ._input_statistics import Components, Covariance
from ._low_rank import LowRank
from ._low_rank_config import LowRankConfig
from ._started_config import StartedConfig, joined
from ._starts import Factors, factors, principal, replaces_weight, starts_from_weight


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
        """
        super().__init__()
        place = f"{site.path}{site.role}/start"
        self.drawing = config.init_weights, config.init_weights_seed, place
        self.register_buffer("lora_A", torch.empty_like(a.detach()))
        self.register_buffer("lora_B", torch.empty_like(b.detach()))

    def drawn(self, w: Tensor, s: float) -> Factors:
        """Return the factors of a weight.

        Args:
            w: the weight `[*experts, d_out, d_in]`, float32 or float64.
            s: the scaling.
        """
        name, seed, place = self.drawing
        return factors(name, w, self.lora_A.shape[-2], s, generator(seed, place))

    def forward(self, x: Tensor) -> Tensor:
        """Return B₀ A₀ x, `[*batch, d_in]` → `[*batch, d_out]`, in the dtype of the factors."""
        return linear(linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)


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
        self.reads_data = config.init_weights in OPTIONS
        self.options = config.options if self.reads_data else {}
        if starts_from_weight(config.init_weights):
            check_site(config, site)
        if replaces_weight(config.init_weights):
            self.start = Start(config, site, self.lora_A, self.lora_B)

    def init_from_layer(self, base: BaseLayer) -> None:
        """Take the initial values that replace a part of the weight."""
        if self.start is not None and not self.reads_data:
            self._begin(*self.start.drawn(_weight(base), self.scaling))

    def init_from_data(self, data: LayerData, base: BaseLayer) -> None:
        """Take the initial values that the inputs or the original weight of the layer give.

        Raises:
            ConfigError: there are values for the original weight, and a start beside them.
        """
        rank = self.lora_A.shape[-2]
        if isinstance(data, Components):
            self.lora_A.copy_(data.first(rank, self.options["whiten"]))
        elif isinstance(data, Covariance):
            keeps = self.options["corda_method"] == "kpm"
            self._begin(*data.factors(_weight(base), rank, self.scaling, keeps))
        elif isinstance(data, OriginalWeight):
            self._compensate(data.read(), base)

    def _compensate(self, original: Tensor, base: BaseLayer) -> None:
        """Take the principal part of what quantization has removed from the weight."""
        if self.start is not None:
            raise ConfigError(
                "the adapter replaces a part of the weight that the layer has. Add it with "
                "init_weights='lora'."
            )
        w = _weight(base)
        rank, s = self.lora_A.shape[-2], self.scaling
        for own, value in zip(
            (self.lora_A, self.lora_B), principal(original.to(w) - w, rank, s), strict=True
        ):
            own.copy_(value)

    def _begin(self, a: Tensor, b: Tensor) -> None:
        """Set the factors, and those of the start to the same rounded values."""
        start = cast("Start", self.start)
        for own, kept, value in ((self.lora_A, start.lora_A, a), (self.lora_B, start.lora_B, b)):
            own.copy_(value)
            kept.copy_(own)

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the tensors; a slot without a start gets the factors of the whole update."""
        tensors = dict(super().in_slot(slot))
        if self.start is not None and slot.start is None:
            return joined(tensors)
        if self.start is None and slot.start is not None:
            zeros = {key: torch.zeros_like(t) for key, t in slot.start.state_dict().items()}
            tensors |= {f"start.{key}": t for key, t in zeros.items()}
        return tensors

    def whole_factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B of the whole update, [A; A₀] and [B, −B₀]."""
        if self.start is None:
            return self.lora_A, self.lora_B
        both = joined(dict(self.state_dict(keep_vars=True)))
        return both["lora_A"], both["lora_B"]


def _weight(base: BaseLayer) -> Tensor:
    w = base.weight.detach()
    return w.to(compute_dtype(w.dtype))


def check_site(config: LowRankConfig, site: Site) -> None:
    """Check that a site can have initial values which are computed from its weight.

    Args:
        config: of LoRA.
        site: of the adapter.

    Raises:
        ConfigError: the layer is an embedding or too narrow, or the scaling is not positive.
    """
    rank, s, width = (
        config.rank_at(site.name),
        config.scaling_at(site.name),
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
