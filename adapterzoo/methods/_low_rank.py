"""Low-rank factors: the parameters that LoRA and its relatives share.

The update is s · B A with A `[rank, d_in]`, B `[d_out, rank]` and s = alpha / rank, or
alpha / √rank with `use_rslora` (Kalajdzievski 2023, arXiv:2312.03732).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from adapterzoo.anatomy import Site
from adapterzoo.averaging import Combination
from adapterzoo.contracts import BaseLayer, FactoredAdapter, upcast
from adapterzoo.errors import ConfigError
from adapterzoo.kernels.low_rank import shrink
from adapterzoo.kernels.ops import exactly

from ._init import drawn, generator
from ._low_rank_combining import combined_factors
from ._low_rank_config import LowRankConfig
from ._slots import rescaled
from ._starts import drawing

# the scaling multiplies each of them once
_SCALED = frozenset({"lora_B", "lora_B_bias", "start.lora_B"})


class LowRank(FactoredAdapter):
    """Base of the adapters with the factors A and B.

    Attributes:
        lora_A: `[rank, d_in]`, with experts in front where the site has them.
        lora_B: `[d_out, rank]`, likewise.
        scaling: the factor s.
        dropout: probability on the way to A.
        looks_up: whether the layer is an embedding, whose input is token numbers.
    """

    container = "loras"
    learns_faster = frozenset({"lora_B", "lora_B_bias"})

    def __init__(
        self,
        config: LowRankConfig,
        site: Site,
        device: torch.device,
        dtype: torch.dtype,
        several: tuple[int, ...] = (),
    ) -> None:
        """Make the factors.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the parameters.
            dtype: of the layer.
            several: dimensions of B in front of the usual ones.

        Raises:
            ConfigError: there is dropout, and the site has no features to drop.
        """
        super().__init__()
        self.scaling = config.scaling_at(site.name)
        self.dropout = config.dropout
        self.looks_up = self.at_embedding = site.kind == "embedding"
        if config.dropout and (self.looks_up or site.is_only_read):
            what = "reads token numbers" if self.looks_up else "computes with its parameters"
            raise ConfigError(
                f"{type(config).__name__}(dropout={config.dropout}) at {site.path!r}: the module "
                f"{what}, so there are no features to drop on the way to A. Write dropout=0.0."
            )
        rank = config.rank_at(site.name)
        lead = (site.experts,) if site.experts else ()
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        fresh = drawing(config.init_weights, rank, source)
        dtype = config.dtype_at(dtype)
        self.lora_A = drawn((*lead, rank, site.d_in), fresh[0], device, dtype)
        self.lora_B = drawn((*several, *lead, site.d_out, rank), fresh[1], device, dtype)

    def down(self, x: Tensor) -> Tensor:
        """Return A dropout(x), `[*batch, d_in]` → `[*batch, rank]`."""
        return shrink(x, self.lora_A, self.dropout, self.training)

    def looked_up(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return a of the tokens of an embedding, `[*batch]` → `[*batch, rank]`.

        That of padding gets no gradient, as the row of the embedding itself gets none.
        """
        return embedding(x, self.lora_A.T, base.padding_idx)

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Set the factors to the combination of several adapters, by any strategy."""
        self.combine_factors(adapters, weights, strategy)

    def combine_factors(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        gains: Sequence[Tensor] | None = None,
    ) -> None:
        """Set A and B to the combination of several adapters.

        Args:
            adapters: of the same layer.
            weights: one for each.
            strategy: the strategy and its options.
            gains: factors of the rows of each B, `[*experts, d_out]`; None: 1.
        """
        factors = [
            (upcast(a, self.lora_A), upcast(b, self.lora_B))
            for a, b in (adapter.whole_factors() for adapter in adapters)
        ]
        scalings = [adapter.scaling for adapter in adapters]
        a, b = combined_factors(factors, scalings, weights, strategy, self.lora_A.shape[-2], gains)
        if not strategy.keeps_scaling:
            b = b / self.scaling
        strategy.fill(self.lora_A, a, "lora_A")
        strategy.fill(self.lora_B, b, "lora_B")

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the tensors, with the ratio of the scalings in B."""
        return rescaled(self.state_dict(), self.scaling, slot.scaling, _SCALED)

    def whole_factors(self) -> tuple[Tensor, Tensor]:
        """Return A and B of the whole update."""
        return self.lora_A, self.lora_B

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor] | None:
        """Return A and s · B of the whole update, if that is the change of the weight."""
        if not self.is_additive:
            return None
        a, b = (t.to(w.device, w.dtype) for t in self.whole_factors())
        return a, self.scaling * b

    def set_factors(self, a: Tensor, b: Tensor) -> None:
        """Set A and B to the factors of a change; the rest of the rank is zero."""
        missing = self.lora_A.shape[-2] - a.shape[-2]
        self.lora_A.copy_(pad(a, (0, 0, 0, missing)))
        self.lora_B.copy_(pad(b / self.scaling, (0, missing)))

    @property
    def delta_w(self) -> Tensor:
        """The update without s, B A, `[d_out, d_in]`."""
        return self.product(self.lora_B.dtype)

    def product(self, dtype: torch.dtype) -> Tensor:
        """Return B A, `[d_out, d_in]`, in the dtype, also under autocast."""
        a, b = self.whole_factors()
        with exactly(a.device):
            return b.to(dtype) @ a.to(dtype)

    def added(self, w: Tensor) -> Tensor:
        """Return w + s · B A, `[*experts, d_out, d_in]`, also under autocast."""
        if w.dim() < 3:
            return w + self.delta(w.dtype)
        a, b = (t.to(w.dtype) for t in self.whole_factors())
        # one pass: the change of all experts would be as large as their weights
        with exactly(a.device):
            return torch.baddbmm(w, b, a, alpha=self.scaling)

    def delta(self, dtype: torch.dtype) -> Tensor:
        """Return the update s · B A, `[d_out, d_in]`, in the dtype, also under autocast."""
        return self.scaling * self.product(dtype)

    def extra_repr(self) -> str:
        """Return widths, rank and scaling."""
        rank, d_in = self.lora_A.shape[-2:]
        return f"d_in={d_in}, d_out={self.lora_B.shape[-2]}, rank={rank}, scaling={self.scaling:g}"
