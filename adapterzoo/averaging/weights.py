"""The weights of an average, as a user gives them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Real

from adapterzoo.errors import ConfigError


def weighted(
    names: Sequence[str] | Mapping[str, float], weights: Sequence[float] | None, normalize: bool
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return names and their weights.

    Args:
        names: at least one; or a dict from names to weights.
        weights: one for each name; None: those of the dict, or equal weights of sum 1.
        normalize: whether to divide them by their sum.

    Raises:
        ConfigError: there are no names, a weight is missing or not finite, or their sum is zero
            or infinite.
    """
    # the weights of a composition would be ignored
    if isinstance(names, str) or not isinstance(names, (Sequence, Mapping)) or not names:
        given = [names, "another"] if isinstance(names, str) else ["a", "b"]
        raise ConfigError(f"{names!r} is not a list of one or more names. Write {given!r}.")
    if isinstance(names, Mapping):
        if weights is not None:
            raise ConfigError(
                f"weights={weights!r} conflicts with a dict, whose values are the weights. Write "
                f"only the dict, or a list of names with weights=[…]."
            )
        weights = list(names.values())
    if weights is None:
        return tuple(names), (1.0 / len(names),) * len(names)
    # a set has no order
    unordered = isinstance(weights, (str, Set, Mapping)) or not isinstance(weights, Iterable)
    found = () if unordered else tuple(weights)
    if len(found) != len(names) or not all(map(_is_finite, found)):
        raise ConfigError(
            f"weights={weights!r} is not a list of {len(names)} finite numbers, one for each name. "
            f"Write weights={[1.0] * len(names)!r}; negative weights are legal."
        )
    total = float(sum(found)) if normalize else 1.0
    if total == 0 or math.isinf(total):
        raise ConfigError(
            f"the weights {list(found)!r} have the sum {total:g} and cannot be divided by it. "
            f"Write normalize_weights=False to use them unchanged."
        )
    return tuple(names), tuple(float(weight) / total for weight in found)


def _is_finite(weight: object) -> bool:
    return isinstance(weight, Real) and not isinstance(weight, bool) and math.isfinite(weight)
