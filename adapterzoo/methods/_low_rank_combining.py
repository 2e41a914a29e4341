"""What several low-rank adapters become: configs and factors; the strategies are in `averaging`.

With the update s · B A, weights w, and σ = ±√|w s| on A and √|w s| on B (the sign on A alone):

```
linear                      A = Σ wᵢ Aᵢ        B = Σ wᵢ Bᵢ         s stays
lora_linear_only_negate_b   A = Σ |wᵢ| Aᵢ      B = Σ wᵢ Bᵢ         s stays   Zhang et al. 2023
factors                     A = mix(Aᵢ, σᵢ)    B = mix(Bᵢ, |σᵢ|)   s = 1
cat                         A = [wᵢ sᵢ Aᵢ]     B = [Bᵢ]            s = 1     B A = Σ wᵢ sᵢ Bᵢ Aᵢ
svd                         B A ≈ mix(sᵢ Bᵢ Aᵢ, wᵢ) of rank r      s = 1
```

Zhang et al. 2023, "Composing Parameter-Efficient Modules with Arithmetic Operations",
arXiv:2306.14870, §3.2. The `factors` are PEFT's, as are `cat` and `svd`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy
from adapterzoo.averaging import Combination, signed_roots, split, weighted_sum
from adapterzoo.errors import CompositionError
from adapterzoo.fields import MAX_WIDTH
from adapterzoo.kernels.exact import exactly

from ._targets import TARGETS

if TYPE_CHECKING:
    from ._low_rank import LowRankConfig

_C = TypeVar("_C", bound="LowRankConfig")
_Factors: TypeAlias = tuple[Tensor, Tensor]

_SIZES = frozenset({"r", "alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
_ANY_RANK = "combine_strategy='cat' or 'svd', which take low-rank adapters of any rank"


def combined_config(
    configs: Sequence[_C], strategy: Combination, anatomy: Anatomy
) -> LowRankConfig:
    """The config of what several adapters become.

    Args:
        configs: at least one.
        strategy: what is made of them.
        anatomy: of the model.

    Raises:
        CompositionError: what differs between them cannot be combined so.
    """
    first = configs[0]
    trained, dicts = type(first).training_fields, [config.to_dict() for config in configs]
    # what no strategy takes, before what another one does
    strategy.refuse_differing(dicts, trained | _SIZES | TARGETS)
    if strategy.keeps_scaling:
        strategy.refuse_differing(dicts, trained, _ANY_RANK)
        return first
    # scalings become a part of the factors, and PEFT's strategies leave out who is not there
    places = [{p.site.path: p.site for p in c.placements(anatomy)} for c in configs]
    ranks: dict[str, list[int]] = {}
    for config, sites in zip(configs, places, strict=True):
        for path in sites:
            ranks.setdefault(path, []).append(config.rank_at(path))
    made = {path: _rank(of_path, strategy, path) for path, of_path in ranks.items()}
    if any(set(sites) != set(made) for sites in places):
        first = _at_all(configs, tuple(made), strategy, anatomy)
    else:
        strategy.refuse_differing(dicts, trained | _SIZES | _spelled_alike(configs, anatomy))
    return _sized(first, made)


def _spelled_alike(configs: Sequence[LowRankConfig], anatomy: Anatomy) -> frozenset[str]:
    """The fields of targets where they name the same parts of the same layers in other words."""
    sites = [{(p.site.path, p.site.role) for p in c.placements(anatomy)} for c in configs]
    return TARGETS if all(own == sites[0] for own in sites) else frozenset()


def _rank(ranks: list[int], strategy: Combination, path: str) -> int:
    if strategy.target == "ranks":
        if sum(ranks) > MAX_WIDTH:
            raise CompositionError(
                f"{strategy.name!r} puts the ranks side by side, {sum(ranks)} of "
                f"them at {path!r}, and {MAX_WIDTH} are legal. Write combine_strategy='svd', "
                f"svd_rank={max(ranks)}."
            )
        return sum(ranks)
    if strategy.target == "change":
        return strategy.rank or max(ranks)
    if len(set(ranks)) > 1:
        raise CompositionError(
            f"{strategy.name!r} takes adapters of one rank, and at {path!r} these "
            f"have {', '.join(map(str, ranks))}. Write {_ANY_RANK}."
        )
    return ranks[0]


def _at_all(
    configs: Sequence[_C], paths: tuple[str, ...], strategy: Combination, anatomy: Anatomy
) -> _C:
    """A config of the layers of all configs, each written out."""
    whole = configs[0].replace(
        target_modules=paths, exclude_modules=None, leave_out=(), layers_to_transform=None,
        rank_pattern={}, alpha_pattern={},
    )  # fmt: skip
    parts = [
        p.site for c in configs for p in c.placements(anatomy) if p.site.output_slice is not None
    ]
    found = [p.site.path for p in whole.placements(anatomy)] if not parts else []
    if sorted(found) != sorted(paths):
        why = f"parts of {parts[0].path!r}" if parts else "layers that no list of names tells apart"
        raise CompositionError(
            f"the adapters sit at different places, among them {why}, so that no "
            f"config has all of them. Add them with the same targets, or write "
            f"set_active_adapters(Stack('a', 'b'))."
        )
    return whole


def _sized(config: _C, ranks: Mapping[str, int]) -> _C:
    """The config with these ranks and the scaling 1."""
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {re.escape(path): rank for path, rank in ranks.items() if rank != usual}
    return config.replace(
        r=usual, alpha=usual, use_rslora=False, rank_pattern=others, alpha_pattern=others
    )


def combined_factors(
    factors: Sequence[_Factors],
    scalings: Sequence[float],
    weights: Sequence[float],
    strategy: Combination,
    rank: int,
) -> _Factors:
    """A and B of what several adapters become.

    Args:
        factors: A `[*experts, rank, d_in]` and B `[*experts, d_out, rank]` of each, float32 or
            float64.
        scalings: s of each.
        weights: w of each.
        strategy: what is made of them.
        rank: of the result.
    """
    scaled = [weight * s for weight, s in zip(weights, scalings, strict=True)]
    if strategy.target == "change":
        changes = [s * product for s, product in zip(scalings, products(factors), strict=True)]
        return _split(strategy.mix(changes, weights), strategy, rank)
    return _OF_FACTORS[strategy.target](
        factors, weights if strategy.keeps_scaling else scaled, strategy
    )


def products(factors: Sequence[_Factors]) -> list[Tensor]:
    """Each B A `[*experts, d_out, d_in]`, also under autocast in the dtype of the factors."""
    with exactly(factors[0][0].device):
        return [b @ a for a, b in factors]


def _split(change: Tensor, strategy: Combination, rank: int) -> _Factors:
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


def _linear(
    factors: Sequence[_Factors], weights: Sequence[float], strategy: Combination
) -> _Factors:
    a, b = zip(*factors, strict=True)
    return weighted_sum(a, weights), weighted_sum(b, weights)


def _only_b(
    factors: Sequence[_Factors], weights: Sequence[float], strategy: Combination
) -> _Factors:
    a, b = zip(*factors, strict=True)
    return weighted_sum(a, [abs(weight) for weight in weights]), weighted_sum(b, weights)


def _roots(
    factors: Sequence[_Factors], weights: Sequence[float], strategy: Combination
) -> _Factors:
    a, b = zip(*factors, strict=True)
    signed, roots = signed_roots(weights)
    return strategy.mix(a, signed), strategy.mix(b, roots)


def _ranks(
    factors: Sequence[_Factors], weights: Sequence[float], strategy: Combination
) -> _Factors:
    a = [weight * own for (own, _), weight in zip(factors, weights, strict=True)]
    return torch.cat(a, -2), torch.cat([b for _, b in factors], -1)  # the ranks side by side


_OF_FACTORS: Mapping[
    str, Callable[[Sequence[_Factors], Sequence[float], Combination], _Factors]
] = {"parameters": _linear, "only_b": _only_b, "factors": _roots, "ranks": _ranks}
