"""Heads in folders of their own: saved, read and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from adapterzoo import formats
from adapterzoo.errors import CheckpointError, StateError, argument, unknown_name
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.model import sharding
from adapterzoo.model.adapterhub import arguments
from adapterzoo.model.hf import documents
from adapterzoo.model.hf.documents import StrPath
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.state import AdaptedModel

from .interface import HeadRecord, LoadOptions


def save(
    model: AdaptedModel, folder: StrPath, head_name: str | None, format: str = "native"
) -> None:
    """Save only a head.

    Raises:
        UnknownNameError: there is no such head.
        StateError: there is none to save.
    """
    strategy = model._head_strategy
    known = strategy.saved_names()
    if head_name is not None and head_name not in known:
        raise unknown_name("", "head", head_name, known)
    name = head_name or strategy.active_name()
    sharding.reshard(model)
    with sharding.gathering(model, ()):
        record = strategy.record(name, alone=True, short=format == "native")
        if record is None:
            raise StateError(
                f"this {type(model).__name__} has no head to save. "
                f"Write add_classification_head('my_task') first."
            )
        own_name = name if name and strategy.is_named else sharding.class_name(model)
        document = {**documents.provenance(model, own_name), "head": record.document}
        documents.write(model, folder, Checkpoint(document, {}, record.tensors), "head", format)


def load(model: AdaptedModel, folder: StrPath, asked: LoadOptions) -> str:
    """Load and activate a head."""
    name, enter = fitting(model, folder, asked)
    enter()
    return name


def fitting(
    model: AdaptedModel, folder: StrPath, asked: LoadOptions
) -> tuple[str, Callable[[], None]]:
    """Read what `load_head` loads and check it; return its name and what enters it."""
    strategy = model._head_strategy
    sharding.refuse_if_sharded(model, "Load it before fully_shard(model).")
    stored = formats.read(Path(folder), "head", ModelInfo(model))
    name = documents.name_in(asked.load_as, stored, folder)
    target = name if strategy.is_named else strategy.active_name()
    asked, warn = arguments.overwriting(asked, name, head=strategy.names())
    enter_head = strategy.fitting(head_in(stored), target, asked)

    def enter() -> None:
        enter_head()
        warn()
        arguments.report(asked.loading_info)

    return name, enter


def head_in(stored: Checkpoint) -> HeadRecord:
    """Return the head of a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    document = stored.metadata.get("head")
    if not isinstance(document, Mapping):
        raise CheckpointError(
            f"the checkpoint describes its head by {document!r}, which is not an object. "
            f"Save it again, or write {argument('with_head', False, 'load_adapter')}."
        )
    return HeadRecord(dict(document), stored.head)
