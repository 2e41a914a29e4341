"""AdapterHub's format: folders of `adapters`, and of adapter-transformers before it.

`adapter_config.json` with `pytorch_adapter.bin` or `adapter.safetensors`; with a head
`head_config.json` and `pytorch_model_head.bin` or `model_head.safetensors`. "adapterhub" writes
pickled tensors, as `adapters` 1.3 does by default; "adapterhub-safetensors" the other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.formats.checkpoint import Base, Checkpoint, Kind, ModelInfo, base_of, formats
from adapterzoo.formats.files import (
    AGAIN,
    fields_of,
    json_bytes,
    pickle_bytes,
    read_json,
    read_tensors,
    tensor_bytes,
)

from .config import VERSION
from .fusion import CONFIG, TENSORS
from .heads import read_head, write_head
from .meta import meta_for, meta_in
from .read import read_adapter
from .write import write_adapter

__all__ = ["AdapterHubFormat", "meta_in", "names_of_files"]

_ADAPTER = ("adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin")
_HEAD = ("head_config.json", "model_head.safetensors", "pytorch_model_head.bin")
_COMMON = ("name", "model_type", "model_class", "model_name", "hidden_size")


def names_of_files(kind: str) -> tuple[str, str, str]:
    """Return the names of the config, of the tensors in safetensors, and of those in a pickle.

    Args:
        kind: "adapter", "head" or "fusion".
    """
    return {"adapter": _ADAPTER, "head": _HEAD, "fusion": (CONFIG, *TENSORS)}[kind]


class AdapterHubFormat:
    """The format of AdapterHub, as `formats` sees it."""

    def __init__(self, *, safe: bool) -> None:
        """Choose the files to write; both are read.

        Args:
            safe: whether tensors are written in safetensors instead of a pickle.
        """
        self._safe = safe

    def recognizes(self, folder: Path, kind: Kind) -> bool:
        """Return whether a folder has tensors under AdapterHub's names, or its config."""
        config, safe, pickled = _ADAPTER if kind == "adapter" else _HEAD
        if (folder / safe).is_file() or (folder / pickled).is_file():
            return True
        return {"config", "model_class"} <= fields_of(folder / config)

    def read(self, folder: Path, kind: Kind, info: ModelInfo) -> Checkpoint:
        """Return the adapter, with its head if there is one; or only the head.

        Raises:
            CheckpointError: a file is missing or damaged, or needs what does not exist here.
        """
        head: tuple[dict[str, Any] | None, dict[str, Tensor]] = None, {}
        name = None
        if kind == "head" or (info.with_head and any((folder / f).is_file() for f in _HEAD)):
            metadata, tensors = _read(folder, _HEAD)
            name = metadata.get("name")
            head = read_head(info, metadata, tensors)
        if kind == "head":
            return Checkpoint({"name": name, "head": head[0]}, {}, head[1])
        metadata, tensors = _read(folder, _ADAPTER)
        config, adapter = read_adapter(info, metadata, tensors)
        described = {
            "name": metadata.get("name"),
            "model_type": metadata.get("model_type"),
            "model_name": metadata.get("model_name"),
            "config": config.to_dict(),
            "head": head[0],
            "meta": meta_in(metadata),
        }
        if head[0] is not None and name not in (None, described["name"]):
            described["head_name"] = name
        return Checkpoint(described, adapter, head[1])

    def encode(self, checkpoint: Checkpoint, kind: Kind, info: ModelInfo) -> dict[str, bytes]:
        """Return configs and pickled tensors.

        Raises:
            CheckpointError: `adapters` has no such adapter or head, or not for such a model.
        """
        metadata = checkpoint.metadata
        name = str(metadata["name"])
        common = {key: metadata.get(key) for key in _COMMON} | {"version": VERSION}
        contents: dict[str, bytes] = {}
        if kind == "adapter":
            config = AdapterConfig.from_dict(metadata["config"])
            fields, tensors = write_adapter(info, config, name, checkpoint.adapter)
            meta = meta_for(metadata.get("meta") or {})
            contents |= self._tensors(_ADAPTER, tensors)
            contents[_ADAPTER[0]] = json_bytes({**meta, **common, "config": fields})
        if metadata.get("head") is not None:
            more, tensors = write_head(info, name, metadata["head"], checkpoint.head)
            contents |= self._tensors(_HEAD, tensors)
            contents[_HEAD[0]] = json_bytes({**common, **more})
        return contents

    def _tensors(
        self, names: tuple[str, str, str], tensors: Mapping[str, Tensor]
    ) -> dict[str, bytes]:
        _, safe, pickled = names
        if self._safe:
            return {safe: tensor_bytes(tensors, {})}
        return {pickled: pickle_bytes(tensors)}

    def base(self, folder: Path) -> Base:
        """Return the model in the config."""
        return base_of(read_json(folder / _ADAPTER[0]), "model_name", "")

    def owned(self, kind: Kind) -> tuple[str, ...]:
        """Return both kinds of tensors; those of a head too."""
        return (*_ADAPTER, *_HEAD) if kind == "adapter" else _HEAD


formats.register("adapterhub")(AdapterHubFormat(safe=False))
formats.register("adapterhub-safetensors")(AdapterHubFormat(safe=True))


def _read(folder: Path, names: tuple[str, str, str]) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    config, safe, pickled = names
    metadata = read_json(folder / config)
    # of two files with the same tensors, prefer the one that cannot hold code
    file = next((folder / n for n in (safe, pickled) if (folder / n).is_file()), None)
    if file is None:
        raise CheckpointError(
            f"{str(folder)!r} has {config}, but neither {safe} nor {pickled}. {AGAIN}."
        )
    return metadata, read_tensors(file)
