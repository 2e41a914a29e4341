"""PEFT's format: `adapter_config.json` with a `peft_type`, and `adapter_model.safetensors`.

The head is in the same file, as `modules_to_save`. Older folders hold `adapter_model.bin`, a
pickle, from which only tensors are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from adapterzoo.errors import CheckpointError, argument
from adapterzoo.formats import files
from adapterzoo.formats.checkpoint import Checkpoint, Format, Kind, base_of, formats

from .reading import CONFIG, checked, head_from, read_adapter
from .writing import encoded as encoded

if TYPE_CHECKING:
    from adapterzoo.model.hf.info import ModelInfo

_TENSORS = "adapter_model.safetensors"
FILES = _TENSORS, "adapter_model.bin"


def _recognizes(folder: Path, kind: Kind) -> bool:
    if kind != "adapter":
        return False
    there = any((folder / name).is_file() for name in FILES)
    return there or "peft_type" in files.fields_of(folder / CONFIG)


def _read(folder: Path, kind: Kind, info: ModelInfo) -> Checkpoint:
    found = decoded(files.read_json(folder / CONFIG), files.tensors_in(folder, FILES), info)
    found.metadata["meta"] = meta_in(folder)
    return found


def _encode(checkpoint: Checkpoint, kind: Kind, info: ModelInfo) -> dict[str, bytes]:
    if kind != "adapter":
        what = "heads without an adapter" if kind == "head" else "fusions"
        raise CheckpointError(f"PEFT has no {what}. Write {argument('format', 'native')}.")
    return folder_bytes(*encoded(checkpoint, info), checkpoint.metadata.get("meta"))


def folder_bytes(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None
) -> dict[str, bytes]:
    """Return the files of PEFT's config and tensors.

    PEFT has no counterpart of `meta_dict`, and ignores the metadata of the file.
    """
    written = files.tensor_bytes(tensors, {files.META: meta} if meta else {})
    return {_TENSORS: written, CONFIG: files.json_bytes(config)}


formats.register("peft")(
    Format(
        _recognizes,
        _read,
        _encode,
        base=lambda folder: base_of(
            files.read_json(folder / CONFIG), "base_model_name_or_path", "revision"
        ),
        owned=lambda kind: (*FILES, CONFIG) if kind == "adapter" else (),
    )
)


def decoded(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], info: ModelInfo
) -> Checkpoint:
    """Return the adapter, and the head where there is one, of PEFT's config and tensors.

    Raises:
        CheckpointError: the config has a setting that cannot be reproduced here, or the tensors
            are of layers that the model lacks.
    """
    peft_config = checked(config)
    ours, adapter, rest = read_adapter(peft_config, tensors, info)
    head, head_tensors = head_from(peft_config, rest, info)
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
