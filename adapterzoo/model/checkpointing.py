"""Saving and loading of adapters, heads and fusions, and of whole models with them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import torch
from torch import Tensor

from adapterzoo import hub
from adapterzoo.checkpoint import fit, folders, formats, fusions
from adapterzoo.checkpoint.formats import Checkpoint
from adapterzoo.checkpoint.native import FORMAT
from adapterzoo.composition import Fuse, from_json, to_json
from adapterzoo.configs import AdapterConfig, ConfigUnion, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    DuplicateNameError,
    StateError,
    argument,
    listing,
    unknown_name,
)
from adapterzoo.inject.building import build, device_of, give_memory, inject_path, layer_at
from adapterzoo.methods import undrawn
from adapterzoo.methods.fusion import AdapterFusionConfig
from adapterzoo.names import check_name

from . import adapters, fusion, sharding
from .activation import check_layers, make_plan, refuse_taken
from .heads import tables
from .heads.interface import HeadRecord
from .hf.info import info_of
from .state import (
    AdaptedModel,
    anatomy_of,
    backbone_of,
    fusion_modules,
    named_tensors,
    tensors_of,
)

StrPath: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An adapter that was read and fits the model, its meta, and what enters its head."""

    name: str
    config: AdapterConfig
    made: adapters.Made
    meta: Mapping[str, Any]
    enter_head: Callable[[], None] | None


# --- adapters ---


def save_adapter(
    model: AdaptedModel,
    folder: StrPath,
    name: str,
    with_head: bool = True,
    meta: Mapping[str, Any] | None = None,
    format: str = "native",
) -> None:
    """Save an adapter and its head to a folder."""
    strategy = model._head_strategy
    record = model._adapter_state.find(name)
    _check_meta(meta)
    sharding.reshard(model)
    embeddings, tensors = tables.compact(model, name, tensors_of(model, name))
    head_name = strategy.name_with(model, name)
    head = None
    if with_head:
        get = strategy.record if head_name == name else strategy.record_alone
        head = get(model, head_name)
        if head is not None and format == "native":
            head = strategy.shortened(model, head_name, head)
    document = {
        **_provenance(model, name),
        "config": record.config.to_dict(),
        "head": None if head is None else head.document,
        "meta": dict(record.meta if meta is None else meta),
    }
    if embeddings is not None:
        document["embeddings"] = embeddings
    stored = Checkpoint(document, tensors, {} if head is None else head.tensors)
    _write(model, folder, stored, "adapter", format)


def load_adapter(
    model: AdaptedModel,
    path: StrPath,
    *,
    load_as: str | None,
    with_head: bool,
    leave_out: Iterable[int] | None,
    id2label: Mapping[int, str] | None,
    set_active: bool,
    overwrite_ok: bool,
    dtype: torch.dtype | None,
    version: str | None,
    revision: str | None,
    source: str | None,
    **hub_kwargs: Any,
) -> str:
    """Load an adapter, and its head, from a folder or from the Hub.

    Raises:
        ConfigError: an argument is not legal.
    """
    if version is not None and revision not in (None, version):
        raise ConfigError(
            f"version={version!r} and revision={revision!r} mean the same thing and differ. "
            f"Write revision={revision!r} alone."
        )
    left_out = check_layers(leave_out, len(anatomy_of(model).blocks), "leave_out")
    folder = hub.resolve(path, revision or version, source, **hub_kwargs)
    hub_name = None if folder == Path(path) else str(path)
    loaded = _fitting(
        model, folder, load_as, with_head, left_out, id2label, set_active, overwrite_ok, dtype,
        hub_name,
    )  # fmt: skip
    _enter(model, loaded, set_active)
    return loaded.name


def _fitting(
    model: AdaptedModel,
    path: StrPath,
    load_as: str | None = None,
    with_head: bool = True,
    leave_out: tuple[int, ...] = (),
    id2label: Mapping[int, str] | None = None,
    set_active: bool = False,
    overwrite_ok: bool = False,
    dtype: torch.dtype | None = None,
    hub_name: str | None = None,
) -> _Loaded:
    """Read what `load_adapter` loads and check it in every way; the model has not changed."""
    sharding.refuse_if_sharded(model, "Load it before fully_shard(model).")
    info = info_of(model, with_head)
    stored = formats.read(Path(path), "adapter", info)
    name = _name_in(load_as, stored, hub_name or path)
    refuse_taken(model, name, overwrite_ok, f"{argument('load_as', 'another_name')}")
    config, made = _filled(model, stored, leave_out, dtype)
    has_head = with_head and stored.metadata.get("head") is not None
    if id2label is not None and not has_head:
        raise ConfigError(
            f"id2label={id2label!r} names the labels of a head, and none is loaded. "
            f"Leave id2label out, or load a checkpoint with a head."
        )
    enter_head = None
    if has_head:
        enter_head = model._head_strategy.fitting(
            model, _head_in(stored), name, id2label, set_active, overwrite_ok, dtype
        )
    meta = stored.metadata.get("meta")
    kept = dict(meta) if isinstance(meta, Mapping) else {}
    return _Loaded(name, config, made, kept, enter_head)


def _enter(model: AdaptedModel, loaded: _Loaded, active: bool = False) -> None:
    # what may fail comes first
    adapters.bring_in(model, loaded.name, loaded.config, loaded.made, active, loaded.meta)
    if loaded.enter_head is not None:
        loaded.enter_head()


def load_all_adapters(model: AdaptedModel, folder: StrPath, with_head: bool) -> list[str]:
    """Load every adapter below a folder, all or none.

    Raises:
        CheckpointError: there is none.
        DuplicateNameError: a name stands in two folders.
    """
    found = []
    for each in sorted(Path(folder).glob("*/")):
        # a hidden one is what a save has not finished, or not an adapter
        if each.name.startswith("."):
            continue
        with folders.reading(each):
            found += [each] if formats.of(each, "adapter") else []
    if not found:
        raise CheckpointError(
            "no sub-folder holds an adapter. Write the folder that save_all_adapters was given."
        )
    loads = [_fitting(model, each, with_head=with_head) for each in found]
    names = [loaded.name for loaded in loads]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DuplicateNameError(
            f"two sub-folders hold an adapter {twice[0]!r}. Load them one by one: "
            f"load_adapter(folder, load_as='another_name')."
        )
    for loaded in loads:
        _enter(model, loaded)
    return names


def _filled(
    model: AdaptedModel,
    stored: Checkpoint,
    leave_out: tuple[int, ...],
    dtype: torch.dtype | None,
) -> tuple[AdapterConfig, adapters.Made]:
    """Return the adapter's modules with the values of a checkpoint, not yet in the model."""
    document = stored.metadata.get("config")
    if not isinstance(document, Mapping):
        raise CheckpointError("the checkpoint has no adapter config. Save it again.")
    config = AdapterConfig.from_dict(document)
    tensors = stored.adapter
    if leave_out:
        everywhere = _paths(model, config)
        config = _leaving_out(config, leave_out)
        gone = everywhere - _paths(model, config)
        tensors = {k: t for k, t in tensors.items() if k.partition("/")[0] not in gone}
    # a stranger's config may ask for more memory than there is: compare before any is taken
    paths, tensors = tables.expand(model, stored.metadata.get("embeddings"), tensors)
    made = adapters.make(model, config, torch.device("meta"))
    if both := sorted(made.keys() & {*paths}):
        raise CheckpointError(
            f"the checkpoint has trained embeddings and an adapter at {listing(both)}. "
            f"Save it again."
        )
    made |= tables.make_tables(model, config, paths, torch.device("meta"))
    skeleton = named_tensors({path: m for path, (m, _) in made.items()}, keep_vars=True)
    fit.check_fit(type(model).__name__, tensors, skeleton, dtype)
    by_path = _by_path(tensors)
    for path, (module, placements) in made.items():
        if path in paths[1:]:
            # they share the table of the first
            made[path] = made[paths[0]][0], placements
            continue
        real = _with_memory(model, module, path, placements)
        fit.fill(real if dtype is None else real.to(dtype), by_path.get(path, {}))
        made[path] = real, placements
    return config, made


def _paths(model: AdaptedModel, config: AdapterConfig) -> set[str]:
    return {inject_path(p.site) for p in config.placements(anatomy_of(model))}


def _leaving_out(config: AdapterConfig, layers: tuple[int, ...]) -> AdapterConfig:
    """Return the config without these blocks, and without those that it left out already."""
    if isinstance(config, ConfigUnion):
        return ConfigUnion(*(_leaving_out(member, layers) for member in config.configs))
    own = tuple(config.to_dict().get("leave_out", ()))
    return config.replace(leave_out=(*own, *(n for n in layers if n not in own)))


def _by_path(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        path, _, parameter = key.partition("/")
        found.setdefault(path, {})[parameter] = tensor
    return found


def _with_memory(
    model: AdaptedModel, adapter: Adapter, path: str, placements: list[Placement]
) -> Adapter:
    """Return an adapter of the meta device as one on the device of its layer."""
    layer = layer_at(backbone_of(model), path)
    if not path:
        return adapter.to_empty(device=device_of(layer))
    if give_memory(adapter, device_of(layer)):
        return adapter
    # a method that draws its values in its own way shall not disturb the caller's random numbers
    with undrawn(), torch.random.fork_rng(devices=()):
        return build(layer, path, placements, model.dtype)


# --- heads ---


def save_head(
    model: AdaptedModel, folder: StrPath, head_name: str | None, format: str = "native"
) -> None:
    """Save a head alone.

    Raises:
        UnknownNameError: there is no such head.
        StateError: there is none to save.
    """
    strategy = model._head_strategy
    known = strategy.saved_names(model)
    if head_name is not None and head_name not in known:
        raise unknown_name("", "head", head_name, known)
    name = head_name or strategy.active_name(model)
    sharding.reshard(model)
    record = strategy.record_alone(model, name)
    if record is None:
        raise StateError(
            f"this {type(model).__name__} has no head to save. "
            f"Write add_classification_head('my_task') first."
        )
    if format == "native":
        record = strategy.shortened(model, name, record)
    own_name = name if name and strategy.is_named else sharding.class_name(model)
    document = {**_provenance(model, own_name), "head": record.document}
    stored = Checkpoint(document, {}, record.tensors)
    _write(model, folder, stored, "head", format)


def load_head(
    model: AdaptedModel,
    folder: StrPath,
    load_as: str | None,
    id2label: Mapping[int, str] | None,
    overwrite_ok: bool,
    dtype: torch.dtype | None,
) -> str:
    """Load a head; it becomes the active one."""
    strategy = model._head_strategy
    sharding.refuse_if_sharded(model, "Load it before fully_shard(model).")
    info = info_of(model)
    stored = formats.read(Path(folder), "head", info)
    name = _name_in(load_as, stored, folder)
    target = name if strategy.is_named else strategy.active_name(model)
    record = _head_in(stored)
    strategy.fitting(model, record, target, id2label, True, overwrite_ok, dtype)()
    return name


def _head_in(stored: Checkpoint) -> HeadRecord:
    document = stored.metadata.get("head")
    if not isinstance(document, Mapping):
        raise CheckpointError(
            f"the checkpoint describes its head by {document!r}, which is not an object. "
            f"Save it again, or write {argument('with_head', False)}."
        )
    return HeadRecord(dict(document), stored.head)


# --- fusions ---


def save_fusion(
    model: AdaptedModel,
    folder: StrPath,
    adapter_names: Fuse | Sequence[str] | str,
    meta: Mapping[str, Any] | None = None,
    format: str = "native",
) -> None:
    """Save fusion layers, without their adapters, to a folder."""
    state = model._adapter_state
    name = fusion.as_fuse(adapter_names, None).name
    found = state.find_fusion(name)
    _check_meta(meta)
    fusions.check_format(format)
    sharding.reshard(model)
    document = {
        **_provenance(model, name),
        "config": found.config.to_dict(),
        "adapter_names": list(found.adapters),
        "meta": dict(meta or {}),
    }
    layers = dict(fusion_modules(model, name))
    stored = Checkpoint(document, named_tensors(layers, keep_vars=True))
    info = info_of(model)
    configs = [state.find(adapter).config for adapter in found.adapters]
    sharding.save(model, stored, lambda s: fusions.write(Path(folder), s, format, info, configs))


def load_fusion(
    model: AdaptedModel,
    folder: StrPath,
    load_as: str | None,
    set_active: bool,
    overwrite_ok: bool,
    dtype: torch.dtype | None,
) -> str:
    """Load fusion layers; the adapters that they fuse must be there.

    Raises:
        CheckpointError: the file holds no fusion.
    """
    sharding.refuse_if_sharded(model, "Load it before fully_shard(model).")
    info = info_of(model)
    find = model._adapter_state.find
    stored = fusions.read(Path(folder), info, lambda name: find(name).config)
    names, values = stored.metadata.get("adapter_names"), stored.metadata.get("config")
    are_names = isinstance(names, list) and names and all(isinstance(n, str) for n in names)
    if not isinstance(names, list) or not are_names or not isinstance(values, Mapping):
        raise CheckpointError("the checkpoint holds no fusion. Save it again.")
    name = load_as or str(stored.metadata.get("name"))
    fuse = Fuse(*names, name=None if name == ",".join(names) else check_name(name))
    fusion.check_free(model, fuse.name, overwrite_ok)
    config = AdapterFusionConfig.load(values)
    with torch.random.fork_rng(devices=()):
        made = fusion.make(model, tuple(names), config)
    fits = named_tensors(made, keep_vars=True)
    fit.check_fit(type(model).__name__, stored.adapter, fits, dtype)
    by_path = _by_path(stored.adapter)
    for path, layer in made.items():
        fit.fill(layer.to(dtype), by_path.get(path, {}))
    fusion.enter(model, fuse, config, made, set_active)
    return fuse.name


# --- documents ---


def _write(
    model: AdaptedModel,
    folder: StrPath,
    stored: Checkpoint,
    kind: formats.Kind,
    format: str,
) -> None:
    info = info_of(model)
    if format != "native":
        # these look at weights of the base model, in one process
        hint = (
            f"Write {argument('format', 'native')}, load it into a whole model, and save it from "
            f"there."
        )
        sharding.refuse_if_sharded(model, hint)
    sharding.save(model, stored, lambda s: formats.write(Path(folder), s, kind, format, info))


def _provenance(model: AdaptedModel, name: str) -> dict[str, Any]:
    info = info_of(model)
    return {
        "name": name,
        "model_type": info.model_type,
        "model_class": info.model_class,
        "model_name": info.model_name,
        "hidden_size": info.hidden_size,
    }


def _name_in(load_as: str | None, stored: Checkpoint, path: StrPath) -> str:
    """Return the name that a checkpoint's adapter or head gets.

    Args:
        load_as: what the user chose.
        stored: the checkpoint; not every format knows a name.
        path: where it came from, whose last part is the name then.
    """
    if load_as is not None:
        return check_name(load_as)
    name = stored.metadata.get("name")
    try:
        return check_name(PurePath(path).name if name is None else name)
    except ConfigError as error:
        raise ConfigError(
            f"{error} The checkpoint brought this one: write "
            f"{argument('load_as', 'my_task')} to give another."
        ) from error


def _check_meta(meta: Mapping[str, Any] | None) -> None:
    try:
        json.dumps(dict(meta or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"meta_dict={meta!r} is not JSON ({error}). "
            f"Write meta_dict={{'key': …}} of texts, numbers, lists and dicts."
        ) from error


# --- whole models ---


def enter_in_config(model: AdaptedModel) -> None:
    """Write to the config what a saved model needs to have the same adapters again."""
    state, plan = model._adapter_state, model._active.default.plan
    heads = model._head_strategy.names(model)
    vars(model.config).pop("adapters", None)
    if not state.records and not heads:
        return
    records = state.records.items()
    model.config.adapters = {
        "format": FORMAT,
        # a list: JSON keeps its order, transformers sorts the keys of objects
        "adapters": [[name, record.config.to_dict()] for name, record in records],
        "meta": {name: dict(record.meta) for name, record in records if record.meta},
        "embeddings": {n: list(t) for n in state.records if (t := tables.tables_of(model, n))},
        "merged": list(state.merged),
        "fusions": [
            [name, list(record.adapters), record.config.to_dict()]
            for name, record in state.fusions.items()
        ],
        "active": to_json(plan.setup),
        "skip_layers": list(plan.skip_layers),
        "heads": list(plan.heads),
        "static_heads": list(state.copies),
        "known_heads": list(heads),
    }


def restore(model: AdaptedModel, quantised: bool = False) -> None:
    """Make the adapters that the config of a saved model lists; their values come later.

    Args:
        model: that is being loaded.
        quantised: whether layers that shall be quantised are so by now.

    Raises:
        CheckpointError: they cannot be made.
    """
    config = model.config
    if getattr(config, "quantization_config", None) is not None and not quantised:
        # its library will replace the layers, and only those of the plain class
        return
    document = vars(config).get("adapters")
    written = format_of(document)
    if written not in (None, FORMAT):
        raise CheckpointError(
            f"from_pretrained: the adapters in config.json are of the format {written!r}, this "
            f"release reads {FORMAT!r}. Write pip install -U adapterzoo, or take 'adapters' out of "
            f"config.json to load the model without them."
        )
    vars(config).pop("adapters", None)
    if written is None:
        return
    try:
        _restore(model, document)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"from_pretrained: the adapters in config.json cannot be made: {error}. Save the model "
            f"again, or take 'adapters' out of config.json to load it without them."
        ) from error


def _restore(model: AdaptedModel, document: Any) -> None:
    state = model._adapter_state
    for name, values in document["adapters"]:
        adapters.add(model, name, values)
    for name, paths in dict(document.get("embeddings", {})).items():
        state.find(name)
        tables.add_table(model, name, tuple(paths))
    for name, meta in dict(document.get("meta", {})).items():
        state.records[name] = dataclasses.replace(state.find(name), meta=dict(meta))
    for name in document["merged"]:
        state.find(name)
    state.merged = tuple(document["merged"])
    for name, names, values in document.get("fusions", ()):
        fusion.add(model, names, values, name if name != ",".join(names) else None)
    model._head_strategy.restore(model, document.get("static_heads", ()))
    setup, heads = from_json(document["active"]), document["heads"]
    plan = make_plan(model, setup, heads, tuple(document["skip_layers"]))
    model._active.default.plan = plan


def format_of(entry: object) -> str | None:
    """Return the format of an entry `adapters` of a config; AdapterHub's entry has none."""
    written = entry.get("format") if isinstance(entry, Mapping) else None
    return written if isinstance(written, str) else None
