"""Methods of a model that also take PEFT's arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from adapterzoo.names import one_of

P = ParamSpec("P")
T = TypeVar("T")


def is_peft(config: object) -> bool:
    """Return whether a value is a config object of PEFT, or its dict."""
    if isinstance(config, Mapping):
        return "peft_type" in config
    return hasattr(config, "peft_type") and callable(getattr(config, "to_dict", None))


def also_named(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method to give some of its arguments additional names.

    Args:
        **names: the other name → the argument.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def method(*args: P.args, **kwargs: P.kwargs) -> T:
            given: dict[str, Any] = {}
            for name, value in kwargs.items():
                own = names.get(name, name)
                given[own] = one_of(**{own: given.get(own), name: value})
            return function(*args, **cast("Any", given))

        return cast("Callable[P, T]", method)

    return decorated
