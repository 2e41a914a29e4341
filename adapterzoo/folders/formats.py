"""Which format a folder has, and what its configs and metadata say, in any format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterzoo.errors import CheckpointError, listing, short

from .names import CONFIG, NAMES, Kind
from .reading import AGAIN, fields_of, fingerprint_of, metadata_in, read_json

KINDS: tuple[Kind, ...] = ("adapter", "head")
"""The kinds that a folder is checked for, in order: an adapter may include its head."""

REVISION, DIGEST = "base_revision", "base_digest"
"""The keys of `Base.revision` and `Base.digest` in metadata and in files."""

# keys of a safetensors file's metadata: ours in our format; in PEFT's, `meta_dict` and facts about
# the base model
NATIVE, META, BASE = "adapterzoo", "adapterzoo_meta", "adapterzoo_base"


@dataclass(frozen=True, slots=True)
class Base:
    """The base model of a checkpoint; a field is None if the files do not give it.

    Attributes:
        name: its name on the Hub, or its folder.
        revision: the commit on the Hub, or the value that a peer's file has instead.
        digest: digest of its weights, see `adapterzoo.model.base`.
    """

    name: str | None
    revision: str | None = None
    digest: str | None = None

    def entries(self) -> dict[str, str]:
        """Return the metadata's entries for it, except the name."""
        fields = {REVISION: self.revision, DIGEST: self.digest}
        return {key: value for key, value in fields.items() if value is not None}


def base_of(values: Mapping[str, Any], name: str = "model_name", revision: str = REVISION) -> Base:
    """Return the model that a file's config names in these fields."""
    found = (values.get(name), values.get(revision), values.get(DIGEST))
    return Base(*(value if isinstance(value, str) and value else None for value in found))


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """What can be known of a folder of a format without its tensors.

    Attributes:
        recognizes: returns whether a folder, which may not exist, holds an adapter, a head alone
            or a fusion in this format. It looks only at file names and a config, and also
            recognizes damaged files, so that reading can say what is wrong with them.
        config: returns the config of an adapter or a head; in our format, the metadata.
        base: returns the model that an adapter or a head with such a config was trained on.
        meta: returns the author's metadata of an adapter or a head with such a config.
    """

    recognizes: Callable[[Path, Kind], bool]
    config: Callable[[Path, Kind], dict[str, Any]]
    base: Callable[[Path, Mapping[str, Any]], Base]
    meta: Callable[[Path, Mapping[str, Any]], Any]


def format_of(folder: Path, kind: Kind) -> str | None:
    """Return the name of the first format that recognizes a folder; None: none does."""
    found = (name for name, each in FOLDER_FORMATS.items() if each.recognizes(folder, kind))
    return next(found, None)


def base_in(folder: Path, format: str) -> Base:
    """Return the model that the adapter in a folder was trained on.

    Args:
        folder: folder of an adapter.
        format: name of its format.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    found = FOLDER_FORMATS[format]
    return found.base(folder, found.config(folder, "adapter"))


def holds_another(folder: Path, kind: Kind, there: str) -> CheckpointError:
    """Return the error for a folder that holds a checkpoint in another format.

    Args:
        folder: folder to be written.
        kind: kind of what it holds.
        there: name of its format.
    """
    what = "an adapter" if kind == "adapter" else "a head"
    return CheckpointError(
        f"{str(folder)!r} holds {what} in the format {there!r}. Write another folder."
    )


# --- ours ---

NATIVE_VERSION = 1
# two slashes: a site cannot have such a key, not even one called "head"
HEAD_KEY = "head//"
HASH = "sha256"


def _is_native(folder: Path, kind: Kind) -> bool:
    file = folder / NAMES[kind].native
    try:
        return file.is_file() and metadata_in(file, NATIVE) is not None
    except CheckpointError:
        # it may be ours, and damaged
        return True


def native_metadata(file: Path) -> dict[str, Any]:
    """Return our metadata of a safetensors file that this library wrote.

    Raises:
        CheckpointError: the file is missing or damaged, or another library wrote it.
    """
    metadata = metadata_in(file, NATIVE)
    if metadata is None:
        raise CheckpointError(f"{str(file)!r} is not a file that adapterzoo saved.")
    return metadata


def checked_metadata(folder: Path, kind: Kind, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata of an adapter or a head in our format, checked.

    Args:
        folder: folder that holds it.
        kind: the kind of checkpoint.
        digests: digests of its tensors.

    Raises:
        CheckpointError: the file is missing, damaged or of a newer version, it is not what was
            written, or the config beside it differs.
    """
    file = folder / NAMES[kind].native
    metadata = native_metadata(file)
    version = metadata.get("version")
    if version != NATIVE_VERSION:
        raise CheckpointError(
            f"{str(file)!r} has version {version!r}, not {NATIVE_VERSION}. "
            "Write pip install -U adapterzoo."
        )
    expected = metadata.pop(HASH, None)
    if expected != fingerprint_of(metadata, digests):
        raise CheckpointError(
            f"{str(file)!r} is not what was written: its SHA-256 is not {short(expected)}; "
            f"nothing has been loaded. {AGAIN}."
        )
    copy = folder / NAMES[kind].config
    shown = read_json(copy) if copy.exists() else metadata
    wrong = [k for k in {**shown, **metadata} if _text(shown.get(k)) != _text(metadata.get(k))]
    if wrong:
        raise CheckpointError(
            f"{str(copy)!r} has another {listing(wrong)} than {file.name}; nothing has been "
            f"loaded. Delete {copy.name}, or copy the checkpoint again."
        )
    return metadata


def _text(value: object) -> str:
    """Return JSON, in which True, 1 and 1.0 differ although they compare equal."""
    return json.dumps(value, sort_keys=True)


def _native(folder: Path, kind: Kind) -> dict[str, Any]:
    return metadata_in(folder / NAMES[kind].native, NATIVE) or {}


# --- AdapterHub's ---

ADAPTERHUB_COMMON = ("name", "model_type", "model_class", "model_name", "hidden_size")
ADAPTERHUB_FIELDS = frozenset(
    (*ADAPTERHUB_COMMON, "adapter_names", "config", "version", REVISION, DIGEST)
)
"""The fields of AdapterHub's configs; other fields are of the author."""


def _is_adapterhub(folder: Path, kind: Kind) -> bool:
    if any((folder / name).is_file() for name in NAMES[kind].adapterhub):
        return True
    return {"config", "model_class"} <= fields_of(folder / NAMES[kind].config).keys()


def meta_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `meta_dict` entries of AdapterHub's config."""
    return {key: value for key, value in values.items() if key not in ADAPTERHUB_FIELDS}


# --- PEFT's ---


def _is_peft(folder: Path, kind: Kind) -> bool:
    if kind != "adapter":
        return False
    there = any((folder / name).is_file() for name in NAMES[kind].peft)
    return there or is_config_of_peft(folder / CONFIG)


def is_config_of_peft(file: Path) -> bool:
    """Return whether a file, which may be missing, is PEFT's config of an adapter."""
    return "peft_type" in fields_of(file)


def _base_of_peft(folder: Path, config: Mapping[str, Any]) -> Base:
    values = {**config, **beside_peft(folder, BASE)}
    return base_of(values, "base_model_name_or_path", "revision")


def beside_peft(folder: Path, key: str) -> dict[str, Any]:
    """Return an object that this library wrote to the metadata of the tensor file.

    Raises:
        CheckpointError: the tensor file is damaged.
    """
    file = folder / NAMES["adapter"].peft[0]
    return (metadata_in(file, key) if file.is_file() else None) or {}


def _json(folder: Path, kind: Kind) -> dict[str, Any]:
    return read_json(folder / NAMES[kind].config)


FOLDER_FORMATS: Mapping[str, FolderFormat] = {
    "native": FolderFormat(
        _is_native, _native, lambda _, config: base_of(config), lambda _, config: config.get("meta")
    ),
    "adapterhub": FolderFormat(
        _is_adapterhub, _json, lambda _, config: base_of(config), lambda _, config: meta_of(config)
    ),
    "peft": FolderFormat(
        _is_peft, _json, _base_of_peft, lambda folder, _: beside_peft(folder, META)
    ),
}
"""In the order in which a folder is checked."""
