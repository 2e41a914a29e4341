"""PEFT's format: `adapter_config.json` with a `peft_type`, and `adapter_model.safetensors`.

The head is in the same file, as `modules_to_save`. Older folders hold `adapter_model.bin`, a
pickle, from which only tensors are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from adapterzoo.errors import CheckpointError, argument, in_python
from adapterzoo.formats import files
from adapterzoo.formats.checkpoint import Base, Checkpoint, Kind, ModelInfo, base_of, formats

from .config import CONFIG, checked
from .heads import head_for, head_from
from .read import read_adapter
from .write import encode_adapter

_TENSORS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"


class PeftFormat:
    """The format of PEFT, as `formats` sees it."""

    def recognizes(self, folder: Path, kind: Kind) -> bool:
        """Return whether a folder has tensors under PEFT's name, or a config of PEFT."""
        if kind != "adapter":
            return False
        if (folder / _TENSORS).is_file() or (folder / _PICKLE).is_file():
            return True
        return "peft_type" in files.fields_of(folder / CONFIG)

    def read(self, folder: Path, kind: Kind, info: ModelInfo) -> Checkpoint:
        """Return the adapter, and the head where the file has one.

        Raises:
            CheckpointError: a file is missing or damaged, has a setting that cannot be reproduced
                here, or names layers that the model lacks.
        """
        found = decoded(files.read_json(folder / CONFIG), tensors_in(folder), info)
        found.metadata["meta"] = meta_in(folder)
        return found

    def encode(self, checkpoint: Checkpoint, kind: Kind, info: ModelInfo) -> dict[str, bytes]:
        """Return the config and the tensors.

        Raises:
            CheckpointError: PEFT has no such adapter or head.
        """
        if kind != "adapter":
            raise CheckpointError(
                f"PEFT's format has no heads without an adapter. Write "
                f"{in_python('save_head(…) with ')}{argument('format', 'native')} or "
                f"{argument('format', 'adapterhub')}."
            )
        config, tensors = encoded(checkpoint, info)
        # PEFT has no counterpart of meta_dict, and ignores the metadata of the file
        meta = checkpoint.metadata.get("meta")
        written = files.tensor_bytes(tensors, {files.META: meta} if meta else {})
        return {_TENSORS: written, CONFIG: files.json_bytes(config)}

    def base(self, folder: Path) -> Base:
        """Return the model in the config."""
        return base_of(files.read_json(folder / CONFIG), "base_model_name_or_path", "revision")

    def owned(self, kind: Kind) -> tuple[str, ...]:
        """Return the files that PEFT would read."""
        return (_TENSORS, _PICKLE, CONFIG) if kind == "adapter" else ()


formats.register("peft")(PeftFormat())


def encoded(checkpoint: Checkpoint, info: ModelInfo) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return PEFT's config, and all tensors by PEFT's keys.

    Raises:
        CheckpointError: PEFT has no such adapter or head.
    """
    task, head = head_for(checkpoint, info)
    return encode_adapter(checkpoint, head, task, info)


def decoded(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], info: ModelInfo
) -> Checkpoint:
    """Return the adapter, and the head where there is one, of PEFT's config and tensors.

    Raises:
        CheckpointError: as `PeftFormat.read`.
    """
    theirs = checked(config)
    ours, adapter, rest = read_adapter(theirs, tensors, info)
    head, head_tensors = head_from(theirs, rest, info)
    metadata = {
        "name": None,
        "model_type": info.model_type,
        "config": ours.to_dict(),
        "head": head,
    }
    return Checkpoint(metadata, adapter, head_tensors)


def meta_in(folder: Path) -> dict[str, Any]:
    """Return the `meta_dict` with which this library saved the folder.

    Raises:
        CheckpointError: the file with the tensors is damaged.
    """
    file = folder / _TENSORS
    return (files.read_metadata(file, files.META) if file.is_file() else None) or {}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder, on the CPU.

    Raises:
        CheckpointError: there are none.
    """
    for name in (_TENSORS, _PICKLE):
        if (folder / name).is_file():
            return files.read_tensors(folder / name)
    raise CheckpointError(
        f"{str(folder)!r} has {CONFIG}, but neither {_TENSORS} nor {_PICKLE}. {files.AGAIN}."
    )
