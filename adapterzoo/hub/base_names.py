"""The base model's name in the files of an adapter: one that others can load, not a local path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterzoo.formats import native
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.formats.files import json_bytes, read_json

from .repo_ref import is_public_name

# fields of native and AdapterHub configs, and of PEFT's
BASE_NAMES = ("model_name", "base_model_name_or_path")


def base_name(document: Mapping[str, Any], given: str | None) -> str | None:
    """Return the name of the base model on the Hub; None if it is unknown.

    Args:
        document: a config of any format.
        given: the author's name for it, which takes precedence.
    """
    written = next((document[key] for key in BASE_NAMES if document.get(key)), None)
    return given or (written if is_public_name(written) else None)


def with_base_name(
    folder: Path, contents: Mapping[str, bytes], given: str | None
) -> dict[str, bytes]:
    """Replace every other name of the base model in the files of an adapter.

    Args:
        folder: of the files; configs and native checkpoints are read again.
        contents: names to contents.
        given: as for `base_name`.

    Raises:
        CheckpointError: a config, or a checkpoint of the native format, is damaged.
    """
    named = dict(contents)
    for file in [name for name in contents if name.endswith("_config.json")]:
        document = read_json(folder / file)
        base = base_name(document, given)
        others = [key for key in BASE_NAMES if key in document and document[key] != base]
        if not others:
            continue
        if document.get("format") != native.FORMAT:
            named[file] = json_bytes(document | dict.fromkeys(others, base))
            continue
        # the native tensor file holds the name too, and a digest
        stem = file.removesuffix("_config.json")
        stored = native.load(folder, stem)
        renamed = {**stored.metadata, **dict.fromkeys(others, base)}
        named |= native.encode(Checkpoint(renamed, stored.adapter, stored.head), stem)
    return named
