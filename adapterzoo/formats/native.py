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

from adapterzoo.folders.formats import (
    HASH,
    HEAD_KEY,
    NATIVE,
    NATIVE_VERSION,
    checked_metadata,
    native_metadata,
)  # fmt: skip
from adapterzoo.folders.names import NAMES, Kind

from . import files
from .checkpoint import Checkpoint, Format, formats
from .fit import digests, fingerprint

FORMAT = "adapterzoo"
FUSION: Kind = "adapter_fusion"
"""The kind of a folder with the layers of a fusion."""


def encode(checkpoint: Checkpoint, kind: Kind) -> dict[str, bytes]:
    """Return the contents of the two files."""
    tensors = keyed(checkpoint)
    metadata = hashed({"format": FORMAT, "version": NATIVE_VERSION, **checkpoint.metadata}, tensors)
    written = files.tensor_bytes(tensors, {NATIVE: metadata})
    del metadata[HASH]
    return {NAMES[kind].native: written, NAMES[kind].config: files.json_bytes(metadata)}


def hashed(metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the metadata with a SHA-256 of themselves and the tensors."""
    # as JSON reads it back: tuples become lists, and keys become strings
    plain = {k: v for k, v in json.loads(json.dumps(metadata)).items() if k != HASH}
    return plain | {HASH: fingerprint(plain, tensors)}


def keyed(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of an adapter and its head under the keys of one file."""
    return checkpoint.adapter | {HEAD_KEY + key: tensor for key, tensor in checkpoint.head.items()}


def load(folder: Path, kind: Kind) -> Checkpoint:
    """Read a checkpoint from `<kind>.safetensors`.

    Args:
        folder: the folder on disk.
        kind: the kind of checkpoint.

    Raises:
        CheckpointError: the file is missing, damaged, or of another format or a newer version.
    """
    tensors = files.read_safetensors(folder / NAMES[kind].native)
    metadata = checked_metadata(folder, kind, digests(tensors))
    head = {k.removeprefix(HEAD_KEY): t for k, t in tensors.items() if k.startswith(HEAD_KEY)}
    adapter = {k: t for k, t in tensors.items() if not k.startswith(HEAD_KEY)}
    return Checkpoint(metadata, adapter, head)


def read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return our metadata and the tensors of a safetensors file that this library wrote.

    Raises:
        CheckpointError: the file is missing or damaged, or another library wrote it.
    """
    return native_metadata(file), files.read_safetensors(file)


formats.register("native")(
    Format(
        read=lambda folder, kind, _info: load(folder, kind),
        encode=lambda checkpoint, kind, _info: encode(checkpoint, kind),
        owned=lambda kind: (NAMES[kind].native, NAMES[kind].config),
    )
)
