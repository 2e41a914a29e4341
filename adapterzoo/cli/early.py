"""Checks of names, folders and files that a command makes before it imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from adapterzoo.errors import CheckpointError, ConfigError, argument, listing
from adapterzoo.hub.files import known_files, nearest
from adapterzoo.hub.repo_ref import check_repo_id, is_repo_id, locate

# copies of names in checkpoint.formats and heads.Pooling, which import torch; a test compares them
FORMATS = ("native", "adapterhub", "adapterhub-safetensors", "peft")
POOLINGS = ("auto", "cls", "mean", "last", "eos", "pooler")
# prefixes of folders left by a killed save or merge
_HIDDEN = ".adapterzoo-"
PART = ".adapterzoo-part-"


def check_adapter(path: str) -> None:
    """Check that a path can be that of an adapter, local or on the Hub.

    Args:
        path: a folder, `user/repository` or `user/repository/folder`.

    Raises:
        CheckpointError: there is no such folder, or it holds no file of an adapter.
        HubError: the Hub cannot have a repository of this name.
    """
    if isinstance(locate(path), Path):
        check_folder(path, on_hub=True)


def check_folder(path: str, on_hub: bool = False) -> None:
    """Check that a folder exists and holds a file of an adapter.

    Args:
        path: a local folder.
        on_hub: whether the command accepts adapters on the Hub.

    Raises:
        CheckpointError: it does not exist, or holds no such file.
    """
    if not os.access(path, os.F_OK) or not Path(path).is_dir():
        raise CheckpointError(f"there is no folder {path!r}. Write the folder of an adapter.")
    if not os.access(path, os.R_OK | os.X_OK):
        # the read itself raises an error with the reason
        return
    names = [file.name for file in Path(path).iterdir()]
    # a read completes a killed save, and then finds its files
    if not {*names} & {*known_files()} and not any(n.startswith(_HIDDEN) for n in names):
        raise no_adapter(path, names, on_hub)


def no_adapter(path: str, names: Iterable[str], on_hub: bool = True) -> CheckpointError:
    """Make the error for a folder without an adapter.

    Args:
        path: the folder.
        names: its files.
        on_hub: whether the command accepts adapters on the Hub.
    """
    other = ", or 'user/repository' for an adapter on the Hub" if on_hub else ""
    return CheckpointError(
        f"{path!r} holds no adapter and no head in a known format ({listing(FORMATS)}); its files: "
        f"{listing(sorted(names))}. Write the folder of an adapter{other}."
    )


def check_base(base: str | None) -> None:
    """Check, without a request to the Hub, that a base model can exist.

    Args:
        base: folder or name on the Hub; None: not known yet.

    Raises:
        CheckpointError: it cannot exist.
    """
    if base is None or is_repo_id(base):
        return
    if not os.access(base, os.F_OK) or not Path(base).is_dir():
        raise no_base(base, "there is no such folder, and this cannot be a name on the Hub")


def no_base(base: str, reason: str, what: str = "base model") -> CheckpointError:
    """Make the error for a base model that cannot be loaded.

    Args:
        base: folder or name on the Hub.
        reason: why.
        what: the part that cannot be loaded.
    """
    return CheckpointError(
        f"the {what} {base!r} cannot be loaded ({reason}). Write {argument('model', 'MODEL')}, the "
        f"folder of a transformers model or its name on the Hub."
    )


def check_can_write(folder: str, option: str = "") -> None:
    """Check that files can be written to a folder, which may not exist yet.

    Args:
        folder: to write to.
        option: the option with the folder, for messages.

    Raises:
        CheckpointError: they cannot be written.
    """
    there = nearest(Path(folder))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{option}{folder!r}: {str(there)!r} is not a folder that can be written to. Write "
            f"another folder."
        )


def check_new(out: str) -> None:
    """Check that a folder is missing or empty.

    Args:
        out: to be created.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: it is not empty.
    """
    folder = Path(out)
    try:
        there = folder.is_file() or (
            # a killed merge leaves parts
            folder.is_dir() and any(not file.name.startswith(PART) for file in folder.iterdir())
        )
    except OSError as error:
        raise unwritable(out, error) from error
    if there:
        raise ConfigError(f"{out!r} exists already. Write a new folder, or empty this one.")


def unwritable(out: str, error: Exception) -> CheckpointError:
    """Make the error for a folder that could not be written.

    Args:
        out: the folder.
        error: raised by writing.
    """
    reason = (isinstance(error, OSError) and error.strerror) or error
    return CheckpointError(
        f"{out!r} cannot be written ({reason}); nothing has been left there. Write a folder that "
        f"can be written to and has space."
    )


def check_push(path: str, repo: str) -> None:
    """Make the local checks before a push.

    Args:
        path: the adapter's folder.
        repo: name of the repository.

    Raises:
        CheckpointError: there is no adapter.
        HubError: the name is not legal, or offline mode is on.
    """
    check_folder(path)
    check_repo_id(repo)

    from adapterzoo.hub.client import refuse_if_offline

    refuse_if_offline(f"nothing can be sent to {repo!r}")
