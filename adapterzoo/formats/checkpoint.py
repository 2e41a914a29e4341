"""Formats of checkpoints: their interface, detecting the format of a folder, reading and writing.

A format is a file or package beside this one that registers itself. It recognizes its folders,
reads one as a `Checkpoint`, and encodes a checkpoint as the files of a folder. It does not write
them, so that a checkpoint that it cannot express is an error before the disk has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError, argument, in_python, listing
from adapterzoo.registry import Registry
from adapterzoo.spelling import AdapterHubSpelling, PeftSpelling

from . import files, folders
from .places import plain

S = TypeVar("S", AdapterHubSpelling, PeftSpelling)

Kind = Literal["adapter", "head"]
KINDS: tuple[Kind, ...] = ("adapter", "head")
"""The kinds of folders; an adapter, with or without its head, comes before only a head."""

OWN_OUTPUT = "own_output"
"""The key in a document of a task class: whether the output layer is the adapter's own."""

# names of files with the weights of a whole model
_WHOLE = ("model.safetensors", "model-", "pytorch_model")

formats: Registry[Format] = Registry("format")
"""Names, the values of `format=`, to formats, in the order in which they are tried on a folder."""


@dataclass(slots=True)
class Checkpoint:
    """The contents of a checkpoint, in our terms.

    Attributes:
        metadata: JSON types: format, version, name, model_type, `config` of the adapter, `head`.
        adapter: `<path of the site>/<parameter>` to tensor; see `places` for adapter-wide ones.
        head: parameter to tensor.
    """

    metadata: dict[str, Any]
    adapter: dict[str, Tensor] = field(default_factory=dict)
    head: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Base:
    """The model of a checkpoint: its name on the Hub or its folder, None if unknown, and commit."""

    name: str | None
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts about the model to fill or save that formats need.

    Attributes:
        anatomy: of the base model; its paths are those of `Checkpoint.adapter`.
        prefix: of the base model's keys in the whole model, such as "bert"; empty when the model
            has no base model below it.
        model_type: as in its config.
        model_class: name of its class.
        model_name: the name or path that it was loaded from.
        hidden_size: width of its hidden states.
        config: gives the model's config as a dict, with that of the text part merged into it.
        named_heads: whether it has heads by name, or one static head.
        static_head: gives the shapes of that head's tensors by key.
        from_static: name of a task class, tensors of its head by key, and labels or None, to the
            metadata and tensors of a named head. Raises `CheckpointError` where there is none.
        to_static: task class, metadata and tensors of a named head to the tensors of the task
            class by key. Raises `CheckpointError` where the two differ.
        tied: metadata of a named head to its tensors that are the base model's, by their names
            in the head: formats that keep them in the file compare and write them.
        untied: config of a named head and all its tensors to the config, and the tensors that are
            the head's own: an output layer that is not the embedding is kept, and unties the head.
        with_head: whether the user wants the head too; without it `read` need not look at one.
        dtype: of its parameters.
        renamed: a path or key of the model in older releases of transformers to the present one.
        tensor: key of the whole model to the tensor; None where there is none.
        modules: name of a task class of transformers to the paths of all modules of such a model,
            with the names of the tensors that each of them saves.
        split_experts: names that PEFT takes for the former layers of fused experts, wherever they
            are.
        output: gives the keys of the output layer of its static head, if it is a language model's.
    """

    anatomy: Anatomy
    prefix: str
    model_type: str
    model_class: str
    model_name: str | None
    hidden_size: int | None
    config: Callable[[], Mapping[str, Any]]
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
    split_experts: frozenset[str] = frozenset()
    output: Callable[[], frozenset[str]] = frozenset


class Format(Protocol):
    """The interface of a format."""

    def recognizes(self, folder: Path, kind: Kind) -> bool:
        """Return whether a folder holds an adapter, or only a head, of this format.

        Look only at file names and a config; recognize damaged files too, so that `read` can
        say what is wrong with them.
        """

    def read(self, folder: Path, kind: Kind, info: ModelInfo) -> Checkpoint:
        """Read a folder.

        Raises:
            CheckpointError: a file is missing or damaged, or needs what the model or this
                library does not have; the message names all of it.
        """

    def encode(self, checkpoint: Checkpoint, kind: Kind, info: ModelInfo) -> dict[str, bytes]:
        """Return the names and contents of the files to write.

        Raises:
            CheckpointError: the format cannot express the checkpoint.
        """

    def base(self, folder: Path) -> Base:
        """Return the model that an adapter was trained on.

        Raises:
            CheckpointError: the config is missing or damaged.
        """

    def owned(self, kind: Kind) -> tuple[str, ...]:
        """Return the names of all files that a folder of this format may have; others are kept."""


def base_of(values: Mapping[str, Any], name: str, revision: str) -> Base:
    """Return the model that the config of a file names in these fields."""
    found = (values.get(name), values.get(revision))
    return Base(*(value if isinstance(value, str) and value else None for value in found))


def inexpressible(why: str, *hints: str) -> CheckpointError:
    """Return the error for what a format cannot express.

    Args:
        why: the reason.
        hints: what to write instead; none: the native format.
    """
    hint = " or ".join(hints or (argument("format", "native"),))
    return CheckpointError(f"{why}. Nothing has been written. Write {hint}.")


def method_of(values: Mapping[str, Any], key: str, named: Sequence[S], legal: str) -> S:
    """Return the spelling of the method that a config in a file of a peer belongs to.

    Args:
        values: the config in the file.
        key: the field with the name of the method.
        named: the spellings with that name.
        legal: the methods that exist here, and what to do about another one.

    Raises:
        CheckpointError: it belongs to no method.
    """
    differing = [spelling.differing(values) for spelling in named]
    if [] in differing:
        fitting = [s for s, wrong in zip(named, differing, strict=True) if not wrong]
        return max(fitting, key=lambda s: s.strictness)
    nearest: list[str] = min(differing, key=len, default=[])
    shown = ", ".join(f"{name}={short(values.get(name))}" for name in (key, *nearest))
    raise CheckpointError(
        f"there is no such method here: adapter_config.json says {shown}. Methods of {legal}"
    )


def short(value: object) -> str:
    """Return a value of a file as a message shows it."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def of(folder: Path, kind: Kind) -> str | None:
    """Return the name of the first format that recognizes a folder."""
    return next((name for name, f in formats.items() if f.recognizes(folder, kind)), None)


def read(folder: Path, kind: Kind, info: ModelInfo) -> Checkpoint:
    """Read a folder in any format.

    Args:
        folder: on disk.
        kind: what to read.
        info: of the model to fill.

    Raises:
        CheckpointError: there is no such folder, no format knows it, or it is damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{str(folder)!r}: there is no such folder. Write the folder that save_{kind} was "
            f"given."
        )
    with folders.reading(folder):
        name = of(folder, kind)
        if name is None:
            raise CheckpointError(
                f"{str(folder)!r} holds no {kind} in a known format ({listing(formats)}); "
                f"{_elsewhere(folder, kind, info)}"
            )
        return formats[name].read(folder, kind, info)


def _elsewhere(folder: Path, kind: Kind, info: ModelInfo) -> str:
    """Return the end of a message: what the folder holds instead, and what to write."""
    # of all adapters, or of a trainer with its checkpoints
    below = [p for p in sorted([*folder.glob("*"), *folder.glob("*/*")]) if p.is_dir()]
    held = [str(path) for path in below if of(path, kind) is not None]
    if held:
        return f"those below it do: {listing(held)}. Write load_{kind}({held[0]!r})."
    others = [other for other in KINDS if other != kind and of(folder, other) is not None]
    if others:
        what = "an adapter" if others[0] == "adapter" else "a head"
        return f"it holds {what}. Write load_{others[0]}({str(folder)!r})."
    names = sorted(path.name for path in folder.iterdir())
    if "config.json" in names and any(name.startswith(_WHOLE) for name in names):
        load = f"load_model({str(folder)!r}, {info.model_class})"
        if info.named_heads:
            load = f"AutoAdapterModel.from_pretrained({str(folder)!r})"
        return (
            f"it holds a whole model, with the adapters and heads that it had. Write "
            f"model = {load}, and model.save_{kind}('folder', 'name') to have one alone."
        )
    return (
        f"its files: {listing(names)}. Write "
        f"{in_python(f'the folder that save_{kind} wrote', 'the folder of an adapter')}."
    )


def exported(checkpoint: Checkpoint, info: ModelInfo) -> Checkpoint:
    """Return a checkpoint with its adapter as files of the peers hold it."""
    config = AdapterConfig.from_dict(checkpoint.metadata["config"])
    config, tensors = plain(config, checkpoint.adapter, info.anatomy)
    metadata = {**checkpoint.metadata, "config": config.to_dict()}
    return replace(checkpoint, metadata=metadata, adapter=tensors)


def encoded(checkpoint: Checkpoint, kind: Kind, name: str, info: ModelInfo) -> dict[str, bytes]:
    """Return the files of a checkpoint; arguments as of `write`.

    Raises:
        CheckpointError: the format cannot express it.
        UnknownNameError: there is no such format.
    """
    chosen = formats.find(name)
    if name != "native" and checkpoint.metadata.get("embeddings") is not None:
        raise inexpressible(f"the adapter has trained embeddings, and the format {name!r} has none")
    if name != "native" and kind == "adapter":
        checkpoint = exported(checkpoint, info)
    return chosen.encode(checkpoint, kind, info)


def write(folder: Path, checkpoint: Checkpoint, kind: Kind, name: str, info: ModelInfo) -> None:
    """Write a checkpoint, after checking everything that could be wrong with it.

    A checkpoint of the same kind that the folder holds is replaced, in whichever format it is.

    Args:
        folder: created if missing.
        checkpoint: what to write, with whole tensors.
        kind: what it holds.
        name: of the format.
        info: of the model that it was taken from.

    Raises:
        CheckpointError: the format cannot express it, files of another kind of checkpoint in
            another format would be mixed with it, or the folder cannot be written; what was there
            is still whole.
        UnknownNameError: there is no such format.
    """
    chosen, contents = formats.find(name), encoded(checkpoint, kind, name, info)
    touched, stale = {*contents, *chosen.owned(kind)}, set[str]()
    with folders.saving(folder):
        for held in KINDS:
            there = of(folder, held)
            if there is None:
                continue
            own = {*formats[there].owned(held)}
            is_other = type(formats[there]) is not type(chosen)
            if held == kind:
                stale |= own
            # the other kind may lie beside it, where no file belongs to both, or go with it
            elif is_other and not own <= stale and own & (touched | stale):
                what = "an adapter" if held == "adapter" else "a head"
                raise CheckpointError(
                    f"the folder {str(folder)!r} holds {what} in the format {there!r}; files of "
                    f"both would be mixed. Write another folder, or empty this one."
                )
        files.warn_of_another(folder, kind, checkpoint.metadata.get("name"))
        folders.replace_files(folder, contents, sorted(touched | stale))
