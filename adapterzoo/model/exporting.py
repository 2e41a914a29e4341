"""Servers to which an adapter can be exported: who they are, and the arguments of an export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adapterzoo.errors import ConfigError
from adapterzoo.registry import Registry

FORMAT = "peft"
"""The format that servers read."""


exporters: Registry[Callable[..., Any]] = Registry("server", filled_by="adapterzoo.serving")
"""By the values of `serve=`: writes an adapter as a server reads it."""


def check_format(format: str, serve: str) -> None:
    """Check the format of an export.

    Raises:
        ConfigError: servers do not read it.
    """
    if format != FORMAT:
        raise ConfigError(
            f"serve={serve!r} writes PEFT's files, not those of format={format!r}. "
            f"Write format={FORMAT!r}."
        )


def refuse_options(**options: object) -> None:
    """Refuse options of an export where there is none.

    Raises:
        ConfigError: one is given.
    """
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} needs serve. Write serve='any', format={FORMAT!r}."
            )
