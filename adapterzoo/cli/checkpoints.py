"""Checkpoints of any format, read without a model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterzoo import formats, hub
from adapterzoo.errors import CheckpointError
from adapterzoo.formats import adapterhub, files, native, peft
from adapterzoo.formats.checkpoint import base_of
from adapterzoo.formats.fit import fingerprint, other_fingerprint
from adapterzoo.heads import STATIC
from adapterzoo.hub.names import ADAPTER_CONFIG, wanted

_HEAD_CONFIG = "head_config.json"


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder with an adapter or only a head, read but not compared with a model.

    Attributes:
        path: as the user wrote it, without a fingerprint.
        folder: the local folder.
        kind: `"adapter"` or `"head"`.
        format: name of the format.
        metadata: its config; native configs hold that of the head too.
        head: description of the head; None if only a model can give it.
        meta: the author's metadata.
        tensors: all tensors by their keys in the file.
        sizes: bytes of each file.
        fingerprint: the `adapter_fingerprint`; None if only a model can give it.
        pinned: the first digits of the fingerprint that the user wrote; None: none.
        origin: the base model that the files name.
    """

    path: str
    folder: Path
    kind: formats.Kind
    format: str
    metadata: Mapping[str, Any]
    head: Mapping[str, Any] | None
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    fingerprint: str | None
    pinned: str | None
    origin: formats.Base

    @property
    def base(self) -> str | None:
        """The name of its base model; None if the files do not have it."""
        return self.origin.name

    @property
    def method(self) -> str | None:
        """The format's name of the method."""
        own = _config_in(self.metadata).get("architecture")
        return _text(own or self.metadata.get("peft_type"))

    @property
    def name(self) -> str | None:
        """The adapter's name; some formats have none."""
        return _text(self.metadata.get("name"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most tensors; torch's default if there are none."""
        dtypes = Counter(t.dtype for t in self.tensors.values() if t.is_floating_point())
        return dtypes.most_common(1)[0][0] if dtypes else torch.get_default_dtype()

    @property
    def head_type(self) -> str | None:
        """The head's type or the name of its class; None without a head."""
        head = self.head or {}
        return _text(
            _config_in(head).get("head_type") or head.get(STATIC) or head.get("model_class")
        )

    @property
    def labels(self) -> list[str] | None:
        """The head's classes in the order of their ids."""
        numbers = _config_in(self.head or {}).get("label2id")
        if isinstance(numbers, Mapping) and all(isinstance(n, int) for n in numbers.values()):
            return sorted(numbers, key=numbers.__getitem__)
        return None


def open_checkpoint(path: str, revision: str | None = None) -> CheckpointFolder:
    """Read a local folder, or download a repository and read it.

    Args:
        path: a folder, `user/repository` or `user/repository/folder`; `@` and a fingerprint may
            follow.
        revision: branch, tag or commit on the Hub.

    Raises:
        CheckpointError: there is no adapter, its files are damaged, or it has another fingerprint.
        HubError: it cannot be downloaded.
    """
    name_or_path, pinned = hub.pinned(path)
    path = os.fspath(name_or_path)
    folder = hub.resolve(path, revision)
    found = ((kind, formats.of(folder, kind)) for kind in formats.KINDS)
    kind, name = next((pair for pair in found if pair[1] is not None), ("adapter", None))
    if name is None:
        raise CheckpointError(
            f"{path!r} holds no adapter and no head in a known format. Write the folder of an "
            f"adapter, or 'user/repository' for an adapter on the Hub."
        )
    names = wanted(file.name for file in folder.iterdir() if file.is_file())
    sizes = {file: (folder / file).stat().st_size for file in names}
    own_fingerprint = None
    if name == "native":
        stored = native.load(folder, kind)
        metadata, tensors = stored.metadata, native.keyed(stored)
        head, meta = metadata.get("head"), metadata.get("meta")
        # of trained embeddings, the file has only some rows
        if kind == "adapter" and "embeddings" not in metadata:
            own_fingerprint = fingerprint(_config_in(metadata), stored.adapter)
    else:
        tensors = {}
        for file in names:
            if not file.endswith(".json"):
                tensors |= files.read_tensors(folder / file)
        metadata = files.read_json(folder / (ADAPTER_CONFIG if kind == "adapter" else _HEAD_CONFIG))
        has_head = name != "peft" and (folder / _HEAD_CONFIG).is_file()
        head = files.read_json(folder / _HEAD_CONFIG) if has_head else None
        meta = adapterhub.meta_in(metadata) if name == "adapterhub" else peft.meta_in(folder)
    if pinned is not None and kind == "head":
        raise CheckpointError(f"{path!r} holds a head, which has no fingerprint. Write {path}.")
    if pinned is not None and not (own_fingerprint or pinned).startswith(pinned):
        raise other_fingerprint(str(own_fingerprint), pinned)
    if kind == "adapter":
        origin = formats.formats[name].base(folder)
    else:
        origin = base_of(metadata, "model_name")
    return CheckpointFolder(
        path, folder, kind, name, metadata,
        head if isinstance(head, Mapping) else None,
        meta if isinstance(meta, Mapping) else {}, tensors, sizes, own_fingerprint,
        pinned, origin,
    )  # fmt: skip


def _config_in(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config in a file; an empty one if there is none."""
    config = document.get("config")
    return config if isinstance(config, Mapping) else {}


def _text(value: object) -> str | None:
    """Return a value from a file as text; None for an empty one."""
    return str(value) if value else None


def refuse_to_replace(folder: Path, to: str) -> None:
    """Refuse a folder that holds a checkpoint in another format: it may be the only copy.

    Args:
        folder: to be written.
        to: name of the format.

    Raises:
        CheckpointError: it holds one.
    """
    for kind in formats.KINDS:
        there = formats.of(folder, kind)
        if there is not None and formats.formats[there].read is not formats.formats[to].read:
            raise CheckpointError(
                f"{str(folder)!r} holds an {kind} in the format {there!r}. Write another folder."
            )
