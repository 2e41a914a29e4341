"""The config that methods with low-rank factors share, and the combination of several configs.

The update is s · B A with A `[rank, d_in]`, B `[d_out, rank]` and s = alpha / rank, or
alpha / √rank with `use_rslora` (Kalajdzievski 2023, arXiv:2312.03732).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self, cast

import torch

from adapterzoo.anatomy import Anatomy
from adapterzoo.averaging import Combination
from adapterzoo.config_base import config_class
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CompositionError
from adapterzoo.fields import FACTOR, MAX_WIDTH, SEED, Choice, Share, field
from adapterzoo.methods._init import DTYPE, dtype_named
from adapterzoo.methods._sizes import RANK, SIZES, check_size_keys, refuse_larger
from adapterzoo.methods._targets import TARGETS, TargetedConfig, fields_at
from adapterzoo.patterns import Patterns, matching

DRAWN = "lora", "bert", "gaussian", "orthogonal"
"""The names of initial values that do not depend on the weight."""

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
        dtype: of the parameters, by name ("float32"); None for that of the layer.
        dropout: probability, 0 to below 1, of dropping an input feature on the way to A.
        init_weights: "lora": B is zero, so that a fresh adapter changes nothing; "bert": both
            normal with deviation 0.02; "gaussian": B is zero and A normal with deviation 1 / r;
            "orthogonal": neither is zero, but B A is.
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

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each layer that the config names.

        Raises:
            SiteError: no layer matches, or none matches a key of `rank_pattern` or `alpha_pattern`.
        """
        placements = super().placements(anatomy)
        check_size_keys(self, placements, anatomy)
        return placements

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
        """The layers, the ranks and the scaling, which B can absorb."""
        return super().slot_fields | _SCALING

    def of_rank(self, rank: int) -> Self:
        """Return the config without a start, of one rank for all layers, with the scaling of r."""
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
        """The config with initial values that both peers know."""
        known = self.init_weights in ("lora", "bert")
        return self if known else self.replace(init_weights="lora")

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> LowRankConfig:
        """Return the config of the combination; some strategies allow other ranks and scalings.

        Raises:
            CompositionError: configs that differ in this way cannot be combined.
        """
        own = [config for config in configs if isinstance(config, LowRankConfig)]
        first, trained = own[0], cls.training_fields
        dicts = [config.to_dict() for config in own]
        # first refuse differences that no strategy allows
        strategy.refuse_differing(dicts, trained | _SCALING | TARGETS)
        if strategy.keeps_scaling:
            strategy.refuse_differing(dicts, trained, _ANY_RANK)
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
            parts = [{(p.site.name, p.site.role) for p in placements} for placements in placed]
            same_parts = all(each == parts[0] for each in parts)
            alike = TARGETS if same_parts else frozenset[str]()
            strategy.refuse_differing(dicts, trained | _SCALING | alike)
        sized = first.of_ranks(combined)
        # a scaling of 0 has no inverse
        keeps_alpha = strategy.keeps_alpha and first.alpha
        return sized.replace(alpha=first.alpha, alpha_pattern={}) if keeps_alpha else sized


def _combined_rank(ranks: list[int], strategy: Combination, path: str) -> int:
    if strategy.target == "ranks":
        if sum(ranks) > MAX_WIDTH:
            raise CompositionError(
                f"{strategy.name!r} adds up the ranks, to {sum(ranks)} at {path!r}, but at most "
                f"{MAX_WIDTH} are legal. Write combine_strategy='svd', svd_rank={max(ranks)}."
            )
        return sum(ranks)
    if strategy.target == "change":
        return strategy.rank or max(ranks)
    if len(set(ranks)) > 1:
        raise CompositionError(
            f"{strategy.name!r} takes adapters of one rank, but at {path!r} these "
            f"have {', '.join(map(str, ranks))}. Write {_ANY_RANK}."
        )
    return ranks[0]


def _at_all(
    config: LowRankConfig, placed: Sequence[Sequence[Placement]], anatomy: Anatomy
) -> LowRankConfig:
    """Return the config with the layers of all adapters, listed by path."""
    every = [placement.site for placements in placed for placement in placements]
    sites = {site.name: site for site in every}
    parts = [site for site in every if site.output_slice is not None]
    whole = config.replace(
        **fields_at(sites.values()), exclude_modules=None, leave_out=(), layers_to_transform=None,
        rank_pattern={}, alpha_pattern={},
    )  # fmt: skip
    found = [p.site.name for p in whole.placements(anatomy)] if not parts else []
    if sorted(found) != sorted(sites):
        why = f"parts of {parts[0].path!r}" if parts else "layers that no list of names selects"
        raise CompositionError(
            f"the adapters are at different sites, among them {why}, so that no "
            f"config describes all of them. Add them with the same targets, or write "
            f"set_active_adapters(Stack('a', 'b'))."
        )
    return whole
