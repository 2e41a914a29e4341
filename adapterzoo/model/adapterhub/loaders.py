"""`custom_weights_loaders`: the user's objects that save and load weights beside adapters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapterzoo.errors import ConfigError
from adapterzoo.model import sharding
from adapterzoo.model.state import AdaptedModel, LoadOptions


def check(model: AdaptedModel, loaders: Sequence[Any] | None) -> tuple[Any, ...]:
    """Return loaders that can be used, before anything is saved or loaded.

    Args:
        model: whose adapter is saved or loaded.
        loaders: objects with the methods `save` and `load` of `adapterzoo.loading.WeightsLoader`.

    Raises:
        ConfigError: one is not such an object.
        StateError: there are any, and the model is sharded.
    """
    for loader in loaders or ():
        if isinstance(loader, type) or not all(
            callable(getattr(loader, method, None)) for method in ("save", "load")
        ):
            shown = loader.__name__ if isinstance(loader, type) else "MyLoader"
            raise ConfigError(
                f"custom_weights_loaders={loaders!r}: {loader!r} is not an object with the methods "
                f"save and load. Write custom_weights_loaders=[{shown}(model)], with a subclass "
                f"of adapterzoo.loading.WeightsLoader."
            )
    if loaders:
        sharding.refuse_if_sharded(model, "Leave custom_weights_loaders out.")
    return tuple(loaders or ())


def save(loaders: Sequence[Any], folder: str | os.PathLike[str], name: str) -> None:
    """Let each loader save its weights.

    Args:
        loaders: of `check`.
        folder: where the adapter is.
        name: of the adapter.
    """
    for loader in loaders:
        loader.save(folder, name)


def load(asked: LoadOptions, folder: Path, name: str) -> None:
    """Let each loader load its weights.

    Args:
        asked: of the user, with the loaders.
        folder: where the adapter is.
        name: under which it was loaded.
    """
    for loader in asked.loaders:
        loader.load(
            folder, load_as=asked.load_as, loading_info=asked.loading_info, main_load_name=name
        )
