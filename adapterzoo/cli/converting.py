"""The work of `convert` and `merge`."""

from __future__ import annotations

import contextlib
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

from adapterzoo import formats
from adapterzoo.errors import CheckpointError, StateError
from adapterzoo.formats.checkpoint import KINDS
from adapterzoo.heads import STATIC, HeadConfig
from adapterzoo.model.hf.info import info_of
from adapterzoo.model.hf.task_classes import class_for, is_task, task_class, with_labels

from .checkpoints import CheckpointFolder
from .early import PART, unwritable
from .models import Fitted, base_of, config_of, fitted, load_into, plain_tokenizer, with_weights

_NAME = "merged"
_HINT = "To keep it, write --as with a class that has such a head."


@dataclass(frozen=True, slots=True)
class _Target:
    """What to write.

    Attributes:
        name: class of transformers; None: the base model alone.
        head: description of the adapter's head if it becomes that of the class.
        tensors: its tensors by their keys in the class; empty if the file has the same keys.
        lost: why the adapter's head is left out; None if it is not.
    """

    name: str | None
    head: Mapping[str, Any] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    lost: str | None = None


def convert(
    checkpoint: CheckpointFolder,
    folder: str,
    to: str,
    model: str | None,
    name: str | None,
    with_head: bool,
) -> None:
    """Write a checkpoint in another format.

    Args:
        checkpoint: an adapter, or only a head.
        folder: created if it is missing.
        to: name of the format.
        model: base model; None: the one that the checkpoint names.
        name: new name; None: its own.
        with_head: whether to write an adapter's head too.

    Raises:
        CheckpointError: the format cannot express it, it does not fit the base model, or the
            folder cannot be written.
    """
    refuse_to_replace(Path(folder), to)
    base = base_of(checkpoint, model)
    found = fitted(checkpoint, base, name=name, writes=to)
    if checkpoint.kind == "head":
        found.model.save_head(folder, found.name, format=to)
        return
    options: dict[str, Any] = {"with_head": with_head, "meta_dict": checkpoint.meta, "format": to}
    try:
        found.model.save_adapter(folder, found.name, **options)
    except StateError:
        # the format needs values of weights that are on the meta device
        found = fitted(checkpoint, base, name=name, whole=True)
        found.model.save_adapter(folder, found.name, **options)


def refuse_to_replace(folder: Path, to: str) -> None:
    """Refuse a folder that holds a checkpoint in another format: it may be the only copy.

    Args:
        folder: to be written.
        to: name of the format.

    Raises:
        CheckpointError: it holds one.
    """
    for kind in KINDS:
        there = formats.of(folder, kind)
        if there is not None and type(formats.formats[there]) is not type(formats.formats[to]):
            what = "an adapter" if kind == "adapter" else "a head"
            raise CheckpointError(
                f"the folder {str(folder)!r} holds {what} in the format {there!r}, which would be "
                f"lost. Write another folder."
            )


def merge(
    checkpoint: CheckpointFolder, base: str, out: str, architecture: str | None, with_head: bool
) -> tuple[str, str | None, str | None]:
    """Write a plain model with an adapter merged into its weights.

    Args:
        checkpoint: of an adapter.
        base: folder or name on the Hub.
        out: a new folder.
        architecture: class of transformers; None: that of the base model, or one with the
            adapter's head.
        with_head: whether the adapter's head becomes that of the class.

    Returns:
        The class of transformers; the reason if the adapter's head was left out, else None; the
        reason if there is no tokenizer, else None.

    Raises:
        CheckpointError: the adapter or its head does not fit, or the folder cannot be written.
        ConfigError: there is no such class.
        StateError: the adapter cannot be merged.
    """
    if checkpoint.kind == "head":
        raise CheckpointError(
            f"{checkpoint.path!r} holds only a head, which changes no weight. Write the folder of "
            f"an adapter."
        )
    if architecture is not None:
        task_class(architecture)
    config = config_of(base)
    tokenizer, lost_tokenizer = _tokenizer(base)
    own = next(iter(config.architectures or ()), None)
    target = _Target(architecture or own)
    if with_head:
        found = fitted(checkpoint, base, name=_NAME)
        target = _target(found, own, architecture)
    own_head = target.head is not None and STATIC in target.head
    if target.head is not None and not own_head:
        config = with_labels(config, HeadConfig.from_dict(target.head["config"]))
    cls: Any = AutoModel if target.name is None else task_class(target.name)
    replaced = target.head is not None
    model = with_weights(base, cls, config=config, dtype="auto", ignore_mismatched_sizes=replaced)
    keys = set(model.state_dict())
    load_into(checkpoint, model, _NAME, with_head=own_head)
    model.merge_adapter(_NAME)
    state = model.state_dict()
    with torch.no_grad():
        for key, tensor in target.tensors.items():
            state[key].copy_(tensor)
    # the adapter stays in the model, but not in the file
    plain = {key: tensor for key, tensor in state.items() if key in keys}
    try:
        with _whole(Path(out).resolve()) as part:
            PreTrainedModel.save_pretrained(model, part, state_dict=plain)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
    # safetensors reports a full disk by its own error
    except (OSError, SafetensorError) as error:
        raise unwritable(out, error) from error
    return type(model).__name__, target.lost, lost_tokenizer


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` if the block succeeds, and is deleted if it fails.

    Raises:
        OSError: `out` cannot be written; it holds no file.
    """
    # keep an empty folder: a disk may be mounted there
    empty = out.is_dir()
    home = out if empty else out.parent
    home.mkdir(parents=True, exist_ok=True)
    if empty:
        for litter in out.iterdir():
            # from a killed merge; the caller has checked that there is nothing else in it
            shutil.rmtree(litter, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PART, dir=home) as private:
        part = Path(private, out.name)
        # with the mode of a new folder, unlike the private one around it
        part.mkdir()
        yield part
        if not empty:
            part.replace(out)
            return
        for file in part.iterdir():
            file.replace(out / file.name)


def _target(found: Fitted, own: str | None, architecture: str | None) -> _Target:
    """Choose the class to write and decide what happens to the adapter's head.

    Args:
        found: the adapter in a model of the base model's structure.
        own: class of the base model.
        architecture: the user's choice.

    Raises:
        CheckpointError: the chosen class has another head.
    """
    name = architecture or own
    head = found.stored.metadata.get("head")
    if head is None:
        return _Target(name)
    if architecture is not None and not is_task(architecture):
        return _Target(name, lost=f"a {name} has no head. {_HINT}")
    if STATIC in head:
        return _Target(architecture or str(head[STATIC]), head)
    info = info_of(found.model)
    if architecture is not None:
        return _Target(name, head, info.to_static(architecture, head, found.stored.head))
    try:
        task, tensors = class_for(found.stored, info, name)
    except CheckpointError as error:
        return _Target(name, lost=f"the class is that of the base model, as {error}")
    return _Target(task, head, tensors)


def _tokenizer(base: str) -> tuple[Any, str | None]:
    """Return the tokenizer of a base model, or None and the reason."""
    try:
        cached_file(base, "tokenizer_config.json")
    except OSError as error:
        # an error of the Hub has a cause; a missing file does not
        if error.__cause__ is None and error.errno is None:
            return None, f"No tokenizer of {base!r} was found"
        reason = " ".join(str(error).split())
        return None, f"The tokenizer of {base!r} cannot be loaded ({reason})"
    return plain_tokenizer(base), None
