"""Saving and loading of adapters, with their heads."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from adapterzoo import formats, hub
from adapterzoo.anatomy import Anatomy
from adapterzoo.config import AdapterConfig, ConfigUnion
from adapterzoo.contracts import CopyAdapter
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    DuplicateNameError,
    FieldError,
    SiteError,
    StateError,
    argument,
    extend,
    in_python,
    listing,
    unknown_name,
)
from adapterzoo.folders.names import Kind
from adapterzoo.folders.reading import other_fingerprint
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.inject import building
from adapterzoo.inject.building import inject_path
from adapterzoo.methods import undrawn
from adapterzoo.methods._copies import all_placements
from adapterzoo.names import check_name, one_of

from . import adapters, base, sharding
from .activation import check_layers, refuse_taken
from .heads import named, store, tables
from .hf.info import ModelInfo, name_of, provenance
from .state import (
    DEFAULT_EMBEDDINGS,
    AdaptedModel,
    AdapterRecord,
    LoadOptions,
    heads_of,
    layer_in,
    modules_of,
    named_tensors,
    tensors_of,
    token_table,
)

StrPath: TypeAlias = "str | os.PathLike[str]"


def chosen_format(format: str, use_safetensors: bool | None) -> str:
    """Return the format that two arguments ask for.

    Args:
        format: the format given, or the default.
        use_safetensors: not None: the format of `adapters`, as safetensors or pickled.

    Raises:
        ConfigError: the two contradict each other.
    """
    if use_safetensors is None:
        return format
    implied = "adapterhub-safetensors" if use_safetensors else "adapterhub"
    if format not in ("native", "adapterhub", implied):
        raise ConfigError(
            f"use_safetensors={use_safetensors!r} chooses among the files of adapters, and "
            f"format={format!r} is another format. Write only format={format!r}."
        )
    return implied


def check_loaders(model: AdaptedModel, loaders: Sequence[Any] | None) -> Sequence[Any]:
    """Return `custom_weights_loaders`, checked before anything is saved or loaded.

    Raises:
        ConfigError: one is not an object with the methods `save` and `load`.
        StateError: there are any, and the model is sharded.
    """
    for loader in loaders or ():
        if isinstance(loader, type) or not (hasattr(loader, "save") and hasattr(loader, "load")):
            raise ConfigError(
                f"{loader!r} is not an object with the methods save and load. Write "
                f"custom_weights_loaders=[MyLoader(model)]."
            )
    if loaders:
        sharding.refuse_if_sharded(model, "Leave custom_weights_loaders out.")
    return loaders or ()


def save_adapter(
    model: AdaptedModel,
    folder: StrPath,
    name: str,
    with_head: bool = True,
    meta: Mapping[str, Any] | None = None,
    format: str = "native",
    beside: bool = False,
) -> None:
    """Save an adapter and its head to a folder.

    Args:
        model: with adapters.
        folder: created if missing.
        name: the name of the adapter.
        with_head: whether to save its head.
        meta: JSON values; None: those with which the adapter was loaded.
        format: the format of the files.
        beside: whether the caller saves trained embeddings itself; if not, there is a warning.
    """
    own = [module for _, module in modules_of(model, name)]
    embeddings = model._adapter_state.embeddings
    table = token_table(model) if embeddings != DEFAULT_EMBEDDINGS and not beside else None
    is_trained = any(p.requires_grad for module in own for p in module.parameters())
    if is_trained and table is not None and table.weight.requires_grad:
        warnings.warn(
            f"the embeddings {embeddings!r} are trained with {name!r}, and are not in its file. "
            f"Write save_embeddings(folder, {embeddings!r}) too.",
            stacklevel=2,
        )
    with sharding.gathering(model, own):
        stored = checkpoint_of(model, name, with_head, meta, format)
        stored.metadata |= base.entries(model, name, format == "native")
        write(model, folder, stored, "adapter", format)


def checkpoint_of(
    model: AdaptedModel, name: str, with_head: bool, meta: Mapping[str, Any] | None, format: str
) -> Checkpoint:
    """Return an adapter and its head; arguments as in `save_adapter`."""
    record = model._adapter_state.find(name)
    sharding.reshard(model)
    embeddings, tensors = tables.compact(model, name, tensors_of(model, name))
    head = None
    if with_head:
        head_name = named.name_with(model, name)
        head = named.record_of(model, head_name, head_name != name, format == "native")
    document = {
        **provenance(model, name),
        "config": record.config.to_dict(),
        "head": None if head is None else head.document,
        "meta": dict(record.meta if meta is None else meta),
    }
    if embeddings is not None:
        document["embeddings"] = embeddings
    return Checkpoint(document, tensors, {} if head is None else head.tensors)


def load_adapter(
    model: AdaptedModel, folder: Path, asked: LoadOptions, hub_name: str | None = None
) -> str:
    """Load an adapter, and its head, from a folder.

    Args:
        model: with adapters.
        folder: the folder of the adapter.
        asked: the arguments of the public method.
        hub_name: the name that the user gave, if the folder is a download.

    Raises:
        ConfigError: an argument is invalid.
    """
    name, enter = fitting(model, folder, asked, hub_name)
    enter()
    tables.share_equal(model, [name])
    asked.load_weights(folder, name)
    return name


def found(
    model: AdaptedModel,
    path: StrPath,
    version: str | None,
    revision: str | None,
    source: str | None,
    asked: LoadOptions,
    options: Mapping[str, Any],
) -> tuple[Path, str | None]:
    """Return the folder of an adapter, and its name on the Hub.

    Args:
        model: with adapters.
        path: a folder, or a name on the Hub.
        version: another name for `revision`.
        revision: branch, tag or commit on the Hub.
        source: "hf" for the Hub, "ah" for an old id; None: a local folder if there is one.
        asked: the arguments of the public method.
        options: other arguments of `hub.resolve`.

    Raises:
        FieldError: an option is not an argument of `hub.resolve`.
    """
    revision = one_of(version=version, revision=revision)
    # os.access first: unlike Path.is_dir, it does not raise if a name is too long
    if source is None and not options and os.access(path, os.F_OK) and Path(path).is_dir():
        return Path(path), None
    if unknown := sorted(options.keys() - {*hub.OPTIONS}):
        hint = (
            "load_as='another_name'" if "name" in unknown[0] else f"one of {listing(hub.OPTIONS)}"
        )
        raise FieldError(f"there is no argument {listing(unknown)}. Write {hint}, or leave it out.")
    folder = hub.resolve(
        path, revision, source, model_name=asked.model_name or name_of(model), config=asked.config,
        **options,
    )  # fmt: skip
    return folder, None if folder == Path(path) else str(path)


def fitting(
    model: AdaptedModel, path: StrPath, asked: LoadOptions, hub_name: str | None = None
) -> tuple[str, Callable[[], None]]:
    """Read and check an adapter; return its name and a function that puts it into the model.

    Raises:
        CheckpointError: the checkpoint does not fit the model.
        ConfigError: an argument is invalid.
    """
    sharding.refuse_if_fixed(model, "Load it before fully_shard(model).")
    info = ModelInfo(model, asked.with_head)
    stored = formats.read(Path(path), "adapter", info)
    check_fingerprint(model, stored, asked.fingerprint)
    name = name_in(asked.load_as, stored, hub_name or path)
    with_head = asked.with_head and stored.metadata.get("head") is not None
    head_name, own_name = name, stored.metadata.get("head_name")
    if asked.load_as is None and own_name is not None and model._has_named_heads:
        head_name = check_name(own_name)
    known, heads = model._adapter_state.records, tuple(heads_of(model))
    there = {"adapter": known, **({"head": heads} if with_head and head_name == name else {})}
    of_head, warn_of_head = asked.overwriting(head_name, head=heads)
    asked, warn = asked.overwriting(name, **there)
    refuse_taken(
        model, name, bool(asked.overwrite_ok), argument("load_as", "another_name", "load_adapter")
    )
    left_out = check_layers(asked.leave_out, len(model.anatomy.blocks), "leave_out")
    try:
        record = filled(model, stored, left_out, asked.dtype)
    except CheckpointError as error:
        base_name = stored.metadata.get("model_name")
        if base_name and base_name != name_of(model):
            extend(error, f"\nIt was trained on {base_name!r}. Load it into that model.")
        raise
    enter_head, lost = None, ""
    if with_head:
        record_of_head = store.head_in(stored)
        try:
            enter_head = store.fitting(model, record_of_head, head_name, of_head)
        except CheckpointError as error:
            # a named head that the model's class cannot have
            if model._has_named_heads or "config" not in record_of_head.document:
                raise
            # the advice of the error is about writing files
            reason = str(error).rpartition(" Write ")[0]
            own = in_python("AutoAdapterModel.from_pretrained(…), or ")
            lost = (
                f"the adapter {name!r} has been loaded without its head: {reason} Write {own}"
                f"{argument('with_head', False, 'load_adapter')}."
            )
    elif asked.id2label is not None:
        raise ConfigError(f"id2label={asked.id2label!r}: no head is loaded. Leave it out.")

    def enter() -> None:
        # before anything changes: users may turn warnings into errors
        compare(model, stored, record, name, asked)
        # the only step that may fail
        adapters.bring_in(model, name, record, asked.set_active)
        if enter_head is not None:
            enter_head()
            if head_name != name:
                warn_of_head()
        if lost:
            warnings.warn(lost, stacklevel=2)
        warn()
        asked.report()

    return name, enter


def fingerprint_of(model: AdaptedModel, stored: Checkpoint) -> str:
    """Return the `adapter_fingerprint` that a checkpoint's adapter has when it is loaded.

    `dtype` and `leave_out` are not applied.

    Raises:
        CheckpointError: the checkpoint is damaged, or has embeddings of another model.
    """
    config = config_in(model, stored)
    _, tensors = tables.expand(model, stored.metadata.get("embeddings"), stored.adapter)
    return fit.fingerprint(config.to_dict(), tensors)


def check_fingerprint(model: AdaptedModel, stored: Checkpoint, expected: str | None) -> None:
    """Check the fingerprint of a checkpoint's adapter.

    Args:
        model: to load it into.
        stored: the checkpoint.
        expected: the first digits; None: not checked.

    Raises:
        CheckpointError: it has another one.
    """
    if expected is None:
        return
    found = fingerprint_of(model, stored)
    if not found.startswith(expected.lower()):
        raise other_fingerprint(found, expected)


def compare(
    model: AdaptedModel, stored: Checkpoint, record: AdapterRecord, name: str, asked: LoadOptions
) -> None:
    """Warn where a checkpoint has another base model than this one, or than the user names.

    Args:
        model: with adapters.
        stored: the checkpoint.
        record: of its adapter.
        name: of the adapter.
        asked: the arguments of the public method.

    Raises:
        ConfigError: a config that the user gives is not one.
    """
    base.warn_of_another(model, stored.metadata, name)
    asked.compare(record.config, stored.metadata.get("model_name"))


def load_all_adapters(model: AdaptedModel, folder: StrPath, with_head: bool) -> list[str]:
    """Load all adapters in the sub-folders of a folder, or none if one cannot be loaded.

    Raises:
        CheckpointError: there is no adapter.
        DuplicateNameError: two sub-folders hold adapters of the same name.
    """
    if not (found := formats.below(Path(folder), "adapter")):
        raise CheckpointError(
            "no sub-folder holds an adapter. Write the folder that save_all_adapters was given."
        )
    loads = [fitting(model, each, LoadOptions(with_head=with_head)) for each in found]
    names = [name for name, _ in loads]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DuplicateNameError(
            f"two sub-folders hold an adapter {twice[0]!r}. Write load_adapter(…, load_as='new')."
        )
    for _, enter in loads:
        enter()
    tables.share_equal(model, names)
    return names


def of_members(members: Sequence[AdapterConfig]) -> AdapterConfig:
    """Return the only config, or the union of several."""
    return members[0] if len(members) == 1 else ConfigUnion(*members)


def as_saved(
    config: AdapterConfig, tensors: Mapping[str, Tensor], anatomy: Anatomy
) -> AdapterConfig:
    """Return the config of a file, with `mixers=False` if an earlier release wrote it.

    Earlier releases adapted no block without attention, and their files do not say so.

    Args:
        config: in the file.
        tensors: of the adapter in the file, by `<path>/<parameter>`.
        anatomy: of the model.
    """
    there = {key.partition("/")[0] for key in tensors}

    def paths(member: AdapterConfig) -> set[str]:
        return {inject_path(placement.site) for placement in member.placements(anatomy)}

    members = []
    for member in config.members:
        if member.get("mixers"):
            without = member.replace(mixers=False)
            with suppress(SiteError):
                more = paths(member) - paths(without)
                member = without if more and more.isdisjoint(there) else member
        members.append(member)
    return config if members == [*config.members] else of_members(members)


def config_in(model: AdaptedModel, stored: Checkpoint) -> AdapterConfig:
    """Return the config of a checkpoint's adapter.

    Raises:
        CheckpointError: it has none.
    """
    document = stored.metadata.get("config")
    if not isinstance(document, Mapping):
        raise CheckpointError("the checkpoint has no adapter config. Save it again.")
    return as_saved(AdapterConfig.from_dict(document), stored.adapter, model.anatomy)


class Fitting(NamedTuple):
    """An adapter in a checkpoint that fits a model.

    Attributes:
        record: with modules on the meta device.
        tensors: from the checkpoint, by key.
        paths: those that share a table of embeddings.
    """

    record: AdapterRecord
    tensors: Mapping[str, torch.Tensor]
    paths: tuple[str, ...]


def compared(
    model: AdaptedModel,
    stored: Checkpoint,
    leave_out: tuple[int, ...] = (),
    dtype: torch.dtype | None = None,
) -> Fitting:
    """Return the adapter of a checkpoint without its values, which would take time and memory.

    Args:
        model: that it is for.
        stored: the checkpoint.
        leave_out: numbers of blocks without the adapter.
        dtype: to convert the tensors to; None: they have to have that of the model.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit the model.
    """
    config = config_in(model, stored)
    everywhere: set[str] = set()
    if leave_out:
        everywhere = {inject_path(p.site) for p in all_placements(config, model.anatomy)}
        members = []
        for member in config.members:
            listed = tuple(member.to_dict().get("leave_out", ()))
            left_out = (*listed, *(n for n in leave_out if n not in listed))
            members.append(member.replace(leave_out=left_out))
        config = of_members(members)
    paths, tensors = tables.expand(model, stored.metadata.get("embeddings"), stored.adapter)
    # an untrusted config may need more memory than there is: compare before allocating
    meta = torch.device("meta")
    skeleton = adapters.make(model, config, meta)
    dropped = everywhere - skeleton.places.keys()
    tensors = {k: t for k, t in tensors.items() if k.partition("/")[0] not in dropped}
    record = tables.with_table(model, skeleton, paths, meta)
    copied = named_tensors({p: m for p, m in record.coming.items() if isinstance(m, CopyAdapter)})
    own = named_tensors(record.coming, keep_vars=True)
    fit.check_fit(type(model).__name__, fit.converted(tensors, copied), own, dtype)
    return Fitting(record, tensors, tuple(paths))


def filled(
    model: AdaptedModel, stored: Checkpoint, leave_out: tuple[int, ...], dtype: torch.dtype | None
) -> AdapterRecord:
    """Return an adapter with the values of a checkpoint, not yet in the model.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit the model.
    """
    record, tensors, paths = compared(model, stored, leave_out, dtype)
    config, modules = record.config, record.coming.values()
    own = named_tensors(record.coming, keep_vars=True)
    in_file = {id(tensor) for tensor in own.values()}
    if any(id(t) not in in_file for m in modules for t in (*m.parameters(), *m.buffers())):
        # some values are not in the file; leave the caller's random state unchanged
        with undrawn(), torch.random.fork_rng(devices=()):
            record = tables.with_table(model, adapters.make(model, config), paths)
    by_path, first = fit.by_path(tensors), next(filter(None, record.places))
    for path, module in record.coming.items():
        # embeddings share the table of the first path
        if path not in paths[1:]:
            module = module if dtype is None else module.to(dtype)
            layer = layer_in(model, path or first)
            fit.fill(module, by_path.get(path, {}), building.device_of(layer))
    meta = stored.metadata.get("meta")
    return dataclasses.replace(
        record,
        meta=dict(meta) if isinstance(meta, Mapping) else {},
        trained_on=base.entries_in(stored.metadata),
    )


# --- heads ---


def save_head(
    model: AdaptedModel, folder: StrPath, head_name: str | None, format: str = "native"
) -> None:
    """Save only a head.

    Raises:
        UnknownNameError: there is no such head.
        StateError: the model has no head.
    """
    known = named.saved_names(model)
    if head_name is not None and head_name not in known:
        raise unknown_name("", "head", head_name, known)
    name = head_name or named.active_name(model)
    sharding.reshard(model)
    with sharding.gathering(model, ()):
        found = named.record_of(model, name, alone=True, short=format == "native")
        if found is None:
            raise StateError("the model has no head. Write add_classification_head('my_task').")
        own_name = name if name and model._has_named_heads else sharding.class_name(model)
        document = {**provenance(model, own_name), "head": found.document}
        write(model, folder, Checkpoint(document, {}, found.tensors), "head", format)


def load_head(model: AdaptedModel, folder: StrPath, asked: LoadOptions) -> str:
    """Load and activate a head."""
    name, enter = read_head(model, folder, asked)
    enter()
    return name


def read_head(
    model: AdaptedModel, folder: StrPath, asked: LoadOptions
) -> tuple[str, Callable[[], None]]:
    """Read and check a head; return its name and a function that puts it into the model."""
    sharding.refuse_if_fixed(model, "Load it before fully_shard(model).")
    stored = formats.read(Path(folder), "head", ModelInfo(model))
    name = name_in(asked.load_as, stored, folder)
    target = name if model._has_named_heads else named.active_name(model)
    asked, warn = asked.overwriting(name, head=heads_of(model))
    enter_head = store.fitting(model, store.head_in(stored), target, asked)

    def enter() -> None:
        enter_head()
        warn()
        asked.report()

    return name, enter


# --- folders ---


def write(
    model: AdaptedModel, folder: StrPath, stored: Checkpoint, kind: Kind, format: str
) -> None:
    """Write a checkpoint of a model.

    Args:
        model: with adapters.
        folder: created if missing.
        stored: the checkpoint.
        kind: the kind of checkpoint.
        format: the name of the format.

    Raises:
        CheckpointError: the format cannot express it, or the folder cannot be written.
    """
    info = ModelInfo(model)
    if kind != "adapter_fusion":
        refuse_sharded(model, format)
    shown, contents = whole(stored), None
    if sharding.split_over(model) is not None:
        # a format may read weights of the base model, which all processes gather
        contents = formats.encoded(shown, kind, format, info)
    arguments = Path(folder), shown, kind, format, info, contents
    sharding.in_first_process(model, functools.partial(formats.write, *arguments))


def whole(stored: Checkpoint) -> Checkpoint:
    """Return a checkpoint with whole tensors; a collective call if any is sharded."""
    adapter, head = sharding.gathered(stored.adapter), sharding.gathered(stored.head)
    return dataclasses.replace(stored, adapter=adapter, head=head)


def refuse_sharded(model: AdaptedModel, format: str) -> None:
    """Refuse any format but the native one for a sharded model.

    Raises:
        StateError: the model is sharded.
    """
    if format != "native":
        # to write adapters and heads, other formats read weights of the base model in one process
        sharding.refuse_if_fixed(model, f"Write {argument('format', 'native')}.")


def name_in(load_as: str | None, stored: Checkpoint, path: StrPath) -> str:
    """Return the name for an adapter or head: the one given, the stored one, or the path's.

    Raises:
        ConfigError: the name is invalid.
    """
    if load_as is not None:
        return check_name(load_as)
    name = stored.metadata.get("name")
    return check_name(PurePath(path).name if name is None else name, other="load_as")
