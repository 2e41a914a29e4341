"""What all checkpoints of a model say about it, and the way to their folders."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from adapterzoo.checkpoint import formats
from adapterzoo.checkpoint.formats import Checkpoint
from adapterzoo.errors import ConfigError, argument
from adapterzoo.model import sharding
from adapterzoo.model.state import AdaptedModel
from adapterzoo.names import check_name

from .info import info_of

StrPath: TypeAlias = "str | os.PathLike[str]"


def write(
    model: AdaptedModel, folder: StrPath, stored: Checkpoint, kind: formats.Kind, format: str
) -> None:
    """Write a checkpoint of a model.

    Args:
        model: with adapters.
        folder: made when missing.
        stored: the checkpoint.
        kind: what it is.
        format: name of the format.

    Raises:
        CheckpointError: the format cannot express it, or the folder cannot be written.
    """
    info = info_of(model)
    _refuse_sharded(model, format)
    sharding.save(model, stored, lambda s: formats.write(Path(folder), s, kind, format, info))


def check(model: AdaptedModel, stored: Checkpoint, kind: formats.Kind, format: str) -> None:
    """Check that `write` can express a checkpoint; arguments as there.

    Raises:
        CheckpointError: it cannot.
    """
    _refuse_sharded(model, format)
    formats.encoded(stored, kind, format, info_of(model))


def _refuse_sharded(model: AdaptedModel, format: str) -> None:
    if format != "native":
        # these formats read weights of the base model, in one process
        hint = (
            f"Write {argument('format', 'native')}, load it into a whole model, and save it from "
            f"there."
        )
        sharding.refuse_if_sharded(model, hint)


def provenance(model: AdaptedModel, name: str) -> dict[str, Any]:
    """Return what a checkpoint says about the model.

    Args:
        model: that it is taken from.
        name: of what is saved.
    """
    info = info_of(model)
    return {
        "name": name,
        "model_type": info.model_type,
        "model_class": info.model_class,
        "model_name": info.model_name,
        "hidden_size": info.hidden_size,
    }


def name_in(load_as: str | None, stored: Checkpoint, path: StrPath) -> str:
    """Return the name for an adapter or head: the one asked for, the stored one, or the path's.

    Raises:
        ConfigError: the name is not legal.
    """
    if load_as is not None:
        return check_name(load_as)
    name = stored.metadata.get("name")
    try:
        return check_name(PurePath(path).name if name is None else name)
    except ConfigError as error:
        raise ConfigError(
            f"{error} The checkpoint brought this one: write "
            f"{argument('load_as', 'my_task', 'load_adapter')} to give another."
        ) from error


def check_meta(meta: Mapping[str, Any] | None) -> None:
    """Check a user's `meta_dict`.

    Raises:
        ConfigError: it is not JSON.
    """
    try:
        json.dumps(dict(meta or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"meta_dict={meta!r} is not JSON ({error}). "
            f"Write meta_dict={{'key': …}} of texts, numbers, lists and dicts."
        ) from error
