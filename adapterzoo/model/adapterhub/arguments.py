"""Arguments of `adapters` for saving and loading, and its `custom_weights_loaders`."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapterzoo.config import AdapterConfig
from adapterzoo.errors import CheckpointError, ConfigError
from adapterzoo.model import sharding
from adapterzoo.model.state import AdaptedModel, LoadOptions


def chosen_format(format: str, use_safetensors: bool | None) -> str:
    """Return the format that a user means.

    Args:
        format: that was given, or the default.
        use_safetensors: given, the files of `adapters` are meant: in safetensors, or pickled.

    Raises:
        ConfigError: the two contradict each other.
    """
    if use_safetensors is None:
        return format
    meant = "adapterhub-safetensors" if use_safetensors else "adapterhub"
    if not isinstance(use_safetensors, bool) or format not in ("native", "adapterhub", meant):
        raise ConfigError(
            f"use_safetensors={use_safetensors!r} chooses among the files of adapters, and "
            f"format={format!r} is another format. Write only format={format!r}."
        )
    return meant


def labels(id2label: Mapping[int, str] | None, count: int | None) -> Mapping[int, str] | None:
    """Return the names of labels, of which only the number may be given.

    Raises:
        ConfigError: both are given.
    """
    if count is None:
        return id2label
    if id2label is not None:
        raise ConfigError(
            f"num_labels={count} and id2label={id2label!r} are both given. Write only id2label."
        )
    return {number: f"LABEL_{number}" for number in range(count)}


def overwriting(
    asked: LoadOptions, name: str, **there: Container[str]
) -> tuple[LoadOptions, Callable[[], None]]:
    """Return whether things of a name may be replaced, and the warning for those that were.

    Args:
        asked: of the user; None as `overwrite_ok` means yes, with a warning.
        name: of what is loaded.
        **there: the kinds of things that are loaded, with the names of those that are there.
    """
    taken = [kind for kind, names in there.items() if name in names]
    if asked.overwrite_ok is not None or not taken:
        return asked, lambda: None
    text = (
        f"the {' and the '.join(taken)} {name!r} of the model has been replaced by the one that "
        f"was loaded. Write overwrite_ok=True if that is meant, or load_as='another_name'."
    )
    return dataclasses.replace(asked, overwrite_ok=True), lambda: _warn(text)


def without_head(name: str, error: CheckpointError) -> Callable[[], None]:
    """Return the warning for an adapter that is loaded without its head.

    Args:
        name: of the adapter.
        error: why the head does not fit.
    """
    return lambda: _warn(f"the adapter {name!r} has been loaded without its head: {error}")


def compare(asked: LoadOptions, config: AdapterConfig, model_name: object) -> None:
    """Warn where a checkpoint has another config or base model than the user names.

    Args:
        asked: of the user.
        config: in the checkpoint.
        model_name: in the checkpoint.

    Raises:
        ConfigError: what the user gives is not a config.
    """
    if asked.config is not None:
        wanted, found = AdapterConfig.load(asked.config).to_dict(), config.to_dict()
        differing = {k: (wanted.get(k), found.get(k)) for k in wanted.keys() | found.keys()}
        kept = {k: v for k, v in differing.items() if v[0] != v[1]}
        if kept:
            shown = ", ".join(f"{k}={v[1]!r} and not {v[0]!r}" for k, v in sorted(kept.items()))
            _warn(f"config=…: the checkpoint has its own config, with {shown}. Leave config out.")
    if asked.model_name is not None and model_name not in (None, asked.model_name):
        _warn(
            f"model_name={asked.model_name!r}: the checkpoint was saved from {model_name!r}. Leave "
            f"model_name out."
        )


def report(loading_info: dict[str, Any] | None) -> None:
    """Fill the dict in which `adapters` lists what did not fit; a difference is an error here."""
    if loading_info is not None:
        for key in ("missing_keys", "unexpected_keys"):
            loading_info.setdefault(key, [])


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=2)


def check_loaders(model: AdaptedModel, loaders: Sequence[Any] | None) -> tuple[Any, ...]:
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


def save_weights(loaders: Sequence[Any], folder: str | os.PathLike[str], name: str) -> None:
    """Let each loader save its weights.

    Args:
        loaders: of `check`.
        folder: where the adapter is.
        name: of the adapter.
    """
    for loader in loaders:
        loader.save(folder, name)


def load_weights(asked: LoadOptions, folder: Path, name: str) -> None:
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
