"""The combination of several low-rank adapters' factors; the strategies are in `averaging`.

With the update s · B A, weights w, and σ = ±√|w s| on A and √|w s| on B (the sign on A alone):

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

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from adapterzoo.averaging import Combination, signed_roots, split, weighted_sum
from adapterzoo.errors import CompositionError
from adapterzoo.kernels.ops import exactly

_Factors: TypeAlias = tuple[Tensor, Tensor]


def combined_factors(
    factors: Sequence[_Factors],
    scalings: Sequence[float],
    weights: Sequence[float],
    strategy: Combination,
    rank: int,
    gains: Sequence[Tensor] | None = None,
) -> _Factors:
    """Return the factors A and B of a combination of adapters.

    Args:
        factors: A `[*experts, rank, d_in]` and B `[*experts, d_out, rank]` of each, float32 or
            float64.
        scalings: s of each.
        weights: w of each.
        strategy: the strategy and its options.
        rank: of the result.
        gains: factors of the rows of each B, `[*experts, d_out]`; None: 1.
    """
    if gains is not None:
        pairs = zip(factors, gains, strict=True)
        factors = [(a, b * gain.unsqueeze(-1)) for (a, b), gain in pairs]
    scaled = [weight * s for weight, s in zip(weights, scalings, strict=True)]
    if strategy.target == "change":
        changes = [s * product for s, product in zip(scalings, products(factors), strict=True)]
        return _split(strategy.mix(changes, weights), strategy, rank)
    return _OF_FACTORS[strategy.target](
        factors, weights if strategy.keeps_scaling else scaled, strategy
    )


def products(factors: Sequence[_Factors]) -> list[Tensor]:
    """Return each B A `[*experts, d_out, d_in]` in the factors' dtype, also under autocast."""
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
