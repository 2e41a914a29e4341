"""The formats of checkpoints: what one must do, which of them a folder holds, and the way to disk.

A format is a file beside this one that registers itself. It recognises its folders, reads one
into the vocabulary of this library (`Stored`), and encodes that as the files of a folder;
it writes nothing itself, so that what it cannot say is an error before the disk has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy
from adapterzoo.errors import CheckpointError, listing
from adapterzoo.registry import Registry

from . import folders
from .stored import Stored

Stem = Literal["adapter", "head"]
STEMS: tuple[Stem, ...] = ("adapter", "head")
"""What a folder may hold; an adapter, with its head or without, goes before a head alone."""

# how the weights of a whole model are called
_WHOLE = ("model.safetensors", "model-", "pytorch_model")

formats: Registry[Format] = Registry("format")
"""Names, as `format=` takes them, to formats; in the order in which folders are shown to them."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a format must know of the model that is filled or was saved.

    Attributes:
        call: what the user wrote, for messages.
        anatomy: of the base model; its paths are those of `Stored.adapter`.
        prefix: of the base model's keys in the whole model, such as "bert"; empty when the model
            has no base model below it.
        model_type: as in its config.
        model_class: name of its class.
        model_name: where it was loaded from.
        hidden_size: width of its hidden states.
        config: the model's config as a dict, that of the text part on top in composite ones.
        named_heads: whether it has heads by name, or one static head.
        static_head: gives the shapes of that head's tensors by key.
        from_static: (name of a task class, tensors of its head by key, labels or None) to the
            head's document and tensors as a model with named heads has them. Raises
            `CheckpointError` where there is no such head.
        to_static: (task class, document, tensors) of a named head to the tensors of the task
            class by key. Raises `CheckpointError` where the two differ.
        tied: document of a named head to its tensors that are the base model's, by their names
            in the head: formats that keep them in the file compare and write them.
        untied: (config of a named head, all its tensors) to the config and to the tensors that are
            the head's own: an output layer that is not the embedding is kept, and unties the head.
        with_head: whether the user wants the head too; without it `read` need not look at one.
        dtype: of its parameters.
        renamed: a path or key of the model as older releases of transformers named it, to the
            present one.
        tensor: key of the whole model to the tensor; None where there is none.
        modules: name of a task class of transformers to the paths of all modules that such a
            model has, with the names of the tensors that each of them saves.
    """

    call: str
    anatomy: Anatomy
    prefix: str
    model_type: str
    model_class: str
    model_name: str | None
    hidden_size: int | None
    config: Mapping[str, Any]
    named_heads: bool
    static_head: Callable[[], Mapping[str, tuple[int, ...]]]
    from_static: Callable[
        [str, Mapping[str, Tensor], Mapping[str, int] | None],
        tuple[dict[str, Any], dict[str, Tensor]],
    ]
    to_static: Callable[[str, Mapping[str, Any], Mapping[str, Tensor]], dict[str, Tensor]]
    tied: Callable[[Mapping[str, Any]], dict[str, Tensor]]
    untied: Callable[
        [Mapping[str, Any], Mapping[str, Tensor]], tuple[dict[str, Any], dict[str, Tensor]]
    ]
    with_head: bool
    dtype: torch.dtype
    renamed: Callable[[str], str]
    tensor: Callable[[str], Tensor | None]
    modules: Callable[[str], Mapping[str, tuple[str, ...]]]


class Format(Protocol):
    """What a format offers; a module may be one."""

    def recognises(self, folder: Path, stem: Stem) -> bool:
        """Whether a folder holds an adapter, or a head alone, of this format.

        Looks at names of files and at most at a config; a damaged file of the format is
        recognised, so that `read` can say what is wrong with it.
        """

    def read(self, folder: Path, stem: Stem, facts: Facts) -> Stored:
        """What the folder holds, in this library's words.

        Raises:
            CheckpointError: a file is missing or damaged, or says what the model or this
                library does not have; the message names all of it.
        """

    def encode(self, stored: Stored, stem: Stem, facts: Facts) -> dict[str, bytes]:
        """The names and contents of the files to write.

        Raises:
            CheckpointError: the format cannot say what is stored.
        """

    def owned(self, stem: Stem) -> tuple[str, ...]:
        """Names of all the files that a folder of this format may have; others stay."""


def known() -> str:
    """The names of the formats, for messages."""
    return listing(formats)


def of(folder: Path, stem: Stem) -> str | None:
    """The name of the first format that recognises a folder."""
    return next((name for name, f in formats.items() if f.recognises(folder, stem)), None)


def read(folder: Path, stem: Stem, facts: Facts) -> Stored:
    """Read a folder in whichever format it is.

    Args:
        folder: on disk.
        stem: what is looked for.
        facts: of the model that shall be filled.

    Raises:
        CheckpointError: there is no such folder, no format knows it, or it is damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{facts.call}: there is no such folder. Write the folder that save_{stem} was given."
        )
    with folders.reading(facts.call, folder):
        name = of(folder, stem)
        if name is None:
            raise CheckpointError(
                f"{facts.call}: the folder holds no {stem} in a format that is known ({known()}); "
                f"{_elsewhere(folder, stem, facts)}"
            )
        return formats[name].read(folder, stem, facts)


def _elsewhere(folder: Path, stem: Stem, facts: Facts) -> str:
    """What the folder holds instead, and what to write for it."""
    method = facts.call.partition("(")[0]
    # of all adapters, or of a trainer with its checkpoints
    below = [p for p in sorted([*folder.glob("*"), *folder.glob("*/*")]) if p.is_dir()]
    held = [str(path) for path in below if of(path, stem) is not None]
    if held:
        return f"those below it do: {listing(held)}. Write {method}({held[0]!r})."
    others = [other for other in STEMS if other != stem and of(folder, other) is not None]
    if others:
        what = "an adapter" if others[0] == "adapter" else "a head"
        return f"it holds {what}. Write load_{others[0]}({str(folder)!r})."
    files = sorted(path.name for path in folder.iterdir())
    if "config.json" in files and any(name.startswith(_WHOLE) for name in files):
        load = f"load_model({str(folder)!r}, {facts.model_class})"
        if facts.named_heads:
            load = f"AutoAdapterModel.from_pretrained({str(folder)!r})"
        return (
            f"it holds a whole model, with the adapters and heads that it had. Write "
            f"model = {load}, and model.save_{stem}('folder', 'name') to have one alone."
        )
    return f"its files: {listing(files)}. Write the folder that save_{stem} was given."


def write(folder: Path, stored: Stored, stem: Stem, name: str, facts: Facts) -> None:
    """Write a checkpoint; everything that can be wrong with it is found before.

    Args:
        folder: made when missing.
        stored: what to write, tensors whole.
        stem: what it is.
        name: of the format.
        facts: of the model that it was taken from.

    Raises:
        CheckpointError: the format cannot say it, the folder holds a checkpoint of another
            format, or cannot be written; what was there is still whole.
        UnknownNameError: there is no such format.
    """
    chosen = formats.find(name)
    if name != "native" and stored.document.get("embeddings") is not None:
        raise CheckpointError(
            f"{facts.call}: the adapter has trained embeddings, and the format {name!r} has no "
            f"word for them. Nothing has been written. Write format='native'."
        )
    contents = chosen.encode(stored, stem, facts)
    touched = {*contents, *chosen.owned(stem)}
    with folders.saving(facts.call, folder):
        for held in STEMS:
            there = of(folder, held)
            if there in (None, name):
                continue
            # of the other kind, it may lie beside: where no file is one of both
            if held == stem or touched & {*formats[there].owned(held)}:
                what = "an adapter" if held == "adapter" else "a head"
                raise CheckpointError(
                    f"{facts.call}: the folder {str(folder)!r} holds {what} in the format "
                    f"{there!r}; files of both would be mixed. Write another folder, or empty "
                    f"this one."
                )
        folders.replace_files(facts.call, folder, contents, chosen.owned(stem))
