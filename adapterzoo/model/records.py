"""What is read from checkpoints and written to them, on its way between files and models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from torch import Tensor

from adapterzoo.checkpoint.formats import Checkpoint
from adapterzoo.configs import AdapterConfig, ConfigUnion, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import CheckpointError, ConfigError
from adapterzoo.names import check_name


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """A head as a checkpoint holds it: a document of JSON types, and tensors."""

    document: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter that was read and fits the model, its meta, and what puts its head there."""

    name: str
    config: AdapterConfig
    made: dict[str, tuple[Adapter, list[Placement]]]
    meta: Mapping[str, Any]
    enter_head: Callable[[], None] | None


def record_of(call: str, stored: Checkpoint) -> HeadRecord:
    """The head in a checkpoint.

    Raises:
        CheckpointError: the document does not describe one.
    """
    document = stored.metadata.get("head")
    if not isinstance(document, Mapping):
        raise CheckpointError(
            f"{call}: the checkpoint describes its head by {document!r}, which is no object. "
            f"Save it again, or write with_head=False."
        )
    return HeadRecord(dict(document), stored.head)


def name_in(
    call: str, load_as: str | None, stored: Checkpoint, path: str | os.PathLike[str]
) -> str:
    """The name that a checkpoint's adapter or head gets.

    Args:
        call: the public function.
        load_as: what the user chose.
        stored: the checkpoint; not every format knows a name.
        path: where it came from, whose last part is the name then.

    Raises:
        ConfigError: it is not legal.
    """
    if load_as is not None:
        return check_name(call, load_as)
    name = stored.metadata.get("name")
    try:
        return check_name(call, PurePath(path).name if name is None else name)
    except ConfigError as error:
        raise ConfigError(
            f"{error} The checkpoint brought this one: write load_as='my_task' to give another."
        ) from error


def leaving_out(config: AdapterConfig, layers: tuple[int, ...]) -> AdapterConfig:
    """The config without these blocks, and without those that it left out already."""
    if isinstance(config, ConfigUnion):
        return ConfigUnion(*(leaving_out(member, layers) for member in config.configs))
    own = tuple(config.to_dict().get("leave_out", ()))
    return config.replace(leave_out=(*own, *(n for n in layers if n not in own)))


def meta_of(stored: Checkpoint) -> Mapping[str, Any]:
    """The values that a user gave a checkpoint; none where there is no object of them."""
    meta = stored.metadata.get("meta")
    return dict(meta) if isinstance(meta, Mapping) else {}


def check_meta(call: str, meta: Mapping[str, Any] | None) -> None:
    """Check that a user's own values can be written.

    Raises:
        ConfigError: they are not JSON.
    """
    try:
        json.dumps(dict(meta or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{call}: meta_dict={meta!r} is not JSON ({error}). "
            f"Write meta_dict={{'key': …}} of texts, numbers, lists and dicts."
        ) from error
