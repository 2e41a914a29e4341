"""What LoHa and LoKr share: the fields of their configs, and their dropout.

Paper: Yeh et al. 2023 (LyCORIS), arXiv:2309.14859. y = W x + b + s · ΔW x with s = alpha / r; the
methods differ in ΔW. In training `rank_dropout` drops rows of ΔW, the same for a whole call, and
`module_dropout` all of ΔW.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.config_base import config_class
from adapterzoo.contracts import BaseLayer, WeightAdapter
from adapterzoo.errors import ConfigError
from adapterzoo.fields import MAX_WIDTH, Check, Range, Share, field
from adapterzoo.kernels.ops import exactly

from ._sizes import SizedConfig
from ._slots import refuse_larger, rescaled

_RANK = Range(1, MAX_WIDTH)


class _Off(Check):
    """False, in a field of PEFT for convolutions."""

    legal = (
        "False: convolutions have no adapters here, and linear layers are not decomposed like them"
    )

    def fits(self, value: object) -> bool:
        """Return whether it is False."""
        return value is False


@config_class
class LycorisConfig(SizedConfig):
    """Base of the configs of LoHa and LoKr; `SizedConfig` has ranks and scalings.

    Attributes:
        rank_dropout: probability, 0 to below 1, of dropping a row of ΔW in a training step.
        module_dropout: probability, 0 to below 1, of dropping the whole ΔW of a layer.
        use_effective_conv2d: must be False; PEFT's decomposition of convolutions.
    """

    training_fields = SizedConfig.training_fields | {"rank_dropout", "module_dropout"}

    rank_dropout: float = field(0.0, Share())
    module_dropout: float = field(0.0, Share())
    use_effective_conv2d: bool = field(False, _Off())

    def of_rank(self, rank: int) -> Self:
        """Return the config of one rank for all layers, with the scaling of r."""
        refuse_larger(self, rank, (self.r, *self.rank_pattern.values()))
        alpha = self.alpha * rank / self.r
        return self.replace(r=rank, alpha=alpha, rank_pattern={}, alpha_pattern={})

    def scaling_at(self, name: str) -> float:
        """Return the factor s of the adapter at a site, by `Site.name`."""
        return self.alpha_at(name) / self.rank_at(name)


class Lycoris(WeightAdapter):
    """Base of the adapters y = W x + b + s · ΔW x.

    Attributes:
        scaling: the factor s.
        rank_dropout: probability of dropping a row of ΔW.
        module_dropout: probability of dropping ΔW.
        scaled: keys of the first factor of ΔW.
        rescales: whether the rows that are kept are divided by their share.
    """

    is_additive = True
    rescales = True
    scaled: ClassVar[tuple[str, ...]]

    def __init__(self, config: LycorisConfig, site: Site) -> None:
        """Set what does not depend on ΔW.

        Args:
            config: of the adapter.
            site: gives the widths.

        Raises:
            ConfigError: the site is an embedding, or a parameter, and there is dropout.
        """
        super().__init__()
        self.scaling = config.scaling_at(site.name)
        self.rank_dropout, self.module_dropout = config.rank_dropout, config.module_dropout
        self.d_in, self.d_out = site.d_in, site.d_out
        dropouts = f"rank_dropout={self.rank_dropout}, module_dropout={self.module_dropout}"
        drops = bool(self.rank_dropout or self.module_dropout)
        if site.kind == "embedding" or (drops and site.is_only_read):
            why = (
                "the module computes with its parameters, merged or not. Write rank_dropout=0.0, "
                "module_dropout=0.0."
                if site.is_only_read
                else f"the method cannot adapt an embedding. Write exclude_modules=[{site.path!r}]."
            )
            raise ConfigError(f"{type(config).__name__}({dropouts}) at {site.path!r}: {why}")

    @abstractmethod
    def delta(self, dtype: torch.dtype) -> Tensor:
        """Return ΔW `[*experts, d_out, d_in]` without s, in the dtype."""

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the tensors, with the ratio of the scalings in one factor."""
        return rescaled(self.state_dict(), self.scaling, slot.scaling, self.scaled)

    def kept_rows(self, like: Tensor) -> Tensor | None:
        """Return the factors of the rows of ΔW in this call, `[d_out]`; None if all are 1.

        Args:
            like: a tensor with their device and dtype.
        """
        if not self.training or not (self.rank_dropout or self.module_dropout):
            return None
        kept = like.new_ones(self.d_out)
        if self.rank_dropout:
            rows = torch.rand(self.d_out, device=like.device) >= self.rank_dropout
            kept = kept * rows
            if self.rescales:
                # no row at all leaves zeros, without a division by zero
                kept = kept * (self.d_out / rows.sum().clamp(min=1)).to(kept.dtype)
        if self.module_dropout:
            kept = kept * (torch.rand(1, device=like.device) >= self.module_dropout)
        return kept

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + s · ΔW, `[*experts, d_out, d_in]`."""
        with exactly(w.device):
            return w + self.scaling * self.delta(w.dtype)
