"""The config of methods with low-rank factors, and the combination of several configs.

The update is s · B A with A `[rank, d_in]`, B `[d_out, rank]` and s = alpha / rank, or
alpha / √rank with `use_rslora` (Kalajdzievski 2023, arXiv:2312.03732).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self, TypeVar, cast

from adapterzoo.anatomy import Anatomy
from adapterzoo.averaging import Combination
from adapterzoo.config_base import config_class
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CompositionError
from adapterzoo.fields import MAX_WIDTH, Choice, Share, field

from ._named_sites import fields_at
from ._sizes import SIZES, SizedConfig
from ._slots import refuse_larger
from ._starts import DRAWN
from ._targets import TARGETS, TargetedConfig

_SIZES = SIZES | {"use_rslora"}
_ANY_RANK = "combine_strategy='cat' or 'svd', which take low-rank adapters of any rank"


@config_class
class LowRankConfig(SizedConfig):
    """Base of the configs with low-rank factors; `SizedConfig` has ranks and scalings.

    Attributes:
        dropout: probability, 0 to below 1, of dropping an input feature on the way to A.
        init_weights: "lora": B is zero, so that a fresh adapter changes nothing; "bert": both
            normal with deviation 0.02; "gaussian": B is zero and A normal with deviation 1 / r;
            "orthogonal": neither is zero, but B A is.
        use_rslora: scale by alpha / √r.
    """

    dropout: float = field(0.0, Share())
    init_weights: str = field("lora", Choice(*DRAWN))
    use_rslora: bool = False

    @property
    def slot_fields(self) -> frozenset[str]:
        """Also how the scaling depends on the rank, as B can take the scaling over."""
        return super().slot_fields | _SIZES

    def of_rank(self, rank: int) -> Self:
        """Return the config without a start, of one rank for all layers, with the scaling of r."""
        plain = self.plain
        refuse_larger(self, rank, (plain.r, *plain.rank_pattern.values()))
        alpha = plain.alpha * rank / plain.r
        if self.use_rslora:
            alpha = plain.alpha * math.sqrt(rank / plain.r)
        return cast("Self", plain.replace(r=rank, alpha=alpha, rank_pattern={}, alpha_pattern={}))

    @property
    def starts_as_identity(self) -> bool:
        """Whether B A starts as zero."""
        return self.init_weights in ("lora", "gaussian")

    @property
    def plain(self) -> LowRankConfig:
        """The config with initial values that both peers know."""
        known = self.init_weights in ("lora", "bert")
        return self if known else self.replace(init_weights="lora")

    def scaling_at(self, name: str) -> float:
        """Return the factor s of the adapter at a site, by `Site.name`."""
        rank = self.rank_at(name)
        return self.alpha_at(name) / (math.sqrt(rank) if self.use_rslora else rank)

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> LowRankConfig:
        """Return the config of the combination; some strategies allow other ranks and scalings."""
        own = [config for config in configs if isinstance(config, LowRankConfig)]
        return combined_config(own, strategy, anatomy)

    @classmethod
    def at_sites_of(cls, config: AdapterConfig, anatomy: Anatomy) -> Self:
        """Return a config with adapters at the layers of another one, or around its parts."""
        sites = [p.site for p in config.placements(anatomy)]
        fields = {**vars(config)} if isinstance(config, TargetedConfig) else {}
        own = {name: fields[name] for name in (*TARGETS, "dtype") if name in fields}
        if fields:
            made = cls(**own)
            if [p.site for p in made.placements(anatomy)] == sites:
                return made
        return cls(**fields_at(sites), dtype=own.get("dtype"))

    @classmethod
    def at_layers(cls, paths: Sequence[str]) -> Self:
        """Return a config with adapters at the layers of these paths."""
        return cls(target_modules=tuple(paths))

    def of_ranks(self, ranks: Mapping[str, int]) -> Self:
        """Return the config with the rank of each path, and the scaling 1."""
        return _sized(self, ranks)


_C = TypeVar("_C", bound=LowRankConfig)


def combined_config(
    configs: Sequence[_C], strategy: Combination, anatomy: Anatomy
) -> LowRankConfig:
    """Return the config of the combination of several adapters.

    Args:
        configs: at least one.
        strategy: how the adapters are combined.
        anatomy: of the model.

    Raises:
        CompositionError: configs that differ in this way cannot be combined.
    """
    first = configs[0]
    trained, dicts = type(first).training_fields, [config.to_dict() for config in configs]
    # first refuse differences that no strategy allows
    strategy.refuse_differing(dicts, trained | _SIZES | TARGETS)
    if strategy.keeps_scaling:
        strategy.refuse_differing(dicts, trained, _ANY_RANK)
        return first
    # scalings become a part of the factors, and PEFT's strategies skip missing adapters
    places = [{p.site.name: p.site for p in c.placements(anatomy)} for c in configs]
    ranks: dict[str, list[int]] = {}
    for config, sites in zip(configs, places, strict=True):
        for path in sites:
            ranks.setdefault(path, []).append(config.rank_at(path))
    made = {path: _rank(of_path, strategy, path) for path, of_path in ranks.items()}
    if any(set(sites) != set(made) for sites in places):
        first = _at_all(configs, anatomy)
    else:
        strategy.refuse_differing(dicts, trained | _SIZES | _spelled_alike(configs, anatomy))
    sized = _sized(first, made)
    # a scaling of 0 has no inverse
    keeps_alpha = strategy.strategy.keeps_alpha and first.alpha
    return sized.replace(alpha=first.alpha, alpha_pattern={}) if keeps_alpha else sized


def _spelled_alike(configs: Sequence[LowRankConfig], anatomy: Anatomy) -> frozenset[str]:
    """Return the target fields that name the same parts of the same layers differently."""
    sites = [{(p.site.name, p.site.role) for p in c.placements(anatomy)} for c in configs]
    return TARGETS if all(own == sites[0] for own in sites) else frozenset()


def _rank(ranks: list[int], strategy: Combination, path: str) -> int:
    if strategy.target == "ranks":
        if sum(ranks) > MAX_WIDTH:
            raise CompositionError(
                f"{strategy.name!r} adds up the ranks, to {sum(ranks)} at {path!r}, but at most "
                f"{MAX_WIDTH} are legal. Write combine_strategy='svd', "
                f"svd_rank={max(ranks)}."
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


def _at_all(configs: Sequence[_C], anatomy: Anatomy) -> _C:
    """Return a config that lists the layers of all configs by path."""
    sites = {p.site.name: p.site for c in configs for p in c.placements(anatomy)}
    parts = [
        p.site for c in configs for p in c.placements(anatomy) if p.site.output_slice is not None
    ]
    whole = configs[0].replace(
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


def _sized(config: _C, ranks: Mapping[str, int]) -> _C:
    """Return the config with these ranks and the scaling 1."""
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {re.escape(path): rank for path, rank in ranks.items() if rank != usual}
    return config.replace(
        r=usual, alpha=usual, use_rslora=False, rank_pattern=others, alpha_pattern=others
    )
