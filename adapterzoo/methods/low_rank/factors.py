"""Low-rank factors: the config and parameters shared by LoRA and its relatives.

The update is s · B A with A `[rank, d_in]`, B `[d_out, rank]` and s = alpha / rank, or
alpha / √rank with `use_rslora` (Kalajdzievski 2023, arXiv:2312.03732).

Initial values as in PEFT. Gaussian: A has deviation 1 / r. Orthogonal: the rows of A and the
columns of B lie in two orthogonal halves of a random basis of the ranks, so that B A = 0 although
neither is zero.

Several adapters are combined into one (the strategies are in `adapterzoo.averaging`), with weights
w, and σ = ±√|w s| on A and √|w s| on B (the sign on A alone):

```
linear                      A = Σ wᵢ Aᵢ        B = Σ wᵢ Bᵢ         s stays
lora_linear_only_negate_b   A = Σ |wᵢ| Aᵢ      B = Σ wᵢ Bᵢ         s stays   Zhang et al. 2023
factors                     A = mix(Aᵢ, σᵢ)    B = mix(Bᵢ, |σᵢ|)   s = 1
cat                         A = [wᵢ sᵢ Aᵢ]     B = [Bᵢ]            s = 1     B A = Σ wᵢ sᵢ Bᵢ Aᵢ
svd                         B A ≈ mix(sᵢ Bᵢ Aᵢ, wᵢ) of rank r      s = 1
```

`lora_delta_w_svd` keeps alpha, as in adapters: s is alpha / r, and B is divided by it.

Zhang et al. 2023, "Composing Parameter-Efficient Modules with Arithmetic Operations",
arXiv:2306.14870, §3.2. The `factors` are PEFT's, as are `cat` and `svd`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Self, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import dropout, embedding, pad

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.averaging import Combination, signed_roots, split, weighted_sum
from adapterzoo.config import (
    FACTOR,
    SEED,
    AdapterConfig,
    Choice,
    Placement,
    Share,
    config_class,
    field,
)
from adapterzoo.contracts import BaseLayer, FactoredAdapter, WeightAdapter, upcast
from adapterzoo.errors import CompositionError, ConfigError, StateError
from adapterzoo.kernels.low_rank import dropout_bits, dropout_mask, dropout_scale, shrink
from adapterzoo.kernels.ops import exactly
from adapterzoo.methods._init import DTYPE, constant, drawn, dtype_named, generator, kaiming, normal
from adapterzoo.methods._targets import (
    RANK,
    SIZES,
    TARGETS,
    TargetedConfig,
    check_site,
    fields_at,
    refuse_larger,
    rescaled,
)
from adapterzoo.patterns import Patterns, matching
from adapterzoo.tensor_parallel import LayerSplit

DRAWN = "lora", "bert", "gaussian", "orthogonal", "random"
"""The names of initial values that do not depend on the weight."""

Factors: TypeAlias = tuple[Tensor, Tensor]
"""A `[*experts, r, d_in]` and B `[*experts, d_out, r]`."""

_SCALING = SIZES | {"use_rslora"}
_ANY_RANK = "combine_strategy='cat' or 'svd', which take low-rank adapters of any rank"


@config_class
class LowRankConfig(TargetedConfig):
    """Base of the configs with low-rank factors; `TargetedConfig` chooses the layers.

    Attributes:
        r: rank, 1 to 65,536.
        alpha: numerator of the scaling.
        rank_pattern: path endings or regular expressions to the rank of the layers they match.
        alpha_pattern: the same for alpha.
        init_weights_seed: makes the initial values independent of earlier random numbers.
        dtype: dtype of the parameters, by name ("float32"); None for that of the layer.
        dropout: probability, 0 to below 1, of dropping an input feature on the way to A.
        init_weights: "lora": B is zero, so a new adapter changes nothing; "bert": both are
            normal with deviation 0.02; "gaussian": B is zero and A normal with deviation 1 / r;
            "orthogonal": neither is zero, but B A is; "random": neither is zero, as with
            `init_lora_weights=False` in PEFT.
        use_rslora: scale by alpha / √r.
    """

    r: int = field(8, RANK)
    alpha: float = field(8, FACTOR)
    rank_pattern: Mapping[str, int] = field({}, Patterns("r", RANK, 8))
    alpha_pattern: Mapping[str, float] = field({}, Patterns("alpha", FACTOR, 8))
    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)
    dropout: float = field(0.0, Share())
    init_weights: str = field("lora", Choice(*DRAWN))
    use_rslora: bool = False

    def rank_at(self, name: str) -> int:
        """Return the rank of the adapter at a site, by `Site.name`."""
        return matching(self.rank_pattern, name, self.r)

    def alpha_at(self, name: str) -> float:
        """Return the numerator of the scaling of the adapter at a site, by `Site.name`."""
        return matching(self.alpha_pattern, name, self.alpha)

    def scaling_at(self, name: str) -> float:
        """Return the factor s of the adapter at a site, by `Site.name`."""
        rank = self.rank_at(name)
        return self.alpha_at(name) / (math.sqrt(rank) if self.use_rslora else rank)

    def dtype_at(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the parameters at a layer of the given dtype."""
        return dtype_named(self.dtype, dtype)

    @property
    def starts_as_identity(self) -> bool:
        """Whether B A starts as zero."""
        return self.init_weights in ("lora", "gaussian")

    @property
    def slot_fields(self) -> frozenset[str]:
        """The fields of layers, ranks and scaling, which B can absorb."""
        return super().slot_fields | SIZES | {"use_rslora"}

    def of_rank(self, rank: int) -> Self:
        """Return the config without a start, with one rank for all layers and the scaling of r."""
        plain = self.plain
        refuse_larger(self, rank, (plain.r, *plain.rank_pattern.values()))
        factor = rank / plain.r
        alpha = plain.alpha * (math.sqrt(factor) if self.use_rslora else factor)
        return cast("Self", plain.replace(r=rank, alpha=alpha, rank_pattern={}, alpha_pattern={}))

    def of_ranks(self, ranks: Mapping[str, int]) -> Self:
        """Return the config with the rank of each path, and the scaling 1."""
        usual = Counter(ranks.values()).most_common(1)[0][0]
        others = {re.escape(path): rank for path, rank in ranks.items() if rank != usual}
        return self.replace(
            r=usual, alpha=usual, use_rslora=False, rank_pattern=others, alpha_pattern=others
        )

    @property
    def plain(self) -> LowRankConfig:
        """The config, with initial values that both peers know."""
        known = self.init_weights in ("lora", "bert")
        return self if known else self.replace(init_weights="lora")

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> LowRankConfig:
        """Return the config of the combination; some strategies allow other ranks and scalings.

        Raises:
            CompositionError: the configs differ in a way that cannot be combined.
        """
        own = [config for config in configs if isinstance(config, LowRankConfig)]
        first, trained = own[0], cls.training_fields
        dicts = [config.to_dict() for config in own]
        # first refuse differences that no strategy allows
        strategy.refuse_differing(dicts, trained | _SCALING | TARGETS)
        if strategy.keeps_scaling:
            strategy.refuse_differing(dicts, trained | cls.alike(own, anatomy), _ANY_RANK)
            return first
        # scalings become a part of the factors, and PEFT's strategies skip missing adapters
        placed = [c.placements(anatomy) for c in own]
        ranks: dict[str, list[int]] = {}
        for config, placements in zip(own, placed, strict=True):
            # the parts of a fused layer share its path
            for name in {placement.site.name: None for placement in placements}:
                ranks.setdefault(name, []).append(config.rank_at(name))
        combined = {name: _combined_rank(each, strategy, name) for name, each in ranks.items()}
        if any({p.site.name for p in placements} != set(combined) for placements in placed):
            first = _at_all(first, placed, anatomy)
        else:
            strategy.refuse_differing(dicts, trained | _SCALING | cls.alike(own, anatomy))
        sized = first.of_ranks(combined)
        # a scaling of 0 has no inverse
        keeps_alpha = strategy.keeps_alpha and first.alpha
        return sized.replace(alpha=first.alpha, alpha_pattern={}) if keeps_alpha else sized


def _combined_rank(ranks: list[int], strategy: Combination, path: str) -> int:
    if strategy.target == "ranks":
        return sum(ranks)
    if strategy.target == "change":
        return strategy.rank or max(ranks)
    if len(set(ranks)) > 1:
        raise CompositionError(
            f"{strategy.name!r} takes adapters of one rank, but at {path!r} they have {ranks}. "
            f"Write {_ANY_RANK}."
        )
    return ranks[0]


def _at_all(
    config: LowRankConfig, placed: Sequence[Sequence[Placement]], anatomy: Anatomy
) -> LowRankConfig:
    """Return the config with the layers of all adapters, listed by path."""
    every = [placement.site for placements in placed for placement in placements]
    sites = {site.name: site for site in every}
    parts = [site for site in every if site.output_slice is not None]
    whole = config.replace(**fields_at(sites.values()), rank_pattern={}, alpha_pattern={})
    found = [p.site.name for p in whole.placements(anatomy)] if not parts else []
    if sorted(found) != sorted(sites):
        why = f"parts of {parts[0].path!r}" if parts else "layers that no list of names selects"
        raise CompositionError(
            f"the adapters are at different sites, among them {why}, which no config describes. "
            f"Write set_active_adapters(Stack('a', 'b'))."
        )
    return whole


# multiplying each of them by the scaling once
_SCALED = frozenset({"lora_B", "lora_B_bias", "start.lora_B"})

SIDES: dict[str, tuple[str, ...]] = {"lora_A": ("", "in"), "lora_B": ("out", "")}
"""The sides of the layer to which the factors' dimensions belong."""


class LowRankUpdate(WeightAdapter):
    """Base of the adapters whose update is s · B A dropout(x).

    Attributes:
        scaling: the factor s.
        dropout: dropout probability before A.
    """

    scaling: float
    dropout: float

    def down(self, x: Tensor, a: Tensor, base: BaseLayer) -> Tensor:
        """Return A dropout(x), `[*batch, d_in]` → `[*batch, rank]`, with A `[rank, d_in]`.

        In an embedding `x` is token ids `[*batch]`; the row of padding gets no gradient, like the
        embedding's own.
        """
        if self.at_embedding:
            return embedding(x, a.T, base.padding_idx) * base.scale
        if base.split is None:
            return shrink(x, a, self.dropout, self.training)
        drops = self.training and self.dropout > 0.0
        if drops and base.split.inputs:
            x, drops = dropped_part(x, self.dropout, base.split), False
        return base.split.joined(shrink(x, a, self.dropout, drops))

    def across(self, x: Tensor, a: Tensor, b: Tensor, base: BaseLayer) -> Tensor:
        """Return B A dropout(x) of a convolution: A has its kernel, and B has kernel size 1.

        Args:
            x: `[*rows, channels, *space]`.
            a: `[rank, channels · kernel]`; it reads the channels of all groups.
            b: `[d_out, rank / groups]`.
            base: the convolution.

        Returns:
            `[*rows, d_out, *places]`.
        """
        t = dropout(x.to(a.dtype), self.dropout, self.training)
        t = base.convolve(t, a, groups=1)  # [*rows, rank, *places]
        return base.mix(t, b)


def dropped_part(x: Tensor, p: float, split: LayerSplit) -> Tensor:
    """Return dropout(x) of a part of the input features, `[*batch, part of d_in]`.

    The mask is part of the one that a single process would draw for all features, so the next
    random numbers are equal in all processes.

    Args:
        x: this process's part.
        p: probability, 0 to below 1, of dropping a feature.
        split: the layer's split.
    """
    # only `x.numel` is read
    whole = x.new_empty(1).expand(*x.shape[:-1], split.d_in)
    mask = split.part(dropout_mask(dropout_bits(whole, p), (*whole.shape,), p), -1)
    return x * mask * dropout_scale(p)


def drawing(
    name: str, rank: int, source: torch.Generator | None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the initializers of A and B that do not depend on the weight.

    Args:
        name: name of the initial values; for those that depend on the weight, the values of "lora".
        rank: r.
        source: source of random numbers.

    Raises:
        ConfigError: the rank must be even.
    """
    if name == "bert":
        return normal(0.02, source), normal(0.02, source)
    if name == "gaussian":
        return normal(1 / rank, source), constant(0.0)
    if name == "random":
        return kaiming(source), kaiming(source)
    if name != "orthogonal":
        return kaiming(source), constant(0.0)
    if rank % 2:
        raise ConfigError(
            f"init_weights='orthogonal' with the odd rank {rank}: A and B each get half of the "
            f"ranks. Write r={rank + 1}."
        )

    @cache
    def basis() -> Any:  # [r, r]
        # drawn with A: modules on the meta device draw nothing
        return torch.linalg.qr(torch.randn(rank, rank, generator=source, device="cpu"))[0]

    def fill_a(t: Tensor) -> Tensor:
        half = basis()[0::2]  # [r / 2, r]
        drawn = torch.randn(*t.shape[:-2], t.shape[-1], rank // 2, generator=source, device="cpu")
        return t.copy_((drawn @ half).mT / 10)  # [*experts, r, d_in]

    def fill_b(t: Tensor) -> Tensor:
        drawn = torch.randn(*t.shape[:-1], rank // 2, generator=source, device="cpu")
        return t.copy_(drawn @ basis()[1::2] / 10)  # [*experts, d_out, r]

    return fill_a, fill_b


class LowRank(LowRankUpdate, FactoredAdapter):
    """Base of the adapters with the factors A and B.

    Attributes:
        lora_A: `[rank, d_in]`, with experts first if the site has any.
        lora_B: `[d_out, rank]`, likewise.
        groups: groups of a convolution, as in PEFT: A reads the channels of all of them, B splits
            the rank, and the update is not a change of the weight.
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
            config: the adapter's config.
            site: the site, which sets the widths.
            device: device for the parameters.
            dtype: the layer's dtype.
            several: leading dimensions of B.

        Raises:
            ConfigError: the site has no features to drop, or groups that do not divide the rank, or
                that do not go with the initial values.
        """
        check_site(config, site, "dropout", embeddings=True)
        super().__init__()
        self.scaling = config.scaling_at(site.name)
        self.dropout = config.dropout
        self.at_embedding = site.kind == "embedding"
        self.groups = site.groups
        rank = config.rank_at(site.name)
        if rank % site.groups:
            raise ConfigError(
                f"{type(config).__name__}(r={rank}) at {site.path!r}: the rank must be a multiple "
                f"of the convolution's {site.groups} groups. Write r={site.groups}."
            )
        if site.groups > 1 and config.init_weights == "orthogonal":
            raise ConfigError(
                f"{type(config).__name__}(init_weights='orthogonal') at {site.path!r}: B splits "
                f"the rank among the {site.groups} groups of the convolution. Write "
                f"init_weights='gaussian'."
            )
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        fill_a, fill_b = drawing(config.init_weights, rank, source)
        if self.at_embedding and config.init_weights in ("lora", "gaussian"):
            # as in PEFT: each token reads one column of A
            fill_a, fill_b = constant(0.0), normal(1.0, source)
        dtype = config.dtype_at(dtype)
        columns, rows = site.d_in * site.groups, rank // site.groups
        self.lora_A = drawn((*site.lead, rank, columns), fill_a, device, dtype)
        self.lora_B = drawn((*several, *site.lead, site.d_out, rows), fill_b, device, dtype)

    def whole_factors(self, like: Tensor) -> Factors:
        """Return A and B of the whole update, on the device and in the dtype of `like`."""
        return self.lora_A.to(like.device, like.dtype), self.lora_B.to(like.device, like.dtype)

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> Factors | None:
        """Return A and s · B of the whole update, if it is the change of the weight."""
        if not self.is_additive or self.groups > 1:
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
        """The update without s, B A, `[d_out, d_in]`, in the dtype of B, also under autocast."""
        a, b = self.whole_factors(self.lora_B)
        with exactly(a.device):
            return b @ a

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + s · B A, `[*experts, d_out, d_in]`.

        Raises:
            StateError: the convolution has groups.
        """
        if self.groups > 1:
            raise StateError(
                f"A reads the channels of all {self.groups} groups of the convolution, but its "
                f"weight cannot. Keep the adapter active."
            )
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
        """Set A and B to the combination of several adapters', by any strategy."""
        self.combine_factors(adapters, weights, strategy)

    def combine_factors(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        gains: Sequence[Tensor] | None = None,
    ) -> None:
        """Set A and B to the combination of several adapters'.

        Args:
            adapters: adapters of the same layer.
            weights: a weight for each.
            strategy: the strategy and its options.
            gains: factors for the rows of each B, `[*experts, d_out]`; None: 1.
        """
        if self.groups > 1 and strategy.target in ("change", "ranks"):
            raise strategy.refusal("a low-rank update of a convolution with groups has none")
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
            a, b = split(
                strategy.mix(changes, weights), self.lora_A.shape[-2], strategy.clamp,
                strategy.full_matrices, strategy.driver,
            )  # fmt: skip
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
