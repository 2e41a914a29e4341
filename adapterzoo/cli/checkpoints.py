"""Adapters on disk or on the Hub, read without a model and without torch, which is slow to import.

Of tensors only the headers are read, and in the native format their bytes for the digests.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapterzoo import hub
from adapterzoo.errors import CheckpointError
from adapterzoo.folders.formats import (
    FOLDER_FORMATS,
    HEAD_KEY,
    KINDS,
    checked_metadata,
    format_of,
)  # fmt: skip
from adapterzoo.folders.names import HEAD_CONFIG, NAMES, wanted
from adapterzoo.folders.reading import (
    PINNED_DIGITS,
    Header,
    digests_in,
    fingerprint_of,
    headers_in,
    other_fingerprint,
    read_json,
)  # fmt: skip
from adapterzoo.names import STATIC

if TYPE_CHECKING:
    import torch


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
        tensors: the headers of all tensors, by their keys in the file.
        weights: names of the files that hold these tensors.
        sizes: bytes of each file.
        fingerprint: the `adapter_fingerprint`; None if only a model can give it.
        pinned: the first digits of the fingerprint that the user wrote; None: none.
        base: name of the base model; None if the files do not have it.
        base_revision: its commit, or None.
        base_digest: digest of its weights, or None.
    """

    path: str
    folder: Path
    kind: Any
    format: str
    metadata: Mapping[str, Any]
    head: Mapping[str, Any] | None
    meta: Mapping[str, Any]
    tensors: Mapping[str, Header]
    weights: Sequence[str]
    sizes: Mapping[str, int]
    fingerprint: str | None
    pinned: str | None
    base: str | None
    base_revision: str | None
    base_digest: str | None

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
        import torch

        dtypes = Counter(getattr(torch, each.dtype) for each in self.tensors.values())
        floating = [dtype for dtype, _ in dtypes.most_common() if dtype.is_floating_point]
        return floating[0] if floating else torch.get_default_dtype()

    @property
    def head_type(self) -> str | None:
        """The head's type or the name of its class; None without a head."""
        head = self.head or {}
        own = _config_in(head).get("head_type")
        return _text(own or head.get(STATIC) or head.get("model_class"))

    @property
    def labels(self) -> list[str] | None:
        """The head's classes in the order of their ids."""
        numbers = _config_in(self.head or {}).get("label2id")
        if isinstance(numbers, Mapping) and all(isinstance(n, int) for n in numbers.values()):
            return sorted(numbers, key=numbers.__getitem__)
        return None

    @property
    def settings(self) -> Mapping[str, Any]:
        """What `train` has saved with the adapter."""
        found = self.meta.get("train")
        return found if isinstance(found, Mapping) else {}

    def pin(self, fingerprint: str | None) -> str | None:
        """Return the name that loads this adapter and no other; None without a fingerprint."""
        return None if fingerprint is None else f"{self.path}@{fingerprint[:PINNED_DIGITS]}"

    def facts(self) -> dict[str, Any]:
        """Return what `info` shows, as JSON types.

        Raises:
            CheckpointError: the user wrote a fingerprint that only a model can give.
        """
        if self.pinned is not None and self.fingerprint is None:
            raise CheckpointError(
                f"the fingerprint of {self.path!r} is not known without its base model. "
                f"Write --model."
            )
        config = self.metadata.get("config")
        if self.format == "peft":
            config = {k: v for k, v in self.metadata.items() if v not in (None, {}, [])}
        return {
            "path": self.path,
            "format": self.format,
            "holds": self.kind,
            "name": self.name,
            "base_model": self.base,
            "base_revision": self.base_revision,
            "base_digest": self.base_digest,
            "model_type": self.metadata.get("model_type"),
            "method": self.method,
            "head": self.head_type,
            "labels": self.labels,
            "parameters": sum(math.prod(each.shape) for each in self.tensors.values()),
            "tensors": len(self.tensors),
            "dtypes": sorted({each.dtype for each in self.tensors.values()}),
            "bytes": sum(self.sizes.values()),
            "files": dict(self.sizes),
            "fingerprint": self.fingerprint,
            "pinned": self.pin(self.fingerprint),
            "config": config,
            "meta": dict(self.meta),
            "compared_with": None,
        }


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
    held = ((kind, format_of(folder, kind)) for kind in KINDS)
    kind, format = next((pair for pair in held if pair[1] is not None), ("adapter", None))
    if format is None:
        raise CheckpointError(
            f"{path!r} holds no adapter and no head in a known format. Write the folder of an "
            f"adapter, or 'user/repository' for an adapter on the Hub."
        )
    files = wanted(file.name for file in folder.iterdir() if file.is_file())
    own, found = None, FOLDER_FORMATS[format]
    if format == "native":
        weights = [NAMES[kind].native]
        tensors = headers_in(folder / weights[0])
        digests = digests_in(folder / weights[0], tensors)
        metadata = checked_metadata(folder, kind, digests)
        head = metadata.get("head")
        # the file has only some rows of trained embeddings
        if kind == "adapter" and "embeddings" not in metadata:
            adapter = {k: v for k, v in digests.items() if not k.startswith(HEAD_KEY)}
            own = fingerprint_of(_config_in(metadata), adapter)
    else:
        metadata = found.config(folder, kind)
        weights = [name for name in files if not name.endswith(".json")]
        tensors = {key: header for name in weights
                   for key, header in headers_in(folder / name).items()}  # fmt: skip
        has_head = format != "peft" and (folder / HEAD_CONFIG).is_file()
        head = read_json(folder / HEAD_CONFIG) if has_head else None
    if pinned is not None and kind == "head":
        raise CheckpointError(f"{path!r} holds a head, which has no fingerprint. Write {path!r}.")
    if pinned is not None and not (own or pinned).startswith(pinned):
        raise other_fingerprint(str(own), pinned)
    base, meta = found.base(folder, metadata), found.meta(folder, metadata)
    return CheckpointFolder(
        path, folder, kind, format, metadata,
        head if isinstance(head, Mapping) else None, meta if isinstance(meta, Mapping) else {},
        tensors, weights, {file: (folder / file).stat().st_size for file in files}, own, pinned,
        base.name, base.revision, base.digest,
    )  # fmt: skip


def _config_in(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config in a file; an empty one if there is none."""
    found = document.get("config")
    return found if isinstance(found, Mapping) else {}


def _text(value: object) -> str | None:
    """Return a value from a file as text; None for an empty one."""
    return str(value) if value else None
