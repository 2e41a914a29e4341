"""Folders that hold the old checkpoint or the new one, whenever the power goes.

A save writes all its files into a hidden folder beside the old ones, renames that to `_READY`,
which is the moment when the new checkpoint exists, and then moves the files up. Whoever comes next,
to read or to write, moves up what a killed save could not. Readers that do not know this (PEFT,
AdapterHub's adapters) never meet files of two saves either: configs are taken away before the
tensors change and come back last, so that they find the old, the new, or no config.

Savers and readers lock the folder itself against each other, where the file system has locks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from adapterzoo.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

_READY = ".adapterzoo-ready"
_PART = ".adapterzoo-part-"
# a save of gigabytes to a slow disk may take minutes
_PATIENCE = 600.0
_PAUSE = 0.01


@contextlib.contextmanager
def saving(call: str, folder: Path) -> Iterator[None]:
    """Nobody else saves to the folder or reads it meanwhile, and it holds one whole checkpoint.

    Args:
        call: what the user wrote, for messages.
        folder: made when missing.

    Raises:
        CheckpointError: the folder cannot be made, or another process keeps it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(call, folder, error) from error
    with _locked(call, folder, alone=True):
        _finish_or_raise(call, folder)
        for litter in folder.glob(f"{_PART}*"):
            # of a save that was killed; a link is nobody's litter
            shutil.rmtree(litter, ignore_errors=True)
        yield


@contextlib.contextmanager
def reading(call: str, folder: Path) -> Iterator[None]:
    """Nobody saves to the folder meanwhile, and it holds one whole checkpoint.

    Args:
        call: what the user wrote, for messages.
        folder: may be missing.

    Raises:
        CheckpointError: a save was interrupted and cannot be finished, or goes on for too long.
    """
    while True:
        with _locked(call, folder, alone=False):
            if not _is_ready(folder):
                yield
                return
        with _locked(call, folder, alone=True):
            _finish_or_raise(call, folder)


def replace_files(
    call: str, folder: Path, contents: Mapping[str, bytes], stale: Iterable[str] = ()
) -> None:
    """Replace files of a folder together; to be called within `saving`.

    Args:
        call: what the user wrote, for messages.
        folder: exists.
        contents: plain names to contents.
        stale: names of files that shall not be there afterwards, and may not be now.

    Raises:
        CheckpointError: a file cannot be written, and the old ones are whole; or the new ones are,
            and the next reader or saver has to put them in their places.
    """
    for name in contents:
        if (folder / name).is_dir():
            raise CheckpointError(
                f"{call}: there is a folder in the place of the file {str(folder / name)!r}. What "
                f"was there before is still whole. Write to a folder that has none."
            )
    part = None
    try:
        part = Path(tempfile.mkdtemp(prefix=_PART, dir=folder))
        for name, content in contents.items():
            _write(part / name, content)
        for name in stale:
            # an empty file stands for one that goes
            if name not in contents and (folder / name).is_file():
                _write(part / name, b"")
        _settle(part)
        part.rename(folder / _READY)
        part = None
    except OSError as error:
        raise _unwritable(call, folder, error) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
    _settle(folder)
    _finish_or_raise(call, folder)


def _finish(folder: Path) -> None:
    """Move up what a save has made ready; what was moved before is left alone."""
    if not _is_ready(folder):
        return
    ready = folder / _READY
    # a folder may come from a stranger: no link is followed, and nothing hidden is put there
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
    _settle(folder)
    shutil.rmtree(ready)


def _finish_or_raise(call: str, folder: Path) -> None:
    try:
        _finish(folder)
    except OSError as error:
        raise CheckpointError(
            f"{call}: a save to {str(folder)!r} was interrupted after its files were written, and "
            f"they cannot be put in their places ({error.strerror or error}). Make the folder "
            f"writable, or copy it with its hidden files to a place that is, and load from there."
        ) from error


def _is_ready(folder: Path) -> bool:
    ready = folder / _READY
    return ready.is_dir() and not ready.is_symlink()


def _write(file: Path, content: bytes) -> None:
    with file.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _settle(folder: Path) -> None:
    """Let the names in a folder reach the disk, where that can be asked for."""
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
def _locked(call: str, folder: Path, alone: bool) -> Iterator[None]:
    """The lock of a folder; nothing is locked where the file system, or the system, has none."""
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                handle = stack.enter_context(_opened(folder))
                _lock(call, folder, handle, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
                # a process that was forked meanwhile has the handle too: closing is not enough
                stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
        yield


def _lock(call: str, folder: Path, handle: int, kind: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{call}: another process has saved to {str(folder)!r}, or read from it, for "
                    f"{_PATIENCE / 60:g} minutes. End it, or write another folder."
                ) from None
        time.sleep(_PAUSE)


def _unwritable(call: str, folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{call}: {str(error.filename or folder)!r} cannot be written: {error.strerror or error}. "
        f"What was there before is still whole. Write to a folder that can be written and has "
        f"space."
    )
