"""Arguments of public methods that have several names."""

from __future__ import annotations

from typing import Any

from .errors import ConfigError


def one_of(**given: Any) -> Any:
    """Return the value of an argument with several names; None if it is not given.

    Args:
        **given: the names, with the values under each.

    Raises:
        ConfigError: the values differ.
    """
    found = [(name, value) for name, value in given.items() if value is not None]
    for name, value in found[:-1]:
        last, other = found[-1]
        if value is not other and value != other:
            raise ConfigError(
                f"{name}={value!r} and {last}={other!r} mean the same thing and differ. Write only "
                f"{last}={other!r}."
            )
    return found[-1][1] if found else None
