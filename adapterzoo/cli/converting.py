"""Adapters in another format, and merged into plain transformers models."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModel, PreTrainedModel
from transformers.utils.hub import cached_file

from adapterzoo import hub
from adapterzoo.checkpoint import files, folders, formats, native
from adapterzoo.errors import CheckpointError
from adapterzoo.heads import HeadConfig
from adapterzoo.model.hf.info import facts_of
from adapterzoo.model.hf.static_table import is_task
from adapterzoo.model.hf.task_classes import class_for, task_class, with_labels

from .checkpoints import Checkpoint, open_checkpoint
from .early import unwritable
from .models import (
    Fitted,
    base_of,
    config_of,
    fitted,
    load_into,
    plain_tokenizer,
    with_weights,
)

_NAME = "merged"
_PART = ".adapterzoo-part-"
_CURE = "To have it, write --as with a class that has such a head."


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written.

    Attributes:
        model_class: of transformers.
        lost_head: why the adapter's head is not in it, where it is not.
        lost_tokenizer: why no tokenizer is in it, where none is.
    """

    model_class: str
    lost_head: str | None
    lost_tokenizer: str | None


@dataclass(frozen=True, slots=True)
class _Target:
    """What is to be written.

    Attributes:
        name: of a class of transformers; None: the base model alone.
        head: document of the adapter's head where it becomes that of the class.
        tensors: of that head by key in the class; none where the file has them by those keys.
        lost: why the adapter's head does not.
    """

    name: str | None
    head: Mapping[str, Any] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    lost: str | None = None


def convert(
    checkpoint: Checkpoint,
    folder: str,
    to: str,
    model: str | None,
    name: str | None,
    with_head: bool,
) -> None:
    """Write a checkpoint in another format.

    Args:
        checkpoint: an adapter, or a head alone.
        folder: made when missing.
        to: name of the format.
        model: base model; None: the one that the checkpoint names.
        name: to give it; None: its own.
        with_head: whether an adapter's head goes with it.

    Raises:
        CheckpointError: the format cannot say it, it does not fit the base model, or the folder
            cannot be written.
    """
    found = fitted(checkpoint, base_of(checkpoint, model), name=name, writes=to)
    if checkpoint.stem == "head":
        found.model.save_head(folder, found.name, format=to)
        return
    meta = checkpoint.meta
    found.model.save_adapter(folder, found.name, with_head=with_head, meta_dict=meta, format=to)


@contextlib.contextmanager
def with_edits(call: str, path: str, revision: str | None) -> Iterator[Checkpoint]:
    """A native checkpoint as its config, which was edited by hand, describes it.

    Args:
        call: what the user wrote, for messages.
        path: folder or name on the Hub.
        revision: branch, tag or commit on the Hub.

    Raises:
        CheckpointError: it is of another format, whose config is taken as it stands, or damaged.
        HubError: it cannot be fetched.
    """
    folder = hub.resolve(path, revision, call=call)
    with folders.reading(call, folder):
        there = [stem for stem in formats.STEMS if formats.of(folder, stem) == "native"]
        if not there:
            raise CheckpointError(
                f"{call} --edited: {path!r} holds no checkpoint in the native format; of other "
                f"formats the config is taken as it stands. Leave --edited out."
            )
        contents = native.resealed(folder, there[0])
    with tempfile.TemporaryDirectory() as copy:
        files.write_all(Path(copy), contents)
        yield dataclasses.replace(open_checkpoint(call, copy), path=path)


def merge(
    checkpoint: Checkpoint, base: str, out: str, architecture: str | None, with_head: bool
) -> Merged:
    """Write a plain model with an adapter merged into its weights.

    Args:
        checkpoint: of an adapter.
        base: folder or name on the Hub.
        out: a new folder.
        architecture: class of transformers; None: that of the base model, or where its head is
            another than the adapter's, the one that has the adapter's.
        with_head: whether the adapter's head becomes that of the class.

    Raises:
        CheckpointError: the adapter or its head does not fit, or the folder cannot be written.
        ConfigError: there is no such class.
        StateError: the adapter cannot be merged.
    """
    call = checkpoint.call
    if checkpoint.stem == "head":
        raise CheckpointError(
            f"{call}: {checkpoint.path!r} holds a head alone, which changes no weight. Write the "
            f"folder of an adapter."
        )
    if architecture is not None:
        task_class(architecture)
    config = config_of(call, base)
    tokenizer, lost_tokenizer = _tokenizer(call, base)
    own = next(iter(config.architectures or ()), None)
    target = _Target(architecture or own)
    if with_head:
        found = fitted(checkpoint, base, name=_NAME)
        target = _target(found, call, own, architecture)
    own_head = target.head is not None and "static" in target.head
    if target.head is not None and not own_head:
        config = with_labels(config, HeadConfig.from_dict(target.head["config"]))
    cls: Any = AutoModel if target.name is None else task_class(target.name)
    replaced = target.head is not None
    model = with_weights(
        call, base, cls, config=config, dtype="auto", ignore_mismatched_sizes=replaced
    )
    keys = set(model.state_dict())
    load_into(checkpoint, model, _NAME, with_head=own_head)
    model.merge_adapter(_NAME)
    state = model.state_dict()
    with torch.no_grad():
        for key, tensor in target.tensors.items():
            state[key].copy_(tensor)
    # the adapter stays where it is in memory, and out of the file
    plain = {key: tensor for key, tensor in state.items() if key in keys}
    try:
        with _whole(Path(out).resolve()) as part:
            PreTrainedModel.save_pretrained(model, part, state_dict=plain)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
    # safetensors tells a full disk as an error of its own
    except (OSError, SafetensorError) as error:
        raise unwritable(call, out, error) from error
    return Merged(type(model).__name__, target.lost, lost_tokenizer)


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` when the block ends, and is deleted where the block fails.

    Raises:
        OSError: `out` cannot be written; no file of it is left.
    """
    # an empty folder stays the one that it is: a disk may be mounted there
    empty = out.is_dir()
    home = out if empty else out.parent
    home.mkdir(parents=True, exist_ok=True)
    if empty:
        for litter in out.iterdir():
            # of a merge that was killed; the caller has seen that nothing else is there
            shutil.rmtree(litter, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PART, dir=home) as private:
        part = Path(private, out.name)
        # with the mode of any new folder, which the private one around it has not
        part.mkdir()
        yield part
        if not empty:
            part.replace(out)
            return
        for file in part.iterdir():
            file.replace(out / file.name)


def _target(found: Fitted, call: str, own: str | None, architecture: str | None) -> _Target:
    """The class that is written, and what becomes of the adapter's head.

    Args:
        found: the adapter in a model of the base model's structure.
        call: what the user wrote, for messages.
        own: class of the base model.
        architecture: what the user chose.

    Raises:
        CheckpointError: the class that the user chose has another head.
    """
    name = architecture or own
    head = found.stored.document.get("head")
    if head is None:
        return _Target(name)
    if architecture is not None and not is_task(architecture):
        return _Target(name, lost=f"a {name} has none. {_CURE}")
    if "static" in head:
        return _Target(architecture or str(head["static"]), head)
    facts = facts_of(found.model, call)
    if architecture is not None:
        return _Target(name, head, facts.to_static(architecture, head, found.stored.head))
    try:
        task, tensors = class_for(found.stored, facts, name)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{call}: ")
        return _Target(name, lost=f"the class is that of the base model, as {reason}")
    return _Target(task, head, tensors)


def _tokenizer(call: str, base: str) -> tuple[Any, str | None]:
    """The tokenizer of a base model; or None, and why."""
    try:
        cached_file(base, "tokenizer_config.json")
    except OSError as error:
        # what the Hub answers, or that it does not, is the cause; a missing file has none
        if error.__cause__ is None and error.errno is None:
            return None, f"No tokenizer of {base!r} was found"
        reason = " ".join(str(error).split())
        return None, f"The tokenizer of {base!r} cannot be had ({reason})"
    return plain_tokenizer(call, base), None
