"""A folder holds the old checkpoint or the new one, whenever the process or the power dies.

A save writes all files into a hidden folder beside the old ones, renames that to `_READY`, which
is the moment when the new checkpoint exists, and then moves the files up. The next reader or
saver completes the move of a killed save. Other libraries do not see files of two saves either:
configs are removed before the tensors change and are restored last, so such a reader finds the old
config, the new one, or none.

Savers and readers lock the folder against each other, where the file system has locks; a process
that dies releases its lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from adapterzoo.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

_READY = ".adapterzoo-ready"
_PART = ".adapterzoo-part-"


@contextlib.contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Lock the folder for writing, with one whole checkpoint in it; create it if missing.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    with _locked(folder, alone=True):
        _finish_or_raise(folder)
        for litter in folder.glob(f"{_PART}*"):
            # of a save that was killed; links are not followed
            shutil.rmtree(litter, ignore_errors=True)
        yield


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Lock the folder for reading, with one whole checkpoint in it; it may be missing.

    Raises:
        CheckpointError: a save was interrupted and cannot be finished.
    """
    while True:
        with _locked(folder, alone=False):
            if not _is_ready(folder):
                yield
                return
        with _locked(folder, alone=True):
            _finish_or_raise(folder)


def replace_files(folder: Path, contents: Mapping[str, bytes], stale: Iterable[str] = ()) -> None:
    """Replace files of a folder together; call it within `saving`.

    Args:
        folder: exists.
        contents: plain names to contents.
        stale: names of files to delete, where they exist.

    Raises:
        CheckpointError: a file cannot be written, and the old checkpoint is whole; or the new one
            is, and the next reader or saver will move it up.
    """
    for name in contents:
        if (folder / name).is_dir():
            raise CheckpointError(
                f"there is a folder in the place of the file {str(folder / name)!r}. What was "
                f"there before is still whole. Write to a folder that has none."
            )
    part = None
    try:
        part = Path(tempfile.mkdtemp(prefix=_PART, dir=folder))
        for name, content in contents.items():
            _write(part / name, content)
        for name in stale:
            # an empty file marks one to delete
            if name not in contents and (folder / name).is_file():
                _write(part / name, b"")
        _sync(part)
        part.rename(folder / _READY)
        part = None
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
    _sync(folder)
    _finish_or_raise(folder)


def _finish(folder: Path) -> None:
    """Move up the remaining files of a save that is ready."""
    if not _is_ready(folder):
        return
    ready = folder / _READY
    # the folder is not trusted: follow no links, and move no hidden files
    names = sorted(file.name for file in ready.iterdir() if stat.S_ISREG(file.lstat().st_mode))
    names = [name for name in names if not name.startswith(".")]
    documents = [name for name in names if name.endswith(".json")]
    for name in documents:
        (folder / name).unlink(missing_ok=True)
    for name in sorted(names, key=documents.__contains__):
        if (ready / name).stat().st_size:
            (ready / name).replace(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
            (ready / name).unlink()
    _sync(folder)
    shutil.rmtree(ready)


def _finish_or_raise(folder: Path) -> None:
    try:
        _finish(folder)
    except OSError as error:
        raise CheckpointError(
            f"a save to {str(folder)!r} was interrupted after its files were written, and they "
            f"cannot be moved into place ({error.strerror or error}). Make the folder writable, or "
            f"copy it with its hidden files to one that is, and load from there."
        ) from error


def _is_ready(folder: Path) -> bool:
    ready = folder / _READY
    return ready.is_dir() and not ready.is_symlink()


def _write(file: Path, content: bytes) -> None:
    with file.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the system can."""
    with contextlib.suppress(OSError), _opened(folder) as handle:
        os.fsync(handle)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(folder: Path, alone: bool) -> Iterator[None]:
    """Hold the lock of a folder, where system and file system have locks."""
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                handle = stack.enter_context(_opened(folder))
                fcntl.flock(handle, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
                # a process forked meanwhile has the handle too, so closing it is not enough
                stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
        yield


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{str(error.filename or folder)!r} cannot be written: {error.strerror or error}. What was "
        f"there before is still whole. Write to a folder that can be written and has space."
    )
