"""What a command checks before torch and transformers are imported: names, folders, files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from adapterzoo.errors import CheckpointError, ConfigError, listing
from adapterzoo.hub.files import known_files, nearest
from adapterzoo.hub.places import check_repo_id, is_repo_id, place_of

# what formats.formats holds; named here so that nothing needs torch
FORMATS = ("native", "adapterhub", "peft")
# how the folders that a killed save or merge leaves begin
_HIDDEN = ".adapterzoo-"
_PART = ".adapterzoo-part-"


def check_adapter(call: str, path: str) -> None:
    """Check that a path can be that of an adapter, here or on the Hub.

    Args:
        call: what the user wrote, for messages.
        path: a folder, `user/repository` or `user/repository/folder`.

    Raises:
        CheckpointError: there is no such folder, or it has no file of an adapter.
        HubError: the Hub cannot have a repository of this name.
    """
    folder = place_of(call, path, None)
    if isinstance(folder, Path):
        check_folder(call, path, on_hub=True)


def check_folder(call: str, path: str, on_hub: bool = False) -> None:
    """Check that a folder is there and has a file of an adapter.

    Args:
        call: what the user wrote, for messages.
        path: of a folder on this machine.
        on_hub: whether an adapter of the Hub would do too.

    Raises:
        CheckpointError: it is not there, or has none.
    """
    if not os.access(path, os.F_OK) or not Path(path).is_dir():
        raise CheckpointError(
            f"{call}: there is no folder {path!r}. Write the folder of an adapter."
        )
    if not os.access(path, os.R_OK | os.X_OK):
        # who reads it says why it cannot be read
        return
    names = [file.name for file in Path(path).iterdir()]
    # a reader finishes a save that was killed, and finds its files then
    if not {*names} & {*known_files()} and not any(n.startswith(_HIDDEN) for n in names):
        raise no_adapter(call, path, names, on_hub)


def no_adapter(call: str, path: str, names: Iterable[str], on_hub: bool = True) -> CheckpointError:
    """The error for a folder without an adapter.

    Args:
        call: what the user wrote, for messages.
        path: as the user wrote it.
        names: of the files that are there.
        on_hub: whether an adapter of the Hub would do too.
    """
    other = ", or 'user/repository' for an adapter of the Hub" if on_hub else ""
    return CheckpointError(
        f"{call}: {path!r} holds no adapter and no head in a format that is known "
        f"({listing(FORMATS)}); its files: {listing(sorted(names))}. Write the folder that "
        f"save_adapter was given{other}."
    )


def check_base(call: str, base: str | None) -> None:
    """Check that a base model can be there: what its name or its folder tell without the Hub.

    Args:
        call: what the user wrote, for messages.
        base: folder or name on the Hub; None: it is not known yet.

    Raises:
        CheckpointError: it cannot be there.
    """
    if base is None or is_repo_id(base):
        return
    if not os.access(base, os.F_OK) or not Path(base).is_dir():
        raise no_base(call, base, "there is no such folder, and it is no name of the Hub")


def no_base(call: str, base: str, reason: str, what: str = "base model") -> CheckpointError:
    """The error for a base model that cannot be had.

    Args:
        call: what the user wrote, for messages.
        base: as the user wrote it.
        reason: why.
        what: of it.
    """
    return CheckpointError(
        f"{call}: the {what} {base!r} cannot be loaded ({reason}). Write --model with the "
        f"folder of a transformers model, or its name on the Hub."
    )


def check_can_write(call: str, shown: str, folder: Path) -> None:
    """Check that files can be written to a folder, which may be missing yet.

    Args:
        call: what the user wrote, for messages.
        shown: option before the folder, for messages; may be empty.
        folder: that is to be written.

    Raises:
        CheckpointError: they cannot.
    """
    there = nearest(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{call}: {shown}{str(folder)!r}: {str(there)!r} is no folder that can be "
            f"written. Write another folder."
        )


def check_new(call: str, out: Path) -> None:
    """Check that a folder is missing or empty, and can be written.

    Args:
        call: what the user wrote, for messages.
        out: that is to be made.

    Raises:
        CheckpointError: it cannot be written.
        ConfigError: it holds something.
    """
    try:
        there = out.is_file() or (
            # of a merge that was killed
            out.is_dir() and any(not file.name.startswith(_PART) for file in out.iterdir())
        )
    except OSError as error:
        raise unwritable(call, str(out), error) from error
    if there:
        raise ConfigError(
            f"{call}: {str(out)!r} is there already. Write a new folder, or empty this one."
        )


def unwritable(call: str, out: str, error: Exception) -> CheckpointError:
    """The error for a folder that could not be written.

    Args:
        call: what the user wrote, for messages.
        out: the folder.
        error: that writing raised.
    """
    reason = (isinstance(error, OSError) and error.strerror) or error
    return CheckpointError(
        f"{call}: {out!r} cannot be written ({reason}); nothing has been left there. Write a "
        f"folder that can be written and has space."
    )


def check_push(call: str, path: str, repo: str) -> None:
    """Check what pushing needs here: a folder with an adapter, a legal name, leave to ask the Hub.

    Args:
        call: what the user wrote, for messages.
        path: the folder.
        repo: name of the repository.

    Raises:
        CheckpointError: there is no adapter.
        HubError: the name is not legal, or the Hub may not be asked.
    """
    check_folder(call, path)
    check_repo_id(call, repo)

    from adapterzoo.hub.settings import refuse_if_offline

    refuse_if_offline(call, f"nothing can be sent to {repo!r}")
