"""Files that are either old or new, never half: safetensors with a JSON document inside.

A checkpoint is one file. The document stands in the file's metadata, so that tensors and what
they mean are replaced together by one atomic rename; a JSON copy beside it is for people.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
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
    write_bytes(file, tensor_bytes(tensors, document))


def tensor_bytes(tensors: Mapping[str, Tensor], document: Mapping[str, Any] | None = None) -> bytes:
    """A safetensors file; equal content gives equal bytes.

    Args:
        tensors: of any device; shared memory is written apart.
        document: JSON types, for the files of this library.
    """
    # one metadata key only: safetensors does not fix the order of several
    text = json.dumps(document, sort_keys=True, allow_nan=False)
    metadata = {"format": "pt"} if document is None else {_DOCUMENT: text}
    owned = {key: t.detach().cpu().clone().contiguous() for key, t in sorted(tensors.items())}
    return save(owned, metadata=metadata)


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """A document as people can read it."""
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def write_all(folder: Path, contents: Mapping[str, bytes], stale: Iterable[str] = ()) -> None:
    """Write the files of a checkpoint, and delete those that an older one left behind.

    Args:
        folder: made when missing.
        contents: names to contents, in the order of writing.
        stale: names of files that shall not be there, and may not be.

    Raises:
        CheckpointError: a file cannot be written; each is the old or the new one.
    """
    for name, content in contents.items():
        write_bytes(folder / name, content)
    for name in stale:
        (folder / name).unlink(missing_ok=True)


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


def holds_document(file: Path) -> bool:
    """Whether a safetensors file is one of this library's; a damaged one counts as such."""
    try:
        with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
            return _DOCUMENT in (opened.metadata() or {})
    except (safetensors.SafetensorError, OSError, ValueError):
        return True


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
