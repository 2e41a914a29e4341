"""PEFT's format: `adapter_config.json` with a `peft_type`, and `adapter_model.safetensors`.

The head is in the same file, as `modules_to_save`. Older folders hold `adapter_model.bin`, a
pickle, of which only tensors are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from adapterzoo.errors import CheckpointError, argument
from adapterzoo.formats import files
from adapterzoo.formats.checkpoint import DIGEST, Base, Checkpoint, Format, Kind, base_of, formats

from .reading import CONFIG, checked, head_from, read_adapter
from .writing import encoded as encoded

if TYPE_CHECKING:
    from adapterzoo.model.hf.info import ModelInfo

_TENSORS = "adapter_model.safetensors"
_BASE_NAME = "base_model_name_or_path"
FILES = _TENSORS, "adapter_model.bin"


def is_config(file: Path) -> bool:
    """Return whether a file, which may be missing, is PEFT's config of an adapter."""
    return "peft_type" in files.fields_of(file)


def _recognizes(folder: Path, kind: Kind) -> bool:
    if kind != "adapter":
        return False
    return any((folder / name).is_file() for name in FILES) or is_config(folder / CONFIG)


def _read(folder: Path, kind: Kind, info: ModelInfo) -> Checkpoint:
    found = decoded(files.read_json(folder / CONFIG), files.tensors_in(folder, FILES), info)
    base = _base(folder)
    found.metadata |= {"meta": meta_in(folder), "model_name": base.name, **base.entries()}
    return found


def _encode(checkpoint: Checkpoint, kind: Kind, info: ModelInfo) -> dict[str, bytes]:
    if kind != "adapter":
        what = "heads without an adapter" if kind == "head" else "fusions"
        raise CheckpointError(f"PEFT has no {what}. Write {argument('format', 'native')}.")
    return folder_bytes(*encoded(checkpoint, info), checkpoint.metadata)


def folder_bytes(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return the files of PEFT's config and tensors.

    `meta_dict` and the base model's digest, which PEFT does not have, are in the tensor file's
    metadata, which PEFT ignores.

    Args:
        config: PEFT's config.
        tensors: the tensors, by PEFT's keys.
        metadata: metadata of the checkpoint.
    """
    digest = metadata.get(DIGEST)
    beside = {
        files.META: metadata.get("meta"),
        files.BASE: None if digest is None else {DIGEST: digest},
    }
    written = files.tensor_bytes(tensors, {key: value for key, value in beside.items() if value})
    return {_TENSORS: written, CONFIG: files.json_bytes(config)}


def _base(folder: Path) -> Base:
    """Return the base model that the config and the tensor file describe.

    Raises:
        CheckpointError: one of the two is damaged.
    """
    values = files.read_json(folder / CONFIG)
    return base_of({**values, **_beside(folder, files.BASE)}, _BASE_NAME, "revision")


formats.register("peft")(
    Format(
        _recognizes,
        _read,
        _encode,
        base=_base,
        owned=lambda kind: (*FILES, CONFIG) if kind == "adapter" else (),
    )
)


def decoded(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], info: ModelInfo
) -> Checkpoint:
    """Return the adapter, and the head if there is one, from PEFT's config and tensors.

    Raises:
        CheckpointError: the config has a setting that cannot be reproduced here, or a tensor
            belongs to a layer that the model lacks.
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
        CheckpointError: the tensor file is damaged.
    """
    return _beside(folder, files.META)


def _beside(folder: Path, key: str) -> dict[str, Any]:
    """Return an object that this library wrote to the metadata of the tensor file."""
    file = folder / _TENSORS
    return (files.read_metadata(file, key) if file.is_file() else None) or {}
