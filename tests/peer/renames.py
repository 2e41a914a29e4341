"""The renames of docs/from-adapters.md, applied to the peer's tests in the mode `renames`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAMES: dict[str, Callable[[], Any]] = {}


def install() -> None:
    """Translate arguments on the way into adapterzoo."""


def install_in_tests() -> None:
    """Translate the parameter names that the tests look for."""
