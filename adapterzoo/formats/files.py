"""Read and write the files of checkpoints; files that are read are not trusted.

Only regular files are opened, the sizes of configs and headers are limited, and pickles are read
only by `torch.load(weights_only=True)`, which rebuilds tensors and runs no other code.

Files that belong together are replaced together: `write_all` writes all of them next to the old
ones, removes the configs, moves the tensors, and moves the configs last. A save that is killed
leaves the old checkpoint, the new one, or a folder without a config, which loading refuses by name.
There are no locks: of two saves at once the later one wins; a reader whose folder changes fails.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from adapterzoo.errors import CheckpointError, listing
from adapterzoo.folders.formats import NATIVE
from adapterzoo.folders.names import NAMES, Kind
from adapterzoo.folders.reading import (
    AGAIN,
    MAX_HEADER,
    MAX_JSON,
    check_archive,
    fields_of,
    guarded,
    opened,
)  # fmt: skip

_LOG = logging.getLogger(__name__)
# prefix of files that are not in place yet
_PART = ".adapterzoo-part-"
# attempts of savers that get in each other's way
_TRIES = 100


# --- write ---


def write_all(folder: Path, contents: Mapping[str, bytes], stale: Iterable[str] = ()) -> None:
    """Replace the files of a checkpoint together.

    Args:
        folder: the folder; created if missing.
        contents: file names → contents.
        stale: names of files of an older checkpoint to delete.

    Raises:
        CheckpointError: a file cannot be written. The old ones are whole, unless the message says
            that some are replaced.
    """
    for _ in range(_TRIES):
        if _replaced(folder, contents, stale):
            return
    raise CheckpointError(f"{str(folder)!r}: other processes keep saving there. Save again.")


def _replaced(folder: Path, contents: Mapping[str, bytes], stale: Iterable[str]) -> bool:
    """Replace files; return False if another saver removed those that were not in place yet."""
    # configs last, a head's before its adapter's
    names = sorted(contents, reverse=True)
    names.sort(key=lambda name: name.endswith(".json"))
    former = [name for name in {*contents, *stale} if (folder / name).is_file()]
    former = [n for n in former if n not in contents or n.endswith(".json")]
    parts = {name: folder / f"{_PART}{uuid.uuid4().hex}" for name in names}
    state = "What was there before is still whole"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, "it is a folder", str(folder / name))
            with part.open("xb") as stream:
                stream.write(contents[name])
                stream.flush()
                os.fsync(stream.fileno())
        there = {*folder.glob(f"{_PART}*")}
        if not there >= {*parts.values()}:
            return False
        for other in there - {*parts.values()}:
            # of a saver that was killed, or that still runs and will then start again
            if other.is_file():
                other.unlink(missing_ok=True)
        state = "Some files are already replaced, so the folder cannot be loaded. Save again"
        for name in sorted(former, key=lambda name: not name.endswith(".json")):
            (folder / name).unlink(missing_ok=True)
        for name, part in parts.items():
            part.replace(folder / name)
    except FileNotFoundError:
        return False
    except OSError as error:
        if file := next((path for path in (folder, *folder.parents) if path.is_file()), None):
            raise CheckpointError(
                f"{str(file)!r} is a file, not a folder. {state}. Write to a folder."
            ) from error
        raise CheckpointError(
            f"{str(error.filename or folder)!r} cannot be written: {error.strerror or error}. "
            f"{state}. Write to a folder that can be written."
        ) from error
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):
                part.unlink()
    return True


def write_tensors(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors with our metadata as one safetensors file; create its folder if missing.

    Raises:
        CheckpointError: the file cannot be written; an old one is still intact.
    """
    write_all(file.parent, {file.name: tensor_bytes(tensors, {NATIVE: metadata})})


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return a safetensors file; equal content gives equal bytes.

    Args:
        tensors: the tensors, on any device; tensors that share memory are written separately.
        metadata: JSON types by key.

    Raises:
        CheckpointError: the metadata is too large to be read back.
    """
    texts = {key: json.dumps(v, sort_keys=True, allow_nan=False) for key, v in metadata.items()}
    owned = {key: t.detach().cpu().clone().contiguous() for key, t in sorted(tensors.items())}
    whole = safetensors.torch.save(owned, metadata={"format": "pt"})
    # safetensors does not fix the order of the keys
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end]) | {"__metadata__": {"format": "pt", **texts}}
    text = json.dumps(header, separators=(",", ":")).encode()
    # align the tensors to 8 bytes
    text += b" " * (-len(text) % 8)
    _check_size("names, shapes and metadata", len(text), MAX_HEADER)
    return len(text).to_bytes(8, "little") + text + whole[end:]


def json_bytes(values: Mapping[str, Any]) -> bytes:
    """Return indented JSON, for people to read.

    Raises:
        CheckpointError: the text is too large to be read back.
    """
    text = (json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()
    _check_size("the config, with meta_dict,", len(text), MAX_JSON)
    return text


def pickle_bytes(tensors: Mapping[str, Tensor] | Tensor) -> bytes:
    """Return tensors by name, or a single one, as `torch.save` writes them."""
    stream = io.BytesIO()
    # clone: a view would save all of its storage
    if isinstance(tensors, Tensor):
        torch.save(tensors.detach().cpu().clone(), stream)
    else:
        torch.save({key: t.detach().cpu().clone() for key, t in tensors.items()}, stream)
    return stream.getvalue()


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise CheckpointError(
            f"{what} would have {size:,} of at most {limit:,} bytes. Write a smaller meta_dict."
        )


# --- read ---


@contextlib.contextmanager
def one_save(folder: Path) -> Iterator[None]:
    """Check that a folder does not change while its files are read.

    Raises:
        CheckpointError: its configs, which a save removes first and writes last, have changed.
    """
    before = _configs(folder)
    yield
    if _configs(folder) != before:
        raise CheckpointError(f"{str(folder)!r} was saved to while it was read. Read it again.")


def _configs(folder: Path) -> dict[str, tuple[int, int]]:
    stats = {file.name: file.stat() for file in folder.glob("*.json") if file.is_file()}
    return {name: (each.st_ino, each.st_mtime_ns) for name, each in stats.items()}


def warn_of_another(folder: Path, kind: Kind, name: object) -> None:
    """Warn if saving to a folder replaces something of another name.

    Args:
        folder: the folder with the files that will be replaced.
        kind: the kind of content: "adapter", "head" or the like.
        name: name of what is saved.
    """
    there = fields_of(folder / NAMES[kind].config).get("name")
    if isinstance(there, str) and there != name:
        _LOG.warning(
            "%r held the %s %r, which %r replaces. Write another folder to keep both.",
            str(folder), kind.replace("_", " "), there, name,
        )  # fmt: skip


def tensors_in(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of the first of these files that exists, on the CPU.

    Args:
        folder: the folder on disk.
        names: names of the files; those that cannot hold code come first.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    for file in (folder / name for name in names):
        if file.is_file():
            return read_tensors(file)
    raise CheckpointError(f"{str(folder)!r} has no tensors: none of {listing(names)}. {AGAIN}.")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a `.safetensors` file, or of a pickle that torch wrote, on the CPU.

    Raises:
        CheckpointError: the file is damaged, or holds code or anything other than tensors.
    """
    if file.suffix == ".safetensors":
        return read_safetensors(file)
    loaded = _unpickled(file)
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and _is_plain(value) for key, value in loaded.items()
    ):
        raise CheckpointError(f"{str(file)!r} does not map names to plain tensors. {AGAIN}.")
    return {key: _whole(file, repr(key), tensor) for key, tensor in loaded.items()}


def read_tensor(file: Path) -> Tensor:
    """Return the one tensor of floating-point numbers in a pickle that torch wrote, on the CPU.

    Raises:
        CheckpointError: the file is damaged, or holds code or anything other than such a tensor.
    """
    loaded = _unpickled(file)
    if not _is_plain(loaded) or not loaded.is_floating_point():
        raise CheckpointError(f"{str(file)!r} does not hold one tensor of numbers. {AGAIN}.")
    return _whole(file, "its tensor", loaded)


def _unpickled(file: Path) -> Any:
    with guarded(file):
        check_archive(file)
        return torch.load(file, map_location="cpu", weights_only=True)


def _whole(file: Path, what: str, tensor: Tensor) -> Tensor:
    # with stride 0, one number can stand for a tensor of any size, until it is copied
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{str(file)!r} has fewer numbers for {what} than {list(tensor.shape)}. {AGAIN}."
        )
    return tensor.detach()


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    with _opened(file) as opened:
        # clone: the tensors are views of the file, which could change later
        return {key: opened.get_tensor(key).clone() for key in sorted(opened.keys())}


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    # also where another device is torch's default
    with torch.device("cpu"), opened(file, "pt") as found:
        yield found


def _is_plain(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_meta or value.is_quantized or value.is_complex())
