"""Low-rank factors: the parameters that LoRA and its relatives share.

The update is s · B A with A `[rank, d_in]`, B `[d_out, rank]` and s = alpha / rank, or
alpha / √rank with `use_rslora` (Kalajdzievski 2023, arXiv:2312.03732).

Several adapters are combined into one (the strategies are in `adapterzoo.averaging`), with weights
w, and σ = ±√|w s| on A and √|w s| on B (the sign on A alone):

```
linear                      A = Σ wᵢ Aᵢ        B = Σ wᵢ Bᵢ         s stays
lora_linear_only_negate_b   A = Σ |wᵢ| Aᵢ      B = Σ wᵢ Bᵢ         s stays   Zhang et al. 2023
factors                     A = mix(Aᵢ, σᵢ)    B = mix(Bᵢ, |σᵢ|)   s = 1
cat                         A = [wᵢ sᵢ Aᵢ]     B = [Bᵢ]            s = 1     B A = Σ wᵢ sᵢ Bᵢ Aᵢ
svd                         B A ≈ mix(sᵢ Bᵢ Aᵢ, wᵢ) of rank r      s = 1
```

`lora_delta_w_svd` keeps alpha, as in adapters, so its s is alpha / r, and B is divided by it.

Zhang et al. 2023, "Composing Parameter-Efficient Modules with Arithmetic Operations",
arXiv:2306.14870, §3.2. The `factors` are PEFT's, as are `cat` and `svd`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from adapterzoo.anatomy import Site
from adapterzoo.averaging import Combination, signed_roots, split, weighted_sum
from adapterzoo.contracts import BaseLayer, FactoredAdapter, WeightAdapter, upcast
from adapterzoo.errors import CompositionError
from adapterzoo.kernels.low_rank import shrink
from adapterzoo.kernels.ops import exactly
from adapterzoo.methods._init import drawn, generator
from adapterzoo.methods._sizes import check_site, rescaled

from .config import LowRankConfig
from .starts import Factors, drawing

# the scaling multiplies each of them once
_SCALED = frozenset({"lora_B", "lora_B_bias", "start.lora_B"})


class LowRankUpdate(WeightAdapter):
    """Base of the adapters whose update is s · B A dropout(x).

    Attributes:
        scaling: the factor s.
        dropout: probability on the way to A.
    """

    scaling: float
    dropout: float

    def down(self, x: Tensor, a: Tensor, base: BaseLayer) -> Tensor:
        """Return A dropout(x), `[*batch, d_in]` → `[*batch, rank]`, with A `[rank, d_in]`.

        In an embedding `x` is token numbers `[*batch]`; the row of padding gets no gradient, as
        the row of the embedding itself gets none.
        """
        if self.at_embedding:
            return embedding(x, a.T, base.padding_idx) * base.scale
        return shrink(x, a, self.dropout, self.training)


class LowRank(LowRankUpdate, FactoredAdapter):
    """Base of the adapters with the factors A and B.

    Attributes:
        lora_A: `[rank, d_in]`, with experts in front where the site has them.
        lora_B: `[d_out, rank]`, likewise.
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
        check_site(config, site, "dropout", embeddings=True)
        super().__init__()
        self.scaling = config.scaling_at(site.name)
        self.dropout = config.dropout
        self.at_embedding = site.kind == "embedding"
        rank = config.rank_at(site.name)
        lead = (site.experts,) if site.experts else ()
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        fill_a, fill_b = drawing(config.init_weights, rank, source)
        dtype = config.dtype_at(dtype)
        self.lora_A = drawn((*lead, rank, site.d_in), fill_a, device, dtype)
        self.lora_B = drawn((*several, *lead, site.d_out, rank), fill_b, device, dtype)

    def whole_factors(self, like: Tensor) -> Factors:
        """Return A and B of the whole update, on the device and in the dtype of `like`."""
        return self.lora_A.to(like.device, like.dtype), self.lora_B.to(like.device, like.dtype)

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> Factors | None:
        """Return A and s · B of the whole update, if that is the change of the weight."""
        if not self.is_additive:
            return None
        a, b = self.whole_factors(w)
        return a, self.scaling * b

    def set_factors(self, a: Tensor, b: Tensor) -> None:
        """Set A and B to the factors of a change; the rest of the rank is zero."""
        missing = self.lora_A.shape[-2] - a.shape[-2]
        self.lora_A.copy_(pad(a, (0, 0, 0, missing)))
        self.lora_B.copy_(pad(b / self.scaling, (0, missing)))

    @property
    def delta_w(self) -> Tensor:
        """The update without s, B A, `[d_out, d_in]`, also under autocast in the dtype of B."""
        a, b = self.whole_factors(self.lora_B)
        with exactly(a.device):
            return b @ a

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + s · B A, `[*experts, d_out, d_in]`."""
        a, b = self.whole_factors(w)
        with exactly(a.device):
            if w.dim() < 3:
                return w + self.scaling * (b @ a)
            # one pass: the change of all experts would be as large as their weights
            return torch.baddbmm(w, b, a, alpha=self.scaling)

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the tensors, with the ratio of the scalings in B."""
        return rescaled(self.state_dict(), self.scaling, slot.scaling, _SCALED)

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

        Raises:
            CompositionError: the change of the weight is not finite, or is on the wrong device.
        """
        pairs = [adapter.whole_factors(adapter.lora_A) for adapter in adapters]
        down = [upcast(a, self.lora_A) for a, _ in pairs]  # [*experts, rank, d_in] each
        up = [upcast(b, self.lora_B) for _, b in pairs]  # [*experts, d_out, rank] each
        if gains is not None:
            up = [b * gain.unsqueeze(-1) for b, gain in zip(up, gains, strict=True)]
        scaled = [w * each.scaling for w, each in zip(weights, adapters, strict=True)]
        chosen = weights if strategy.keeps_scaling else scaled
        if strategy.target == "change":
            with exactly(self.lora_A.device):
                products = [b @ a for a, b in zip(down, up, strict=True)]
            changes = [each.scaling * p for each, p in zip(adapters, products, strict=True)]
            a, b = _split(strategy.mix(changes, weights), strategy, self.lora_A.shape[-2])
        elif strategy.target == "ranks":
            a = torch.cat([w * each for each, w in zip(down, chosen, strict=True)], -2)
            b = torch.cat(up, -1)  # the ranks side by side
        elif strategy.target == "factors":
            signed, roots = signed_roots(chosen)
            a, b = strategy.mix(down, signed), strategy.mix(up, roots)
        else:
            of_a = [abs(w) for w in chosen] if strategy.target == "only_b" else chosen
            a, b = weighted_sum(down, of_a), weighted_sum(up, chosen)
        strategy.fill(self.lora_A, a, "lora_A")
        strategy.fill(self.lora_B, b if strategy.keeps_scaling else b / self.scaling, "lora_B")

    def extra_repr(self) -> str:
        """Return widths, rank and scaling."""
        rank, d_in = self.lora_A.shape[-2:]
        return f"d_in={d_in}, d_out={self.lora_B.shape[-2]}, rank={rank}, scaling={self.scaling:g}"


def _split(change: Tensor, strategy: Combination, rank: int) -> Factors:
    """Return factors of a change of a weight, by a singular value decomposition."""
    if strategy.driver is not None and not change.is_cuda:
        raise CompositionError(
            f"svd_driver={strategy.driver!r} is one of cuSOLVER, and the adapters "
            f"are on {change.device}. Write svd_driver=None."
        )
    if not bool(change.isfinite().all()):
        raise CompositionError(
            "the combined change of a weight is not finite; nothing has changed. "
            "Look for NaN in their lora_A and lora_B, and load another checkpoint."
        )
    return split(change, rank, strategy.clamp, strategy.full_matrices, strategy.driver)
