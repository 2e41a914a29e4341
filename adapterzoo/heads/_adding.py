"""The `add_…_head` methods of models; each is declared beside its head type."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, cast

from adapterzoo.registry import Registry

from ._labels import labels_from
from .base import HeadConfig

Labels = Mapping[int, str] | None
_F = TypeVar("_F", bound=Callable[..., None])

add_methods: Registry[Callable[..., None]] = Registry("method that adds a head")
"""The names of methods that add heads → functions of a model."""


class Model(Protocol):
    """A model that holds heads by name."""

    def add_prediction_head_from_config(
        self, head_name: str, config: HeadConfig, overwrite_ok: bool = False
    ) -> None:
        """Add a head and make it the active one."""


def adds_head(config: Callable[..., HeadConfig]) -> Callable[[_F], _F]:
    """Decorate a declaration: make it a method of all models with named heads.

    The declaration has a signature and a docstring, and no body. Its arguments are AdapterHub's:
    `self`, the model; `head_name`; `overwrite_ok`; `id2label`, if the head has labels; and fields
    of the config.

    Args:
        config: returns the config for the fields.
    """

    def decorate(declared: _F) -> _F:
        signature = inspect.signature(declared)

        @functools.wraps(declared)
        def add(*args: object, **kwargs: object) -> None:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            fields = dict(given.arguments)
            model, name, overwrite_ok = map(fields.pop, ("self", "head_name", "overwrite_ok"))
            if "id2label" in fields:
                fields["label2id"] = labels_from(fields.pop("id2label"))
            model.add_prediction_head_from_config(name, config(**fields), overwrite_ok)

        add_methods.register(declared.__name__)(add)
        return cast("_F", add)

    return decorate
