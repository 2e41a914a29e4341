"""The servers to which adapters can be exported, and the check of an export's arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapterzoo.errors import ConfigError
from adapterzoo.registry import Registry

FORMAT = "peft"
"""The format that servers read."""


exporters: Registry[Callable[..., Any]] = Registry("server", filled_by="adapterzoo.serving")
"""Values of `serve=` → functions that write an adapter as the server reads it."""


def check(format: str, serve: str | None, **options: object) -> None:
    """Check the arguments of an export.

    Args:
        format: the format to write.
        serve: the server; None: there is no export.
        **options: arguments that only an export has.

    Raises:
        ConfigError: servers do not read the format, or an option is given without a server.
    """
    if serve is not None and format != FORMAT:
        raise ConfigError(f"serve={serve!r} does not write {format!r}. Write format={FORMAT!r}.")
    for name, value in options.items():
        if serve is None and value is not None:
            raise ConfigError(
                f"{name}={value!r} needs serve. Write serve='any', format={FORMAT!r}."
            )
