"""Whether the words of a native checkpoint are those that were written.

The document in the file with the tensors says what these mean, and carries a digest of itself.
`<stem>_config.json` repeats it for people and for the Hub, and loading does not go by it: where
the two differ, somebody has edited it and would see no effect, or it was damaged or mixed up.
Digests find accidents; who means harm can make new ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from adapterzoo.errors import CheckpointError

from .foreign import read_json

_DIGEST = "digest"
# of the file alone: digests of tensors say nothing to people
_FILE_ONLY = (_DIGEST, "digests")
# what nobody edits on purpose
_FIXED = ("digests", "format", "version")
# of a value, in characters, and of lines
_WIDTH, _LINES = 60, 3


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document of JSON types with a digest of all that it says."""
    found = {key: value for key, value in document.items() if key != _DIGEST}
    return {**found, _DIGEST: _digest(found)}


def copy_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """What of a document is repeated beside the tensors."""
    return {key: value for key, value in document.items() if key not in _FILE_ONLY}


def checked(
    call: str, folder: Path, stem: str, document: Mapping[str, Any], edited: bool
) -> dict[str, Any]:
    """A document as it was written, without its digest.

    Args:
        call: what the user wrote, for messages.
        folder: where it was read; a copy for people may lie there.
        stem: the beginning of the names of its files.
        document: of the file with the tensors; one without a digest is of an older release.
        edited: whether what the copy says takes its place.

    Raises:
        CheckpointError: it is not what was written, or the copy says something else.
    """
    try:
        return _checked(call, folder, stem, document, edited)
    except RecursionError as error:
        raise CheckpointError(
            f"{call}: the document in {stem}.safetensors has objects in objects without end; "
            f"nothing has been loaded. Copy the checkpoint again from where it was saved."
        ) from error


def _checked(
    call: str, folder: Path, stem: str, document: Mapping[str, Any], edited: bool
) -> dict[str, Any]:
    found = {key: value for key, value in document.items() if key != _DIGEST}
    if _DIGEST in document and document[_DIGEST] != (right := _digest(found)):
        raise CheckpointError(
            f"{call}: the document in {stem}.safetensors is not the one that was written: its "
            f"digest is {_short(document[_DIGEST])} there, and {right!r} by its content; nothing "
            f"has been loaded. Copy the checkpoint again from where it was saved."
        )
    name = f"{stem}_config.json"
    if not (folder / name).exists() and not edited:
        return found
    copy = copy_of(read_json(call, folder / name))
    if edited:
        return copy | {key: found[key] for key in _FIXED if key in found}
    if lines := list(_differences("", copy, copy_of(found))):
        shown = "; ".join(lines[:_LINES])
        shown += f"; and {len(lines) - _LINES} more" if len(lines) > _LINES else ""
        raise CheckpointError(
            f"{call}: {name} says {shown}. Loading goes by the tensors' file, and nothing "
            f"has been loaded. If it was edited on purpose, write adapterzoo convert "
            f"{str(folder)!r} NEW_FOLDER --to native --edited; else delete {name}, or copy the "
            f"checkpoint again from where it was saved."
        )
    return found


def _digest(document: Mapping[str, Any]) -> str:
    # as JSON reads it again: a tuple is a list, a number as a key is a text
    text = json.dumps(document, sort_keys=True, allow_nan=False)
    text = json.dumps(json.loads(text), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _differences(path: str, copy: Any, own: Any) -> Iterator[str]:
    if isinstance(copy, dict) and isinstance(own, dict):
        for key in sorted({*copy, *own}):
            yield from _differences(f"{path}.{key}".lstrip("."), copy.get(key), own.get(key))
    # True equals 1, and 1 equals 1.0, but they are other texts
    elif json.dumps(copy, sort_keys=True) != json.dumps(own, sort_keys=True):
        yield f"{path}={_short(copy)} where the tensors' file says {_short(own)}"


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"
