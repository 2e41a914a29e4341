"""Checkpoints: their contents, the interface of a format, reading and writing of folders.

A format is a file or package in this folder that registers itself, with an entry in
`folders.formats.FOLDER_FORMATS` that recognizes its folders. It reads a folder as a `Checkpoint`,
and encodes a checkpoint as the files of a folder. It does not write them, so a checkpoint that it
cannot express raises before the disk has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from adapterzoo.anatomy import Anatomy, part_names
from adapterzoo.config import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError, argument, in_python, listing, short
from adapterzoo.folders.formats import KINDS, NATIVE, format_of, holds_another
from adapterzoo.folders.names import CONFIG, HEAD_CONFIG, NAMES, Kind, file_given
from adapterzoo.folders.reading import metadata_in, read_json
from adapterzoo.inject.building import inject_path
from adapterzoo.methods._copies import all_placements
from adapterzoo.registry import Registry
from adapterzoo.spelling import AdapterHubSpelling, PeftSpelling

from . import files
from .fit import by_path

if TYPE_CHECKING:
    from adapterzoo.model.hf.info import ModelInfo

S = TypeVar("S", AdapterHubSpelling, PeftSpelling)

formats: Registry[Format] = Registry("format")
"""Names (the values of `format=`) → formats."""


@dataclass(slots=True)
class Checkpoint:
    """The contents of a checkpoint, in our terms.

    Attributes:
        metadata: JSON types: format, version, name, model_type, `config` of the adapter, `head`.
        adapter: `<path of the site>/<parameter>` → tensor; `shared_key` gives adapter-wide keys.
        head: parameter → tensor.
    """

    metadata: dict[str, Any]
    adapter: dict[str, Tensor] = field(default_factory=dict)
    head: dict[str, Tensor] = field(default_factory=dict)


def shared_key(parameter: str, number: int | None = None) -> str:
    """Return the key of an adapter-wide tensor: the path is that of the base model.

    Args:
        parameter: parameter of the module that `AdapterConfig.shared` made.
        number: index of the config in a union; None: it is not in a union.
    """
    return f"/{parameter}" if number is None else f"/{number}.{parameter}"


def shared_tensors(tensors: Mapping[str, Tensor], number: int | None = None) -> dict[str, Tensor]:
    """Return the adapter-wide tensors of a config, by parameter; `number` as in `shared_key`."""
    start = shared_key("", number)
    return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}


@dataclass(frozen=True, slots=True)
class Place:
    """One adapter in a checkpoint.

    Attributes:
        placement: its site, and the config that builds it.
        path: path of the module that holds it.
        part: prefix of its parameters' names if several adapters share the module ("query."), or
            if it adapts one parameter of the module ("down_proj.mlp_out.").
    """

    placement: Placement
    path: str
    part: str

    def key(self, parameter: str) -> str:
        """Return the key of one of its parameters in `Checkpoint.adapter`."""
        return f"{self.path}/{self.part}{parameter}"

    def own(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return its tensors by parameter.

        Args:
            tensors: the tensors of all places, from `fit.by_path`.
        """
        here = tensors.get(self.path, {})
        return {k.removeprefix(self.part): t for k, t in here.items() if k.startswith(self.part)}


def places_of(config: AdapterConfig, anatomy: Anatomy) -> list[Place]:
    """Return the places of a config at linear layers and in the residual stream, in model order.

    Args:
        config: config of an adapter.
        anatomy: the model's anatomy.

    Raises:
        SiteError: the model lacks a place that the config asks for.
    """
    by_path: dict[str, list[Placement]] = {}
    for placement in all_placements(config, anatomy):
        by_path.setdefault(inject_path(placement.site), []).append(placement)
    found: list[Place] = []
    for path, placements in by_path.items():
        sites = [p.site for p in placements]
        if len(sites) == 1 and sites[0].output_slice is None and sites[0].parameter is None:
            found.append(Place(placements[0], path, ""))
            continue
        for placement, name in zip(placements, part_names(sites), strict=True):
            parameter = placement.site.parameter
            owner = f"{parameter.rpartition('.')[2]}." if parameter else ""
            found.append(Place(placement, path, f"{owner}{name}."))
    return found


def from_plain(
    config: AdapterConfig, tensors: Mapping[str, Tensor], anatomy: Anatomy
) -> dict[str, Tensor]:
    """Return an adapter's tensors; undoes `exported`.

    Args:
        config: the adapter's config.
        tensors: the tensors of all places in the form of the peers' files.
        anatomy: the model's anatomy.
    """
    return _changed(config, tensors, anatomy, lambda placed, tensors: placed.own_tensors(tensors))


def _changed(
    config: AdapterConfig,
    tensors: Mapping[str, Tensor],
    anatomy: Anatomy,
    change: Callable[[AdapterConfig, Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Return the tensors, after converting those of each place."""
    found, at = dict(tensors), by_path(tensors)
    for place in places_of(config, anatomy):
        if own := place.own(at):
            for name in own:
                del found[place.key(name)]
            changed = change(place.placement.config, own)
            found |= {place.key(name): tensor for name, tensor in changed.items()}
    return found


@dataclass(frozen=True, slots=True)
class Format:
    """A folder format.

    Attributes:
        read: returns the contents of a folder; raises `CheckpointError` if a file is missing or
            damaged, or needs something that the model or this library lacks.
        encode: returns names and contents of the files to write; raises `CheckpointError` for what
            the format cannot express.
        owned: returns the names of all files that a folder of this format may have for a kind;
            saving replaces or deletes these, and keeps others.
    """

    read: Callable[[Path, Kind, ModelInfo], Checkpoint]
    encode: Callable[[Checkpoint, Kind, ModelInfo], dict[str, bytes]]
    owned: Callable[[Kind], tuple[str, ...]]


def inexpressible(why: str, *hints: str) -> CheckpointError:
    """Return the error for a checkpoint that a format cannot express.

    Args:
        why: the reason.
        hints: what to write instead; none: the native format.
    """
    hint = " or ".join(hints or (argument("format", "native"),))
    return CheckpointError(f"{why}. Nothing has been written. Write {hint}.")


def method_of(values: Mapping[str, Any], key: str, named: Sequence[S], legal: str) -> S:
    """Return the spelling of the method of a config in a peer's file.

    Args:
        values: the config in the file.
        key: the field with the name of the method.
        named: the spellings with that name.
        legal: the end of the message: which methods exist here, and what to write instead.

    Raises:
        CheckpointError: the config belongs to no method.
    """
    # if several are equally near, the message names the strictest
    named = sorted(named, key=lambda spelling: spelling.strictness, reverse=True)
    differing = [spelling.differing(values) for spelling in named]
    if [] in differing:
        return named[differing.index([])]
    nearest: list[str] = min(differing, key=len, default=[])
    shown = ", ".join(f"{name}={short(values.get(name))}" for name in (key, *nearest))
    raise CheckpointError(
        f"there is no such method here: {CONFIG} says {shown}. Methods of {legal}"
    )


def below(folder: Path, kind: Kind) -> list[Path]:
    """Return the sub-folders that a format recognizes; hidden ones do not count."""
    folders = (each for each in sorted(folder.glob("*/")) if not each.name.startswith("."))
    return [each for each in folders if format_of(each, kind) is not None]


def read(folder: Path, kind: Kind, info: ModelInfo) -> Checkpoint:
    """Read a folder in any format.

    Args:
        folder: the folder on disk.
        kind: what to read.
        info: info of the model to fill.

    Raises:
        CheckpointError: there is no such folder, it is a file, no format knows it, or it is
            damaged.
    """
    if folder.is_file():
        raise file_given(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{str(folder)!r}: no such folder. Write the folder of save_{kind}.")
    name = format_of(folder, kind)
    if name is None:
        raise CheckpointError(
            f"{str(folder)!r} holds no {kind} in a known format ({listing(formats)}); its files: "
            f"{listing(sorted(path.name for path in folder.iterdir()))}. Write "
            f"{in_python(f'the folder that save_{kind} wrote', 'the folder of an adapter')}."
        )
    with files.one_save(folder):
        return formats[name].read(folder, kind, info)


def head_document(folder: Path) -> Mapping[str, Any]:
    """Return what an adapter's folder says about its head; empty if it has none."""
    config, native = folder / CONFIG, folder / NAMES["adapter"].native
    # the native config only repeats what is in the tensor file
    is_alone = native.is_file() and not config.exists()
    document = metadata_in(native, NATIVE) if is_alone else read_json(config)
    head = (document or {}).get("head")
    # AdapterHub's format has a file for it
    if head is None and (beside := folder / HEAD_CONFIG).is_file():
        head = read_json(beside)
    return head if isinstance(head, Mapping) else {}


def exported(checkpoint: Checkpoint, info: ModelInfo) -> Checkpoint:
    """Return a checkpoint with its adapter in the form of the peers' files.

    See `AdapterConfig.plain`.
    """
    config = AdapterConfig.from_dict(checkpoint.metadata["config"])
    if config.plain == config:
        return checkpoint
    tensors = _changed(
        config, checkpoint.adapter, info.anatomy, lambda placed, own: placed.plain_tensors(own)
    )
    metadata = {**checkpoint.metadata, "config": config.plain.to_dict()}
    return replace(checkpoint, metadata=metadata, adapter=tensors)


def encoded(checkpoint: Checkpoint, kind: Kind, name: str, info: ModelInfo) -> dict[str, bytes]:
    """Return the files of a checkpoint; the arguments are those of `write`.

    Raises:
        CheckpointError: the format cannot express it.
        UnknownNameError: there is no such format.
    """
    chosen = formats.find(name)
    if name != "native" and checkpoint.metadata.get("embeddings") is not None:
        raise inexpressible(f"the adapter has trained embeddings, but the format {name!r} has none")
    if name != "native" and kind == "adapter":
        checkpoint = exported(checkpoint, info)
    return chosen.encode(checkpoint, kind, info)


def write(
    folder: Path,
    checkpoint: Checkpoint,
    kind: Kind,
    name: str,
    info: ModelInfo,
    contents: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint, after checking everything that could be wrong.

    A checkpoint of the same kind that the folder holds is replaced, whatever its format.

    Args:
        folder: the folder; created if missing.
        checkpoint: what to write, with whole tensors.
        kind: the kind of checkpoint.
        name: name of the format.
        info: info of the model that it comes from.
        contents: its files, if they are already `encoded`.

    Raises:
        CheckpointError: the format cannot express it, files of another kind of checkpoint in
            another format would be mixed with it, or the folder cannot be written; an old
            checkpoint is still whole.
        UnknownNameError: there is no such format.
    """
    chosen = formats.find(name)
    contents = encoded(checkpoint, kind, name, info) if contents is None else contents
    touched, stale = {*contents, *chosen.owned(kind)}, set[str]()
    for held in dict.fromkeys((*KINDS, kind)):
        there = format_of(folder, held)
        if there is None:
            continue
        own = {*formats[there].owned(held)}
        is_other = formats[there].read is not chosen.read
        if held == kind:
            stale |= own
        # a checkpoint of the other kind may stay if they share no file, or if all its files go
        elif is_other and not own <= stale and own & (touched | stale):
            raise holds_another(folder, held, there)
    files.warn_of_another(folder, kind, checkpoint.metadata.get("name"))
    files.write_all(folder, contents, touched | stale)
