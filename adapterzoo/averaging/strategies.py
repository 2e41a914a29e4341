"""The strategies by name: what is combined, by which operation, and with which options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor

from adapterzoo.errors import CompositionError, ConfigError, listing, unknown_name
from adapterzoo.fields import MAX_WIDTH

from .joining import elected, weighted_sum
from .pruning import largest, random

Target: TypeAlias = Literal["parameters", "only_b", "factors", "ranks", "change"]
"""What is combined: all parameters; the same with the signs of weights on B alone; the factors A
and B, each by the root of its weight; the factors side by side; the change of the weight."""

_SIGNS = ("total", "frequency")
_DRIVERS = (None, "gesvd", "gesvdj", "gesvda")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A row of the table.

    Attributes:
        target: what is combined.
        prunes: how entries are left out before: "magnitude", "random", or not.
        elects: whether signs are elected, as TIES does.
        needs_rank: whether `svd_rank` has to be given.
    """

    target: Target
    prunes: Literal["magnitude", "random"] | None = None
    elects: bool = False
    needs_rank: bool = False


STRATEGIES: Mapping[str, Strategy] = {
    # as adapters defines them
    "linear": Strategy("parameters"),
    "lora_linear_only_negate_b": Strategy("only_b"),
    "lora_delta_w_svd": Strategy("change", needs_rank=True),
    # as PEFT defines them; the first is its "linear"
    "lora_linear_sqrt": Strategy("factors"),
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


@dataclass(frozen=True, slots=True)
class Combination:
    """A strategy with its options, for one call or for one layer.

    Attributes:
        call: what the user wrote, for messages.
        name: of the strategy.
        strategy: its row.
        density: share of the entries that stay; None: all.
        majority_sign_method: how signs are elected.
        rank: of the result; None: the largest of those combined.
        clamp: quantile at which factors are cut; None: they are not.
        full_matrices: an option of `torch.linalg.svd`.
        driver: the same.
        source: of random numbers; None: torch's default generator.
    """

    call: str
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
        """Whether the result has the scaling of what is combined, and not 1."""
        return self.target in ("parameters", "only_b")

    def drawing(self, source: torch.Generator | None) -> Combination:
        """The same with another source of random numbers."""
        return replace(self, source=source)

    def mix(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """One tensor: what is pruned of each, then joined.

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
        """Copy a result to its parameter.

        Args:
            target: of a fresh adapter.
            value: of the same shape.
            what: the parameter's name.

        Raises:
            CompositionError: it is not finite in the parameter's dtype.
        """
        cast = value.to(target.dtype)
        if not bool(cast.isfinite().all()):
            raise CompositionError(
                f"{self.call}: the combined {what} is not finite in {target.dtype}; nothing has "
                f"changed. Look for NaN in the adapters, or write smaller weights."
            )
        target.copy_(cast)

    def refuse_differing(
        self,
        configs: Sequence[Mapping[str, Any]],
        but: Iterable[str],
        hint: str = "set_active_adapters(Average('a', 'b')), which averages what adapters do to x",
    ) -> None:
        """Check that configs are alike.

        Args:
            configs: at least one, as dicts of JSON types.
            but: fields that may differ.
            hint: what to write where others do.

        Raises:
            CompositionError: they are not.
        """
        # the order of layers, matrices and targets means nothing
        dicts = [
            {k: sorted(map(repr, v)) if isinstance(v, list) else v for k, v in config.items()}
            for config in configs
        ]
        for field in dict.fromkeys(field for values in dicts for field in values):
            found = [values.get(field) for values in dicts]
            if field not in but and any(value != found[0] for value in found):
                given = [config.get(field) for config in configs]
                raise CompositionError(
                    f"{self.call}: {self.name!r} takes one {field}, and these have "
                    f"{' and '.join(map(str, given))}. Write {hint}."
                )

    def refusal(self, why: str) -> CompositionError:
        """The error of an adapter that has nothing of what the strategy combines.

        Args:
            why: what it has instead.
        """
        return CompositionError(
            f"{self.call}: {self.name!r} combines low-rank factors, and {why}. Write "
            f"average_adapter(…, combine_strategy='linear'), the average of all parameters, or "
            f"set_active_adapters(Average('a', 'b'))."
        )


def combination(
    call: str,
    name: str,
    *,
    density: float | None = None,
    majority_sign_method: str = "total",
    svd_rank: int | None = None,
    svd_clamp: float | None = None,
    svd_full_matrices: bool = False,
    svd_driver: str | None = None,
    seed: int | None = None,
) -> Combination:
    """The combination that a user asks for, checked.

    Args:
        call: what the user wrote, for messages.
        name: of the strategy.
        density: above 0 to 1, for strategies that prune.
        majority_sign_method: "total" or "frequency", for those that elect signs, see `elected`.
        svd_rank: 1 to 65,536, for those that decompose.
        svd_clamp: 0 to 1, for those that decompose.
        svd_full_matrices: for those that decompose, see `split`.
        svd_driver: the same.
        seed: for those that prune at random.

    Raises:
        ConfigError: an option is missing, not legal, or has no effect.
        UnknownNameError: there is no strategy of this name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise unknown_name(call, "combination strategy", name, STRATEGIES)
    strategy = STRATEGIES[name]

    def wrong(field: str, value: object, why: str, hint: str) -> ConfigError:
        return ConfigError(f"{call}: {field}={value!r} {why}. Write {hint}.")

    decomposes = strategy.target == "change"
    uses: dict[str, tuple[object, object, bool]] = {
        "density": (density, None, strategy.prunes is not None),
        "majority_sign_method": (majority_sign_method, "total", strategy.elects),
        "svd_rank": (svd_rank, None, decomposes),
        "svd_clamp": (svd_clamp, None, decomposes),
        "svd_full_matrices": (svd_full_matrices, False, decomposes),
        "svd_driver": (svd_driver, None, decomposes),
        "seed": (seed, None, strategy.prunes == "random"),
    }
    for field, (value, unset, used) in uses.items():
        if value != unset and not used:
            raise wrong(field, value, f"has no effect on {name!r}", f"{field}={unset!r}")
    if strategy.prunes is not None and not (_is_number(density) and 0.0 < density <= 1.0):
        raise wrong("density", density, f"is no share of entries for {name!r}", "density=0.5")
    if majority_sign_method not in _SIGNS:
        why = f"is none of {listing(_SIGNS)}"
        raise wrong(
            "majority_sign_method", majority_sign_method, why, "majority_sign_method='total'"
        )
    if svd_rank is None and strategy.needs_rank:
        raise wrong("svd_rank", None, f"is no rank, which {name!r} needs", "svd_rank=8")
    if svd_rank is not None and not (type(svd_rank) is int and 1 <= svd_rank <= MAX_WIDTH):
        raise wrong("svd_rank", svd_rank, f"is no rank from 1 to {MAX_WIDTH}", "svd_rank=8")
    if svd_clamp is not None and not (_is_number(svd_clamp) and 0 <= svd_clamp <= 1):
        raise wrong("svd_clamp", svd_clamp, "is no quantile from 0 to 1", "svd_clamp=0.99")
    if type(svd_full_matrices) is not bool:
        why = "is neither True nor False"
        raise wrong("svd_full_matrices", svd_full_matrices, why, "svd_full_matrices=False")
    if svd_driver not in _DRIVERS:
        raise wrong("svd_driver", svd_driver, f"is none of {listing(_DRIVERS)}", "svd_driver=None")
    if seed is not None and type(seed) is not int:
        raise wrong("seed", seed, "is no whole number", "seed=0")
    return Combination(
        call, name, strategy, density, majority_sign_method, svd_rank, svd_clamp,
        svd_full_matrices, svd_driver,
    )  # fmt: skip


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
