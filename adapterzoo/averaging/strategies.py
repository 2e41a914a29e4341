"""The strategies by name: what they combine, by which operations and with which options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from adapterzoo.errors import CompositionError, ConfigError, unknown_name
from adapterzoo.fields import FLAG, MAX_WIDTH, SEED, Check, Choice, Range, is_number

from .joining import elected, weighted_sum
from .pruning import largest, random

Target: TypeAlias = Literal["parameters", "only_b", "factors", "ranks", "change"]
"""What is combined: all parameters; the same with a weight's sign only on B; the factors A and B,
each times the root of its weight; the concatenated factors; the change of the layer's weight."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """What a strategy combines, and how.

    Attributes:
        target: what is combined.
        prunes: which entries to keep: largest "magnitude", "random", or None for all.
        elects: whether signs are elected, as in TIES.
        needs_rank: whether `svd_rank` is required.
        keeps_alpha: whether the result has the alpha of the first adapter, and B is divided by the
            scaling that follows.
    """

    target: Target
    prunes: Literal["magnitude", "random"] | None = None
    elects: bool = False
    needs_rank: bool = False
    keeps_alpha: bool = False


LINEAR_OF_PEFT = "lora_linear_sqrt"
"""The strategy that PEFT calls "linear"."""

STRATEGIES: Mapping[str, Strategy] = {
    # as adapters defines them
    "linear": Strategy("parameters"),
    "lora_linear_only_negate_b": Strategy("only_b"),
    "lora_delta_w_svd": Strategy("change", needs_rank=True, keeps_alpha=True),
    # as PEFT defines them
    LINEAR_OF_PEFT: Strategy("factors"),
    "cat": Strategy("ranks"),
    "svd": Strategy("change"),
    "magnitude_prune": Strategy("factors", "magnitude"),
    "magnitude_prune_svd": Strategy("change", "magnitude"),
    "ties": Strategy("factors", "magnitude", elects=True),
    "ties_svd": Strategy("change", "magnitude", elects=True),
    "dare_linear": Strategy("factors", "random"),
    "dare_linear_svd": Strategy("change", "random"),
    "dare_ties": Strategy("factors", "random", elects=True),
    "dare_ties_svd": Strategy("change", "random", elects=True),
}


class _Density(Check):
    """A number above 0, up to 1."""

    legal = "a number above 0 to 1"

    def fits(self, value: object) -> bool:
        """Return whether the value is legal."""
        return is_number(value) and 0 < value <= 1


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of some strategies.

    Attributes:
        check: the legal values, where a strategy uses it.
        is_used: whether a strategy uses it.
        example: a legal value.
        unset: the default.
        is_required: whether a strategy that uses it needs another value than the default.
    """

    check: Check
    is_used: Callable[[Strategy], bool]
    example: object
    unset: object = None
    is_required: Callable[[Strategy], bool] = lambda strategy: False


def _decomposes(strategy: Strategy) -> bool:
    return strategy.target == "change"


def _prunes(strategy: Strategy) -> bool:
    return strategy.prunes is not None


_OPTIONS = {
    "density": _Option(_Density(), _prunes, 0.5, is_required=_prunes),
    "majority_sign_method": _Option(
        Choice("total", "frequency"), lambda strategy: strategy.elects, "total", unset="total"
    ),
    "svd_rank": _Option(
        Range(1, MAX_WIDTH), _decomposes, 8, is_required=lambda strategy: strategy.needs_rank
    ),
    "svd_clamp": _Option(Range(0.0, 1.0), _decomposes, 0.99),
    "svd_full_matrices": _Option(FLAG, _decomposes, False, unset=False),
    "svd_driver": _Option(Choice(None, "gesvd", "gesvdj", "gesvda"), _decomposes, None),
    "seed": _Option(SEED, lambda strategy: strategy.prunes == "random", 0),
}


def combination(name: str, **options: Any) -> Combination:
    """Check a user's strategy and options, and return them as a `Combination`.

    Args:
        name: of the strategy.
        **options: `density`, `majority_sign_method`, `svd_rank`, `svd_clamp`, `svd_full_matrices`,
            `svd_driver` and `seed`, as `average_adapter` takes them.

    Raises:
        ConfigError: an option is missing, not legal, or has no effect.
        UnknownNameError: there is no strategy of this name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise unknown_name("", "combination strategy", name, STRATEGIES)
    strategy = STRATEGIES[name]
    for field, option in _OPTIONS.items():
        value = options.setdefault(field, option.unset)
        if isinstance(value, float):
            # float64 of numpy is a float
            options[field] = value = float(value)
        is_set = value != option.unset or type(value) is not type(option.unset)
        if not option.is_used(strategy):
            if is_set:
                raise ConfigError(
                    f"{field}={value!r} has no effect on {name!r}. Write {field}={option.unset!r}."
                )
        elif (is_set or option.is_required(strategy)) and not option.check.fits(value):
            raise ConfigError(
                f"{field}={value!r} is not legal for {name!r}; legal is {option.check.legal}. "
                f"Write {field}={option.example!r}."
            )
    # the caller makes generators from it
    del options["seed"]
    return Combination(
        name, strategy, **{field.removeprefix("svd_"): value for field, value in options.items()}
    )


@dataclass(frozen=True, slots=True)
class Combination:
    """A strategy with its options, for one call or for one layer.

    Attributes:
        name: of the strategy.
        strategy: what it combines, and how.
        density: share of the entries to keep; None: all.
        majority_sign_method: how signs are elected.
        rank: of the result; None: the largest of those combined.
        clamp: quantile at which factors are clamped; None: not at all.
        full_matrices: argument of `torch.linalg.svd`.
        driver: argument of `torch.linalg.svd`.
        source: random number generator; None: torch's default.
    """

    name: str
    strategy: Strategy
    density: float | None = None
    majority_sign_method: str = "total"
    rank: int | None = None
    clamp: float | None = None
    full_matrices: bool = False
    driver: str | None = None
    source: torch.Generator | None = None

    @property
    def target(self) -> Target:
        """What is combined."""
        return self.strategy.target

    @property
    def keeps_scaling(self) -> bool:
        """Whether the factors are combined without the scaling of the adapters, which stays."""
        return self.target in ("parameters", "only_b")

    def drawing(self, source: torch.Generator | None) -> Combination:
        """Return the same combination with another source of random numbers."""
        return replace(self, source=source)

    def mix(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Prune each tensor, then join them.

        Args:
            tensors: at least one, of one shape and device, float32 or float64.
            weights: one for each.
        """
        prunes = self.strategy.prunes
        if prunes is not None and self.density is not None and self.density < 1:
            prune: Callable[[Tensor, float], Tensor] = largest
            if prunes == "random":
                prune = functools.partial(random, source=self.source)
            tensors = [prune(tensor, self.density) for tensor in tensors]
        if self.strategy.elects:
            return elected(tensors, weights, self.majority_sign_method)
        return weighted_sum(tensors, weights)

    def fill(self, target: Tensor, value: Tensor, what: str) -> None:
        """Copy a result into its parameter.

        Args:
            target: of a new adapter.
            value: of the same shape.
            what: the parameter's name.

        Raises:
            CompositionError: it is not finite in the parameter's dtype.
        """
        cast = value.to(target.dtype)
        if not bool(cast.isfinite().all()):
            raise CompositionError(
                f"the combined {what} is not finite in {target.dtype}; nothing has changed. Look "
                f"for NaN in the adapters, or write smaller weights."
            )
        target.copy_(cast)

    def refuse_differing(
        self,
        configs: Sequence[Mapping[str, Any]],
        but: Iterable[str],
        hint: str = "set_active_adapters(Average('a', 'b')), which averages the adapters' outputs",
    ) -> None:
        """Raise if configs differ.

        Args:
            configs: at least one, as dicts of JSON types.
            but: fields that may differ.
            hint: what to write instead.

        Raises:
            CompositionError: they differ in another field.
        """
        # the order of layers, matrices and targets has no meaning
        dicts = [
            {k: sorted(map(repr, v)) if isinstance(v, list) else v for k, v in config.items()}
            for config in configs
        ]
        for field in dict.fromkeys(field for values in dicts for field in values):
            found = [values.get(field) for values in dicts]
            if field not in but and any(value != found[0] for value in found):
                given = [config.get(field) for config in configs]
                raise CompositionError(
                    f"{self.name!r} takes one {field}, and these have "
                    f"{' and '.join(map(str, given))}. Write {hint}."
                )

    def refuse_pruning(self, what: str) -> None:
        """Refuse a strategy that leaves out entries; `what` is not a sum of low-rank factors.

        Raises:
            CompositionError: it leaves out entries.
        """
        if self.strategy.prunes:
            raise self.refusal(f"{what} is not a sum of such")

    def refusal(self, why: str) -> CompositionError:
        """Make the error for an adapter that lacks what the strategy combines.

        Args:
            why: the reason, for the message.
        """
        return CompositionError(
            f"{self.name!r} combines low-rank factors, and {why}. Write "
            f"average_adapter(…, combine_strategy='linear'), the average of all parameters, or "
            f"set_active_adapters(Average('a', 'b'))."
        )
