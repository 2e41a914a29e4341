"""What a checkpoint says of itself, in whatever format, before any model is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterzoo import hub
from adapterzoo.checkpoint import adapterhub, files, folders, formats, native, peft
from adapterzoo.checkpoint.digest import fingerprint
from adapterzoo.errors import CheckpointError, naming
from adapterzoo.hub.files import ADAPTER_CONFIG, wanted

from .early import no_adapter

_HEAD_CONFIG = "head_config.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with an adapter or a head alone, read but not compared with a model.

    Attributes:
        call: what the user wrote, for messages.
        path: as the user wrote it.
        folder: where the files lie.
        stem: what it holds.
        format: name of the format.
        document: its config; in the native format with the head's.
        head: description of the head, None where none is known without a model.
        meta: what whoever saved it wrote down beside it.
        tensors: all of them, by the keys of the file.
        sizes: bytes of each file.
    """

    call: str
    path: str
    folder: Path
    stem: formats.Kind
    format: str
    document: Mapping[str, Any]
    head: Mapping[str, Any] | None
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, int]

    @property
    def base(self) -> str | None:
        """The base model by its own word."""
        names = (self.document.get(key) for key in ("model_name", "base_model_name_or_path"))
        return next((name for name in names if isinstance(name, str) and name), None)

    @property
    def method(self) -> str | None:
        """The method, by the format's own word."""
        config = self.document.get("config")
        own = config.get("architecture") if isinstance(config, Mapping) else None
        return _text(own or self.document.get("peft_type"))

    @property
    def name(self) -> str | None:
        """The adapter's name; not every format knows one."""
        return _text(self.document.get("name"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most tensors; the default one where there are none."""
        dtypes = Counter(t.dtype for t in self.tensors.values() if t.is_floating_point())
        return dtypes.most_common(1)[0][0] if dtypes else torch.get_default_dtype()

    @property
    def fingerprint(self) -> str | None:
        """What `adapter_fingerprint` gives; None where only a model can tell."""
        if self.format != "native" or self.stem == "head":
            return None
        stored = native.load(self.folder, self.stem)
        config = stored.metadata.get("config")
        return fingerprint(config, stored.adapter) if isinstance(config, Mapping) else None

    @property
    def head_type(self) -> str | None:
        """The head's type, the name of its class, or None."""
        if self.head is None:
            return None
        config = self.head.get("config")
        own = config.get("head_type") if isinstance(config, Mapping) else None
        return _text(own or self.head.get("static") or self.head.get("model_class"))

    @property
    def labels(self) -> list[str] | None:
        """The head's classes in order."""
        config = self.head.get("config") if self.head is not None else None
        numbers = config.get("label2id") if isinstance(config, Mapping) else None
        if not isinstance(numbers, Mapping):
            return None
        if not all(isinstance(number, int) for number in numbers.values()):
            return None
        return sorted(numbers, key=numbers.__getitem__)


def open_checkpoint(call: str, path: str, revision: str | None = None) -> Checkpoint:
    """Read a folder, or fetch a repository of the Hub and read it.

    Args:
        call: what the user wrote, for messages.
        path: a folder, `user/repository` or `user/repository/folder`.
        revision: branch, tag or commit on the Hub.

    Raises:
        CheckpointError: there is no adapter, or its files are damaged.
        HubError: it cannot be fetched.
    """
    folder = hub.resolve(path, revision, call=call)
    # a save that was killed is finished first, and one that goes on is waited for
    with naming(call), folders.reading(folder):
        return _opened(call, path, folder)


def _opened(call: str, path: str, folder: Path) -> Checkpoint:
    found = ((stem, formats.of(folder, stem)) for stem in formats.KINDS)
    stem, name = next((pair for pair in found if pair[1] is not None), ("adapter", None))
    if name is None:
        raise no_adapter(call, path, (file.name for file in folder.iterdir()))
    names = wanted(file.name for file in folder.iterdir() if file.is_file())
    if not names:
        raise CheckpointError(
            f"{call}: {path!r} has the config of an {stem} in the format {name!r} and no tensors. "
            f"Copy it again from where it was saved."
        )
    sizes = {file: (folder / file).stat().st_size for file in names}
    if name == "native":
        stored = native.load(folder, stem)
        head = stored.metadata.get("head")
        tensors = native.keyed(stored)
        document: Mapping[str, Any] = stored.metadata
        meta: object = document.get("meta")
    else:
        tensors = {}
        for file in names:
            if not file.endswith(".json"):
                tensors |= files.read_tensors(folder / file)
        document = files.read_json(folder / (ADAPTER_CONFIG if stem == "adapter" else _HEAD_CONFIG))
        has_head = name != "peft" and (folder / _HEAD_CONFIG).is_file()
        head = files.read_json(folder / _HEAD_CONFIG) if has_head else None
        meta = adapterhub.meta_in(document) if name == "adapterhub" else peft.meta_in(folder)
    return Checkpoint(
        call, path, folder, stem, name, document,
        head if isinstance(head, Mapping) else None,
        meta if isinstance(meta, Mapping) else {}, tensors, sizes,
    )  # fmt: skip


def _text(value: object) -> str | None:
    """A text out of a file of others; None for nothing."""
    return str(value) if value else None
