"""Our format: one safetensors file, `<kind>.safetensors`, and `<kind>_config.json` for people.

`adapter.safetensors` holds an adapter, with its head if there is one; `head.safetensors` holds only
a head. Keys are `<path of the site>/<parameter>`, those of a head `head//<parameter>`; they do not
contain names of adapters or heads. The metadata describe the tensors and include a SHA-256 of
metadata and tensors. The JSON file repeats the metadata; editing it would have no effect, so a
difference is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from adapterzoo.errors import CheckpointError, listing

from . import files
from .checkpoint import Checkpoint, Format, Kind, base_of, formats, short
from .fit import fingerprint

FORMAT = "adapterzoo"
VERSION = 1
FUSION: Kind = "adapter_fusion"
"""The kind of a folder with the layers of a fusion."""
# two slashes: a site cannot have such a key, not even one called "head"
_HEAD = "head//"
_HASH = "sha256"


def _recognizes(folder: Path, kind: Kind) -> bool:
    file = folder / f"{kind}.safetensors"
    try:
        return file.is_file() and files.read_metadata(file, files.NATIVE) is not None
    except CheckpointError:
        # it may be ours, and damaged
        return True


def names_of_files(kind: str) -> tuple[str, str]:
    """Return the names of the tensor file and the config."""
    return f"{kind}.safetensors", f"{kind}_config.json"


def encode(checkpoint: Checkpoint, kind: str) -> dict[str, bytes]:
    """Return the contents of the two files."""
    tensors = keyed(checkpoint)
    metadata = hashed({"format": FORMAT, "version": VERSION, **checkpoint.metadata}, tensors)
    written = files.tensor_bytes(tensors, {files.NATIVE: metadata})
    del metadata[_HASH]
    tensors_file, config = names_of_files(kind)
    return {tensors_file: written, config: files.json_bytes(metadata)}


def hashed(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the metadata with a SHA-256 of themselves and the tensors."""
    # as JSON reads it back: tuples become lists, and keys become strings
    plain = {k: v for k, v in json.loads(json.dumps(metadata)).items() if k != _HASH}
    return plain | {_HASH: fingerprint(plain, tensors)}


def keyed(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of an adapter and its head under the keys of one file."""
    return checkpoint.adapter | {_HEAD + key: tensor for key, tensor in checkpoint.head.items()}


def load(folder: Path, kind: str) -> Checkpoint:
    """Read a checkpoint from `<kind>.safetensors`.

    Args:
        folder: the folder on disk.
        kind: the kind of checkpoint.

    Raises:
        CheckpointError: the file is missing, damaged, or of another format or a newer version.
    """
    file = folder / f"{kind}.safetensors"
    metadata, tensors = read(file)
    version = metadata.get("version")
    if version != VERSION:
        raise CheckpointError(
            f"{str(file)!r} has version {version!r}, not {VERSION}. "
            "Write pip install -U adapterzoo."
        )
    expected = metadata.pop(_HASH, None)
    if expected != fingerprint(metadata, tensors):
        raise CheckpointError(
            f"{str(file)!r} is not what was written: its SHA-256 is not {short(expected)}; "
            f"nothing has been loaded. {files.AGAIN}."
        )
    copy = folder / f"{kind}_config.json"
    shown = files.read_json(copy) if copy.exists() else metadata
    wrong = [k for k in {**shown, **metadata} if _text(shown.get(k)) != _text(metadata.get(k))]
    if wrong:
        raise CheckpointError(
            f"{str(copy)!r} has another {listing(wrong)} than {file.name}; nothing has been "
            f"loaded. Delete {copy.name}, or copy the checkpoint again."
        )
    head = {k.removeprefix(_HEAD): t for k, t in tensors.items() if k.startswith(_HEAD)}
    adapter = {k: t for k, t in tensors.items() if not k.startswith(_HEAD)}
    return Checkpoint(metadata, adapter, head)


def read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return our metadata and the tensors of a safetensors file that this library wrote.

    Raises:
        CheckpointError: the file is missing or damaged, or another library wrote it.
    """
    metadata = files.read_metadata(file, files.NATIVE)
    if metadata is None:
        raise CheckpointError(f"{str(file)!r} is not a file that adapterzoo saved.")
    return metadata, files.read_safetensors(file)


def _text(value: object) -> str:
    """Return JSON, in which True, 1 and 1.0 differ although they compare equal."""
    return json.dumps(value, sort_keys=True)


formats.register("native")(
    Format(
        _recognizes,
        read=lambda folder, kind, _info: load(folder, kind),
        encode=lambda checkpoint, kind, _info: encode(checkpoint, kind),
        base=lambda folder: base_of(
            files.read_metadata(folder / "adapter.safetensors", files.NATIVE) or {}, "model_name"
        ),
        owned=names_of_files,
    )
)
