"""Files that are either old or new, never half: safetensors with a JSON document inside.

The document stands in the metadata of the file with the tensors, so that they and what they mean
are one file; a JSON copy beside it is for people. Files that belong together are replaced
together, see `folders`. What is read may come from a stranger: only regular files are opened, and
of texts no more is read than a config can have.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save
from torch import Tensor

from adapterzoo.errors import CheckpointError, ConfigError

from . import folders

_DOCUMENT = "adapterzoo"
META = "adapterzoo_meta"
# of safetensors: names, shapes and the document, about 300 bytes for each tensor
_MAX_HEADER = 32 * 2**20
# configs have some thousand bytes; lists of labels some hundred thousand
MAX_JSON = 16 * 2**20


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


def tensor_bytes(
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> bytes:
    """A safetensors file; equal content gives equal bytes.

    Args:
        tensors: of any device; shared memory is written apart.
        document: JSON types, for the files of this library.
        meta: JSON types, for those of others, which do not look at it.

    Raises:
        CheckpointError: the document, or what meta says, is larger than what reading takes.
    """
    # one metadata key only: safetensors does not fix the order of several
    text = json.dumps(document, sort_keys=True, allow_nan=False)
    metadata = {"format": "pt"} if document is None else {_DOCUMENT: text}
    owned = {key: t.detach().cpu().clone().contiguous() for key, t in sorted(tensors.items())}
    whole = save(owned, metadata=metadata)
    if meta:
        whole = _with_metadata(whole, metadata | {META: json.dumps(meta, sort_keys=True)})
    _check_size("names, shapes and document", int.from_bytes(whole[:8], "little"), _MAX_HEADER)
    return whole


def _with_metadata(whole: bytes, metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with these metadata, in their order."""
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end]) | {"__metadata__": dict(metadata)}
    text = json.dumps(header, separators=(",", ":")).encode()
    # tensors begin where their numbers may lie in memory
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + whole[end:]


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """A document as people can read it.

    Raises:
        CheckpointError: it is larger than what reading takes.
    """
    text = (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
    _check_size("the config, with what meta_dict says,", len(text), MAX_JSON)
    return text


def write_all(folder: Path, contents: Mapping[str, bytes], stale: Iterable[str] = ()) -> None:
    """Write the files of a checkpoint, and delete those that an older one left behind.

    Args:
        folder: made when missing.
        contents: plain names to contents.
        stale: names of files that shall not be there, and may not be.

    Raises:
        CheckpointError: a file cannot be written; all the old ones are whole.
    """
    call = f"save to {str(folder)!r}"
    with folders.saving(call, folder):
        folders.replace_files(call, folder, contents, stale)


def write_bytes(file: Path, content: bytes) -> None:
    """Replace a file's content, after the new one has reached the disk.

    Raises:
        CheckpointError: the file cannot be written; an old one is still whole.
    """
    write_all(file.parent, {file.name: content})


def check_regular(file: Path) -> None:
    """Raise where a file is a pipe or a device, which could be read for ever.

    A link to a regular file is one: the cache of huggingface_hub is made of these.

    Raises:
        CheckpointError: it is something else than a regular file.
        OSError: there is none.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise CheckpointError(
            f"{file.name} is no regular file. Copy the checkpoint again from where it was saved"
        )


def holds_document(file: Path) -> bool:
    """Whether a safetensors file is one of this library's; a damaged one counts as such."""
    try:
        check_header(file)
        with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
            return _DOCUMENT in (opened.metadata() or {})
    except (safetensors.SafetensorError, OSError, ValueError):
        return True


def read_tensors(
    file: Path, made_by: str = "save_adapter or save_head"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The document and the tensors of a file, on the CPU.

    Args:
        file: that `write_tensors` wrote.
        made_by: what users call to have such a file, for messages.

    Raises:
        CheckpointError: the file is missing, damaged, or was not written by `write_tensors`.
    """
    try:
        check_header(file)
        with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
            metadata = opened.metadata() or {}
            # cloned: a mapped file must not change under a model, nor keep the file open
            tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(
            f"load from {str(file)!r}: there is no such file. Write the folder that {made_by} "
            f"was given."
        ) from error
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"load from {str(file)!r}: the file is damaged or no safetensors file ({error}). "
            f"Save or download it again."
        ) from error
    if _DOCUMENT not in metadata:
        raise CheckpointError(
            f"load from {str(file)!r}: the file holds tensors but no adapterzoo document. "
            f"Write a folder that {made_by} made."
        )
    try:
        document = parse_json(metadata[_DOCUMENT])
    except (ValueError, RecursionError) as error:
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


def check_header(file: Path) -> None:
    """Raise where a file's header asks for more memory than any adapter needs.

    Raises:
        CheckpointError: it does, or the file is no regular one.
        OSError: there is none.
    """
    check_regular(file)
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
    if size > _MAX_HEADER:
        raise CheckpointError(f"its header would have more than {_MAX_HEADER:,} bytes")


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise CheckpointError(
            f"save: {what} would have {size:,} bytes, and {limit:,} are the most that is read "
            f"again; nothing has been written. Write a smaller meta_dict, or tensors for what is "
            f"large."
        )


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says; NaN and infinities, which Python's reader takes, are none.

    1e999 is one, too: it would be an infinity in memory, and nothing that can be written again.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it has objects in objects without end.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _no_number(text: str) -> float:
    raise ConfigError(f"{text[:60]} is no number of JSON")
