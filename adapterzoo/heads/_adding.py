"""The `add_…_head` methods of models: each is declared beside the type of its head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from adapterzoo.registry import Registry

from ._base import HeadConfig

Labels = Mapping[int, str] | None
_F = TypeVar("_F", bound=Callable[..., None])

add_methods: Registry[Callable[..., None]] = Registry("method that adds a head")
"""The names of models' methods that add heads to functions of the model."""


class Model(Protocol):
    """A model that holds heads by name."""

    def add_prediction_head_from_config(
        self, head_name: str, config: HeadConfig, overwrite_ok: bool = False
    ) -> None:
        """Add a head and make it the active one."""


def adds_head(function: _F) -> _F:
    """Make a function a method of all models with named heads, which its name tells.

    Args:
        function: its first argument is the model, called `self`, the second is `head_name`; the
            arguments are AdapterHub's.
    """
    add_methods.register(function.__name__)(function)
    return function
