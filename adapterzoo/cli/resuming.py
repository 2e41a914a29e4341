"""The folder with the checkpoints of a run that has not ended, and the command that started it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adapterzoo.errors import ConfigError, listing

_FOLDER = "checkpoints"
_COMMAND = "command.json"


def digest(rows: object) -> str:
    """Return a digest of rows; images count by their paths and sizes."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value), value.stat().st_size
        return getattr(value, "size", None)

    return hashlib.sha256(json.dumps(rows, default=plain).encode()).hexdigest()[:16]


def check(folder: Path, options: Mapping[str, Any], resume: bool) -> None:
    """Check that a run can start in a folder, or continue there.

    Args:
        folder: folder for the adapter.
        options: options of the command.
        resume: whether to continue.

    Raises:
        ConfigError: the checkpoints of another run would be lost or continued, or there are none to
            continue from.
    """
    there = folder / _FOLDER
    if not _saved(there):
        if resume:
            raise ConfigError(f"there are no checkpoints in {str(there)!r}. Leave out --resume.")
        return
    if not resume:
        raise ConfigError(
            f"{str(there)!r} has the checkpoints of a run that has not ended. Write --resume to "
            f"continue it, or delete that folder."
        )
    before = json.loads((there / _COMMAND).read_text("utf-8"))
    now = json.loads(json.dumps(options))
    if differing := [f"--{k.replace('_', '-')}" for k in now if now[k] != before.get(k)]:
        raise ConfigError(
            f"the run in {str(there)!r} was started with another {listing(differing)}. "
            f"Write the same command with --resume, or delete that folder."
        )


@contextlib.contextmanager
def checkpoints(folder: Path, options: Mapping[str, Any]) -> Iterator[tuple[Path, bool]]:
    """Return a context with the folder of checkpoints, and whether it has any.

    At the end of the run the folder is deleted. If the run fails or is stopped, the folder is kept,
    unless it has no checkpoint yet.

    Args:
        folder: folder for the adapter.
        options: options of the command.
    """
    there = folder / _FOLDER
    has_some = _saved(there)
    there.mkdir(parents=True, exist_ok=True)
    (there / _COMMAND).write_text(json.dumps(options), "utf-8")
    try:
        yield there, has_some
    except BaseException:
        if not _saved(there):
            shutil.rmtree(there)
        raise
    shutil.rmtree(there)


def _saved(there: Path) -> bool:
    return (there / _COMMAND).is_file() and any(there.glob("*/checkpoint-*/trainer_state.json"))
