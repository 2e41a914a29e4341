"""PEFT's format: `adapter_config.json` with a `peft_type`, and `adapter_model.safetensors`.

The head is in the same file, as `modules_to_save`. Older folders hold `adapter_model.bin`, a
pickle, from which only tensors are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from adapterzoo.checkpoint import files
from adapterzoo.checkpoint.formats import Checkpoint, Kind, ModelInfo, formats
from adapterzoo.errors import CheckpointError, argument, in_python

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
        theirs = checked(files.read_json(folder / CONFIG))
        config, adapter, rest = read_adapter(theirs, _tensors(folder), info)
        head, head_tensors = head_from(theirs, rest, info)
        metadata = {
            "name": None,
            "model_type": info.model_type,
            "config": config.to_dict(),
            "head": head,
            "meta": meta_in(folder),
        }
        return Checkpoint(metadata, adapter, head_tensors)

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
        task, head = head_for(checkpoint, info)
        config, tensors = encode_adapter(checkpoint, head, task, info)
        # PEFT has no counterpart of meta_dict, and ignores the metadata of the file
        meta = checkpoint.metadata.get("meta")
        written = files.tensor_bytes(tensors, {files.META: meta} if meta else {})
        return {_TENSORS: written, CONFIG: files.json_bytes(config)}

    def owned(self, kind: Kind) -> tuple[str, ...]:
        """Return the files that PEFT would read."""
        return (_TENSORS, _PICKLE, CONFIG) if kind == "adapter" else ()


formats.register("peft")(PeftFormat())


def meta_in(folder: Path) -> dict[str, Any]:
    """Return the `meta_dict` with which this library saved the folder.

    Raises:
        CheckpointError: the file with the tensors is damaged.
    """
    file = folder / _TENSORS
    return (files.read_metadata(file, files.META) if file.is_file() else None) or {}


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder, on the CPU."""
    for name in (_TENSORS, _PICKLE):
        if (folder / name).is_file():
            return files.read_tensors(folder / name)
    raise CheckpointError(
        f"{str(folder)!r} has {CONFIG}, but neither {_TENSORS} nor {_PICKLE}. {files.AGAIN}."
    )
