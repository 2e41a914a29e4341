"""What a name given to `load_adapter` refers to, and which files of a folder are an adapter's."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from adapterzoo.errors import CheckpointError, ConfigError, HubError
from adapterzoo.folders.names import file_given


@dataclass(frozen=True, slots=True)
class RepoRef:
    """A folder in a repository of the Hub.

    Attributes:
        repo_id: `user/repository`.
        subfolder: path in the repository, with slashes; empty for its root.
    """

    repo_id: str
    subfolder: str = ""


def locate(name: str | os.PathLike[str], source: str | None = None) -> Path | RepoRef:
    """Return the folder that a name refers to, without a request.

    An existing folder takes precedence over a repository of the same name. `user/repository/a/b` is
    the folder `a/b` of a repository.

    Args:
        name: the name; a path object is always a path.
        source: `"hf"`: the Hub, even if such a folder exists.

    Raises:
        CheckpointError: the name is that of a file; or there is no such folder, and the name cannot
            be on the Hub.
        ConfigError: the source is unknown.
        HubError: `source="hf"`, but the Hub cannot have a repository of this name.
    """
    if source not in ("hf", None):
        raise ConfigError(f"source={source!r} is not 'hf' (the Hub), 'ah' (an old id) or None.")
    # unlike Path.exists, os.access does not raise if a name is too long or a parent inaccessible
    if source is None and os.access(name, os.F_OK):
        path = Path(name)
        if path.is_dir():
            return path
        raise file_given(name)
    text = os.fspath(name)
    parts = text.rstrip("/").split("/")
    is_path = text.startswith("~") or "\\" in text or ":" in text or len(parts) == 1
    if source is None:
        is_path = is_path or not isinstance(name, str)
    if is_path or {"", ".", ".."} & {*parts}:
        raise (CheckpointError if source is None else HubError)(
            f"there is no such folder, and {text!r} cannot be a repository of the Hub. Write "
            f"the folder of an adapter or 'user/repository'."
        )
    return RepoRef("/".join(parts[:2]), "/".join(parts[2:]))


_PINNED = re.compile(r"(?P<name>.+)@(?P<fingerprint>[0-9a-fA-F]{1,64})", re.DOTALL)
_FEWEST_DIGITS = 8


def pinned(
    name: str | os.PathLike[str],
) -> tuple[str | os.PathLike[str], str | None]:
    """Return a name without a trailing `@fingerprint`, and the fingerprint; None if it has none.

    A folder with the whole name takes precedence. A name on the Hub has no `@`, and the last part
    of an old id is the name of an organization, none of which looks like a fingerprint.

    Args:
        name: a folder or a name on the Hub; `@` and 8 to 64 hexadecimal digits may follow.

    Raises:
        ConfigError: fewer digits follow a folder.
    """
    match = _PINNED.fullmatch(os.fspath(name))
    if match is None or os.access(name, os.F_OK):
        return name, None
    own, digits = match["name"], match["fingerprint"]
    if len(digits) < _FEWEST_DIGITS:
        # behind anything but a folder, it may be an organization
        if not (os.access(own, os.F_OK) and Path(own).is_dir()):
            return name, None
        raise ConfigError(
            f"@{digits} is too short: a fingerprint needs at least {_FEWEST_DIGITS} hexadecimal "
            f"digits. Write more digits, or {own!r} for any fingerprint."
        )
    return own if isinstance(name, str) else Path(own), digits.lower()


def is_public_name(name: object) -> bool:
    """Return whether others can load a base model by this name, which must not be a local path."""
    if not isinstance(name, str) or os.access(name, os.F_OK):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
