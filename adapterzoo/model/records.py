"""What is read from checkpoints and written to them, on its way between files and models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adapterzoo.checkpoint import native
from adapterzoo.configs import AdapterConfig, ConfigUnion, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """A head as a checkpoint holds it: a document of JSON types, and tensors."""

    document: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter that was read and fits the model, and what puts its head there."""

    name: str
    config: AdapterConfig
    made: dict[str, tuple[Adapter, list[Placement]]]
    enter_head: Callable[[], None] | None


def record_of(call: str, stored: native.Stored) -> HeadRecord:
    """The head in a checkpoint.

    Raises:
        CheckpointError: the document does not describe one.
    """
    document = stored.document.get("head")
    if not isinstance(document, Mapping):
        raise CheckpointError(
            f"{call}: the checkpoint describes its head by {document!r}, which is no object. "
            f"Save it again, or write with_head=False."
        )
    return HeadRecord(dict(document), stored.head)


def leaving_out(config: AdapterConfig, layers: tuple[int, ...]) -> AdapterConfig:
    """The config without these blocks, and without those that it left out already."""
    if isinstance(config, ConfigUnion):
        return ConfigUnion(*(leaving_out(member, layers) for member in config.configs))
    own = tuple(config.to_dict().get("leave_out", ()))
    return config.replace(leave_out=(*own, *(n for n in layers if n not in own)))


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
