"""PEFT's functions and file names that frameworks use, besides those meant for users."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from adapterzoo.errors import names_call
from adapterzoo.folders.names import CONFIG
from adapterzoo.formats import peft as format_of_peft
from adapterzoo.methods.lycoris.lokr import divided

from . import saving

__all__ = [
    "CONFIG_NAME",
    "SAFETENSORS_WEIGHTS_NAME",
    "WEIGHTS_NAME",
    "_get_submodules",
    "delete_adapter",
    "disable_input_dtype_casting",
    "factorization",
]

CONFIG_NAME = CONFIG
SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME = format_of_peft.FILES


@names_call
def delete_adapter(
    model: Any, adapter_name: str, prefix: str | None = None, layer_cls: Any = None
) -> list[str] | None:
    """Delete an adapter.

    Args:
        model: the model with the adapter.
        adapter_name: name of the adapter.
        prefix: has no effect, since a model knows its adapters' modules.
        layer_cls: has no effect either.

    Returns:
        The names of the active adapters; None without one.

    Raises:
        StateError: the adapter is in use, or the model has no adapters.
        UnknownNameError: there is no such adapter.
    """
    own = saving.adapted(model)
    own.delete_adapter(adapter_name)
    setup = own._active.plan.setup
    return None if setup is None else list(setup.flatten())


@contextlib.contextmanager
def disable_input_dtype_casting(model: nn.Module, active: bool = True) -> Iterator[None]:
    """Return a context that changes nothing, for layers that are cast around each call.

    Args:
        model: a model with adapters.
        active: has no effect, since a layer's adapters are cast with it.
    """
    yield


def factorization(dimension: int, factor: int = -1) -> tuple[int, int]:
    """Return the two sizes into which LoKr divides a width.

    Args:
        dimension: the width.
        factor: the first of them, or the next smaller divisor if this does not divide; −1: the
            largest divisor up to the square root.
    """
    return divided(dimension, factor)


def _get_submodules(model: nn.Module, key: str) -> tuple[nn.Module, nn.Module, str]:
    """Return the module above a path, the module at it, and its name there.

    Args:
        model: any module.
        key: the path.

    Raises:
        AttributeError: there is no such path.
    """
    above, _, name = key.rpartition(".")
    return model.get_submodule(above), model.get_submodule(key), name
