"""Values for `parametrize` of which the quick part runs a few, and the sweep all others."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def all_but(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Mark each value that is not quick as part of the sweep; tuples are several arguments."""
    return [
        value
        if value in quick
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.sweep
        )
        for value in values
    ]
