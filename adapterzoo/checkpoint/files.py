"""Files that are either old or new, never half: safetensors with a JSON document inside.

A checkpoint is one file. The document stands in the file's metadata, so that tensors and what
they mean are replaced together by one atomic rename; a JSON copy beside it is for people.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save
from torch import Tensor

from adapterzoo.errors import CheckpointError

_DOCUMENT = "adapterzoo"


def write_tensors(file: Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and their document as one file; equal content gives equal bytes.

    Args:
        file: its folder is made when missing.
        document: JSON types.
        tensors: of any device; shared memory is written apart.

    Raises:
        CheckpointError: the file cannot be written; an old one is still whole.
    """
    # one metadata key only: safetensors does not fix the order of several
    metadata = {_DOCUMENT: json.dumps(document, sort_keys=True, allow_nan=False)}
    owned = {key: t.detach().cpu().clone().contiguous() for key, t in sorted(tensors.items())}
    write_bytes(file, save(owned, metadata=metadata))


def write_json(file: Path, document: Mapping[str, Any]) -> None:
    """Write a document for people to read.

    Raises:
        CheckpointError: the file cannot be written; an old one is still whole.
    """
    write_bytes(file, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())


def write_bytes(file: Path, content: bytes) -> None:
    """Replace a file's content by one rename, after it has reached the disk.

    Raises:
        CheckpointError: the file cannot be written; an old one is still whole.
    """
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes private files: give the new one the mode that open() would
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(file)
        temporary = None
    except OSError as error:
        raise CheckpointError(
            f"save to {str(file)!r}: {error.strerror or error}. What was there before is still "
            f"whole. Write to a folder that can be written and has space."
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def read_tensors(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The document and the tensors of a file, on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or was not written by `write_tensors`.
    """
    try:
        with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
            metadata = opened.metadata() or {}
            # cloned: a mapped file must not change under a model, nor keep the file open
            tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(
            f"load from {str(file)!r}: there is no such file. Write the folder that save_adapter "
            f"or save_head was given."
        ) from error
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"load from {str(file)!r}: the file is damaged or no safetensors file ({error}). "
            f"Save or download it again."
        ) from error
    if _DOCUMENT not in metadata:
        raise CheckpointError(
            f"load from {str(file)!r}: the file holds tensors but no adapterzoo document. "
            f"Write a folder that save_adapter made."
        )
    try:
        document = json.loads(metadata[_DOCUMENT])
    except ValueError as error:
        raise CheckpointError(
            f"load from {str(file)!r}: the document in the file is no JSON ({error}). "
            f"Save it again."
        ) from error
    if not isinstance(document, dict):
        raise CheckpointError(
            f"load from {str(file)!r}: the document is a {type(document).__name__}, not an object. "
            f"Save it again."
        )
    return document, tensors
