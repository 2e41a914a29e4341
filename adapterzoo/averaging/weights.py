"""The weights of what is averaged, as a user gives them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Real

from adapterzoo.errors import ConfigError


def weighted(
    call: str,
    names: Sequence[str] | Mapping[str, float],
    weights: Sequence[float] | None,
    normalize: bool,
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Names and their weights.

    Args:
        call: what the user wrote, for messages.
        names: at least one; or a dict from names to weights.
        weights: one for each name; None for those of the dict, or equal ones with sum 1.
        normalize: whether they are divided by their sum.

    Raises:
        ConfigError: there are none, not one for each name, one is no finite number, or they
            cannot be divided by their sum, which is zero or infinite.
    """
    if isinstance(names, str):
        raise ConfigError(
            f"{call}: {names!r} is one name where a list of names is asked for. "
            f"Write [{names!r}, 'another']."
        )
    # the weights of a composition would not be heard
    if not isinstance(names, (Sequence, Mapping)):
        raise ConfigError(
            f"{call}: {names!r} is no list of names. Write at least one name: ['a', 'b']."
        )
    if not names:
        raise ConfigError(
            f"{call}: there is nothing to average. Write at least one name: ['a', 'b']."
        )
    if isinstance(names, Mapping):
        if weights is not None:
            raise ConfigError(
                f"{call}: weights={weights!r} stand beside a dict, whose values are the weights. "
                f"Write the dict alone, or a list of names with weights=[…]."
            )
        weights = list(names.values())
    # a set has no order in which they could stand for names
    unordered = isinstance(weights, (str, Set, Mapping)) or not isinstance(weights, Iterable)
    if weights is not None and unordered:
        raise ConfigError(
            f"{call}: weights={weights!r} is no list of numbers. Write one for each of the "
            f"{len(names)} names: weights={[1.0] * len(names)!r}."
        )
    weights = None if weights is None else tuple(weights)
    if weights is None:
        return tuple(names), (1.0 / len(names),) * len(names)
    if len(weights) != len(names):
        raise ConfigError(
            f"{call}: {len(weights)} weights stand for {len(names)} names. "
            f"Write one for each: weights={[1.0] * len(names)!r}."
        )
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, Real):
            raise _no_number(call, weight)
        if not math.isfinite(weight):
            raise _no_number(call, weight)
    total = float(sum(weights)) if normalize else 1.0
    if total == 0 or math.isinf(total):
        raise ConfigError(
            f"{call}: the weights {list(weights)!r} have the sum {total:g} and cannot be divided "
            f"by it. Write normalize_weights=False, which takes them as they are."
        )
    return tuple(names), tuple(float(weight) / total for weight in weights)


def _no_number(call: str, weight: object) -> ConfigError:
    return ConfigError(
        f"{call}: weight {weight!r} is no finite number. Write weights=[0.5, 0.5]; "
        f"negative ones are legal."
    )
