"""What a name given to `load_adapter` stands for: a folder, or a repository of the Hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from adapterzoo.errors import CheckpointError, ConfigError, HubError

_SOURCES = ("hf", None)
# of a file system's names
_LONGEST = 255

# the Hub's rule: no sign at an end, and none of some signs twice
_NAME = re.compile(
    r"(?!.*(?:--|\.\.))(?!.*\.git$)(?:[\w.-]{0,95}\w/)?\w(?:[\w.-]{0,94}\w)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder in a repository of the Hub.

    Attributes:
        repo_id: `user/repository`.
        subfolder: path in it with slashes; empty for its root.
    """

    repo_id: str
    subfolder: str = ""

    def file(self, name: str) -> str:
        """The path of a file of this folder in the repository."""
        return f"{self.subfolder}/{name}" if self.subfolder else name


def place_of(call: str, name: str | os.PathLike[str], source: str | None) -> Path | Place:
    """The folder, or the place on the Hub, that a name stands for; asks no server.

    A folder that exists goes before a repository of the same name. `user/repository/a/b` is the
    folder `a/b` of a repository.

    Args:
        call: what the user wrote, for messages.
        name: a path object is always a path.
        source: `"hf"`: the Hub, even where there is such a folder.

    Raises:
        CheckpointError: there is no such folder, and the name is none of the Hub's.
        ConfigError: the source is unknown.
        HubError: the Hub is asked for, and cannot have a repository of this name.
    """
    if source not in _SOURCES:
        archived = " AdapterHub's own repository is closed; its adapters moved to the Hub, as "
        raise ConfigError(
            f"{call}: source={source!r} is not known. Legal are 'hf' and None, for a folder or "
            f"else the Hub." + (f"{archived}'AdapterHub/<name>'." if source == "ah" else "")
        )
    if any(len(os.fsencode(part)) > _LONGEST for part in Path(name).parts):
        raise (CheckpointError if source is None else HubError)(
            f"{call}: a part of the name has more than {_LONGEST} bytes, which neither a folder "
            f"nor a repository can have. Write the folder that save_adapter was given, or "
            f"'user/repository'."
        )
    there = _exists(name)
    if source is None and there and Path(name).is_dir():
        return Path(name)
    is_file = there and Path(name).is_file()
    if source is None and (is_file or not isinstance(name, str)):
        found = "is a file" if is_file else "there is no such folder"
        raise CheckpointError(
            f"{call}: {found}. Write the folder that save_adapter was given, or 'user/repository' "
            f"for an adapter of the Hub."
        )
    text = os.fspath(name)
    user, _, rest = text.partition("/")
    repository, _, subfolder = rest.partition("/")
    if _is_path(text) or not repository:
        message = (
            f"{call}: there is no such folder, and it is no name of the Hub. Write the folder that "
            f"save_adapter was given, or 'user/repository'."
        )
        if text.startswith(("http://", "https://")):
            message = f"{call}: an address is not read. Write 'user/repository', its end."
        raise CheckpointError(message) if source is None else HubError(message)
    place = Place(f"{user}/{repository}", subfolder.strip("/"))
    check_repo_id(call, place.repo_id)
    if place.subfolder and {"", ".", ".."} & {*place.subfolder.split("/")}:
        raise HubError(
            f"{call}: {subfolder!r} is no folder of a repository. Write "
            f"'{place.repo_id}/{PurePosixPath(subfolder).name.strip('.') or 'folder'}'."
        )
    return place


def check_repo_id(call: str, repo_id: str) -> None:
    """Raise where the Hub cannot have a repository of this name.

    Raises:
        HubError: the name is not legal.
    """
    if not is_repo_id(repo_id):
        raise HubError(
            f"{call}: {repo_id!r} is no name of a repository: letters, digits, '-', '_' and '.' "
            f"are legal, 96 at most, and no '--' or '..'. Write 'user/repository'."
        )


def is_repo_id(name: str) -> bool:
    """Whether the Hub can have a repository of this name."""
    return bool(_NAME.fullmatch(name))


def is_public_name(name: object) -> bool:
    """Whether a base model's name is one that others can load: the Hub's, not a path of here."""
    return isinstance(name, str) and is_repo_id(name) and not _exists(name)


def _exists(name: str | os.PathLike[str]) -> bool:
    try:
        return Path(name).exists()
    except PermissionError:
        # a folder above may not be entered
        return False


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or "\\" in text or ":" in text
