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
from adapterzoo.folders.formats import BASE, DIGEST, FOLDER_FORMATS, META, beside_peft
from adapterzoo.folders.names import CONFIG, NAMES, Kind
from adapterzoo.folders.reading import read_json
from adapterzoo.formats import files
from adapterzoo.formats.checkpoint import Checkpoint, Format, formats

from .reading import checked, head_from, read_adapter
from .writing import encoded as encoded

if TYPE_CHECKING:
    from adapterzoo.model.hf.info import ModelInfo

FILES = NAMES["adapter"].peft


def _read(folder: Path, kind: Kind, info: ModelInfo) -> Checkpoint:
    config = read_json(folder / CONFIG)
    found = decoded(config, files.tensors_in(folder, FILES), info)
    base, meta = FOLDER_FORMATS["peft"].base(folder, config), beside_peft(folder, META)
    found.metadata |= {"meta": meta, "model_name": base.name, **base.entries()}
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
        META: metadata.get("meta"),
        BASE: None if digest is None else {DIGEST: digest},
    }
    written = files.tensor_bytes(tensors, {key: value for key, value in beside.items() if value})
    return {FILES[0]: written, CONFIG: files.json_bytes(config)}


formats.register("peft")(
    Format(
        _read,
        _encode,
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
