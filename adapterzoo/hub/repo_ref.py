"""Resolve a name given to `load_adapter`: to a local folder, or to a folder on the Hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from adapterzoo.errors import CheckpointError, ConfigError, HubError, in_python

_SOURCES = ("hf", None)
# bytes of a name in common file systems
_LONGEST = 255

# the Hub's rule: no '-' or '.' at either end, no '--' and no '..'
_NAME = re.compile(
    r"(?!.*(?:--|\.\.))(?!.*\.git$)(?:[\w.-]{0,95}\w/)?\w(?:[\w.-]{0,94}\w)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class RepoRef:
    """A folder in a repository of the Hub.

    Attributes:
        repo_id: `user/repository`.
        subfolder: path in it with slashes; empty for its root.
    """

    repo_id: str
    subfolder: str = ""

    def path(self, name: str) -> str:
        """Return the path in the repository of a file of this folder."""
        return f"{self.subfolder}/{name}" if self.subfolder else name


def locate(name: str | os.PathLike[str], source: str | None = None) -> Path | RepoRef:
    """Return the folder that a name refers to, without a request.

    An existing folder takes precedence over a repository of the same name. `user/repository/a/b` is
    the folder `a/b` of a repository.

    Args:
        name: a path object is always a path.
        source: `"hf"`: the Hub, even if there is such a folder.

    Raises:
        CheckpointError: there is no such folder, and the name cannot be on the Hub.
        ConfigError: the source is unknown.
        HubError: `source="hf"`, and the Hub cannot have a repository of this name.
    """
    if source not in _SOURCES:
        raise ConfigError(
            f"source={source!r} is unknown. Write source='hf' for the Hub, 'ah' for an old id of "
            f"AdapterHub, or None for a folder first and then the Hub."
        )
    either = (
        f"Write {in_python('the folder that save_adapter wrote', 'the folder of an adapter')} or "
        f"'user/repository'."
    )
    wrong = CheckpointError if source is None else HubError
    if any(len(os.fsencode(part)) > _LONGEST for part in Path(name).parts):
        raise wrong(
            f"a part of the name has more than {_LONGEST} bytes, which neither a folder nor a "
            f"repository can have. {either}"
        )
    there = _exists(name)
    if source is None and there and Path(name).is_dir():
        return Path(name)
    is_file = there and Path(name).is_file()
    if source is None and (is_file or not isinstance(name, str)):
        found = "this is a file" if is_file else "there is no such folder"
        raise CheckpointError(f"{found}. {either}")
    text = os.fspath(name)
    if text.startswith(("http://", "https://")):
        raise wrong("addresses cannot be loaded. Write their end, 'user/repository'.")
    user, _, rest = text.partition("/")
    repository, _, subfolder = rest.partition("/")
    if _is_path(text) or not repository:
        raise wrong(
            f"there is no such folder, and {text!r} cannot be a repository of the Hub. {either}"
        )
    ref = RepoRef(f"{user}/{repository}", subfolder.strip("/"))
    check_repo_id(ref.repo_id)
    if ref.subfolder and {"", ".", ".."} & {*ref.subfolder.split("/")}:
        raise HubError(
            f"{subfolder!r} is not a folder of a repository. Write "
            f"'{ref.repo_id}/{PurePosixPath(subfolder).name.strip('.') or 'folder'}'."
        )
    return ref


def check_repo_id(repo_id: str) -> None:
    """Raise if the Hub cannot have a repository of this name.

    Raises:
        HubError: the name is not legal.
    """
    if not is_repo_id(repo_id):
        raise HubError(
            f"{repo_id!r} is not a legal name of a repository: up to 96 letters, digits, '-', '_' "
            f"and '.', without '--' and '..'. Write 'user/repository'."
        )


def is_repo_id(name: str) -> bool:
    """Return whether the Hub can have a repository of this name."""
    return bool(_NAME.fullmatch(name))


def is_public_name(name: object) -> bool:
    """Return whether others can load a base model by this name, which must not be a local path."""
    return isinstance(name, str) and is_repo_id(name) and not _exists(name)


def _exists(name: str | os.PathLike[str]) -> bool:
    try:
        return Path(name).exists()
    except PermissionError:
        # a parent folder is not accessible
        return False


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or "\\" in text or ":" in text
