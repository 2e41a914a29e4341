"""AdapterHub's format: folders of `adapters`, and of adapter-transformers before it.

`adapter_config.json` with `pytorch_adapter.bin` or `adapter.safetensors`; with a head
`head_config.json` and `pytorch_model_head.bin` or `model_head.safetensors`. "adapterhub" writes
pickled tensors, as `adapters` 1.3 does by default; "adapterhub-safetensors" the other files.

The spelling of each method gives its fields, and the place that `<path>` leads to in its keys
`<path>.<container>.<adapter>.<parameter>`. In fused layers AdapterHub stacks the parts in one
tensor.

Fusion layers: `adapter_fusion_config.json` and the tensors next to it.
`<path>.adapter_fusion_layer.<name>.{query,key,value}.{weight,bias}` is the fusion of the adapters
at that path, as `adapters` 1.3 writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy
from adapterzoo.config import AdapterConfig, ConfigUnion, defaults, union_of
from adapterzoo.errors import AdapterZooError, CheckpointError, argument, listing
from adapterzoo.folders.formats import ADAPTERHUB_COMMON, ADAPTERHUB_FIELDS, base_of, meta_of
from adapterzoo.folders.names import FUSION_CONFIG, NAMES, Kind
from adapterzoo.folders.reading import AGAIN, read_json
from adapterzoo.formats import files, fit
from adapterzoo.formats.checkpoint import (
    Checkpoint,
    Format,
    Place,
    formats,
    inexpressible,
    method_of,
    places_of,
    shared_key,
    shared_tensors,
)
from adapterzoo.heads import STATIC, HeadConfig, head_types
from adapterzoo.spelling import AdapterHubFile, AdapterHubSpelling, Container, adapterhub_spellings

from .names import (
    PART_ORDER,
    BlockLocation,
    below_model,
    find_layer_site,
    find_location,
    from_location,
    layout_of,
    location_of,
    name_of,
    prefix_of,
    to_location,
)

if TYPE_CHECKING:
    from adapterzoo.model.hf.info import ModelInfo

# --- configs and tensors of adapters ---

# the release whose format is written
VERSION = "adapters.1.3.0"


def read_config(metadata: Mapping[str, Any], file: AdapterHubFile) -> AdapterConfig:
    """Return the config in an `adapter_config.json`.

    Raises:
        CheckpointError: there is no such method here, or a value is invalid.
    """
    values = metadata.get("config")
    try:
        if isinstance(values, str):
            config = AdapterConfig.load(values)
            for member in config.members:
                spelling_of(member)
            return config
        if not isinstance(values, Mapping) or values.get("architecture") != "union":
            return _read_member(values, file)
        members = values.get("configs")
        members = members if isinstance(members, list) else [members]
        return ConfigUnion(*(_read_member(member, file) for member in members))
    except CheckpointError:
        raise
    except AdapterZooError as error:
        raise CheckpointError(
            f"the config of the checkpoint is invalid; nothing has been loaded. {error}"
        ) from error


def spelling_of(config: AdapterConfig) -> AdapterHubSpelling:
    """Return how AdapterHub spells the method of a config.

    Raises:
        CheckpointError: AdapterHub lacks the method.
    """
    if config.architecture not in adapterhub_spellings:
        raise refused(config, f"{type(config).__name__} is not a method of adapters")
    return adapterhub_spellings[config.architecture]


def added(members: Sequence[AdapterConfig], anatomy: Anatomy) -> list[AdapterConfig]:
    """Return the configs that `adapters` adds to these without naming them in files."""
    found = (s.added(members, anatomy) for s in adapterhub_spellings.values() if s.added)
    return [config for config in found if config is not None]


def _read_member(values: object, file: AdapterHubFile) -> AdapterConfig:
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{values!r} in adapter_config.json is not an object. {AGAIN}.")
    name = values.get("architecture")
    spelling = method_of(
        values,
        "architecture",
        [s for s in adapterhub_spellings.values() if name in s.architecture],
        f"AdapterHub that exist here: {listing(adapterhub_spellings, limit=40)}. Nothing has been "
        f"loaded.",
    )
    dropped = {*spelling.fixed, *spelling.constants, "architecture"}
    fields = {spelling.fields.get(k, str(k)): v for k, v in values.items() if k not in dropped}
    fields = {**spelling.read_fields(fields, file), **spelling.implied}
    return AdapterConfig.from_dict({**fields, "architecture": spelling.config.architecture})


def write_config(config: AdapterConfig) -> dict[str, Any]:
    """Return the config as `adapters` writes it.

    Raises:
        CheckpointError: `adapters` has no such adapter.
    """
    if isinstance(config, ConfigUnion):
        members = [write_config(member) for member in config.configs]
        for (one, written), (other, also) in itertools.combinations(
            zip(config.configs, members, strict=True), 2
        ):
            alike = written.get("architecture") == also.get("architecture")
            everywhere = not (written.get("leave_out") or also.get("leave_out"))
            if alike and everywhere and not spelling_of(one).joins(one, other):
                raise refused(config, f"adapters refuses unions of {one!r} and {other!r}")
        return {"architecture": config.architecture, "configs": members}
    spelling = spelling_of(config)
    if (reason := spelling.unsayable(config)) is not None:
        raise refused(config, reason)
    values = config.to_dict()
    legal = {**defaults(type(config)), **spelling.implied}
    expressible = {*spelling.fields.values(), *spelling.omitted}
    # `to_dict` leaves out fields that only this library has
    wrong = [k for k, v in legal.items() if k not in expressible and values.get(k, v) != v]
    if wrong:
        raise refused(config, f"adapters has no {_shown(values, sorted(wrong))}")
    written = {theirs: values[ours] for theirs, ours in spelling.fields.items()}
    written |= {**spelling.fixed, **spelling.constants}
    name = spelling.architecture[0]
    return written if name is None else {"architecture": name, **written}


def _shown(values: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={values[name]!r}" for name in names)


def refused(config: AdapterConfig, why: str) -> CheckpointError:
    """Return the error for a config that AdapterHub's format cannot express."""
    return inexpressible(f"AdapterHub's format cannot express {config!r}: {why}")


@dataclass(frozen=True, slots=True)
class Key:
    """The parts of a key of AdapterHub.

    Attributes:
        text: the whole key.
        container: the container of the tensor.
        path: the part before the container.
        parameter: the part after the adapter's name.
    """

    text: str
    container: Container
    path: str
    parameter: str


def take_apart(text: str, name: str, containers: Sequence[Container]) -> Key | None:
    """Return the parts of a key; None if it belongs to none of the containers.

    Args:
        text: the key.
        name: name of the adapter in the checkpoint.
        containers: the containers of the adapter's methods.
    """
    for container in containers:
        for word in (container.name, *container.aliases):
            path, marker, parameter = f".{text}".partition(f".{word}.{name}.")
            if marker:
                return Key(text, container, path.removeprefix("."), parameter)
    return None


def read_adapter(
    info: ModelInfo, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Return the config, completed from the keys, and the tensors under our keys.

    A tensor without a place in the model keeps its AdapterHub key, so that the comparison with
    the model names it.

    Raises:
        CheckpointError: there is no such method here, or a tensor is wrong.
        SiteError: the model lacks a site that the config asks for.
    """
    words = frozenset(word for key in tensors for word in key.split("."))
    config = read_config(metadata, AdapterHubFile(metadata.get("version"), words))
    members: Sequence[AdapterConfig] = config.members
    containers = {c.name: c for m in members for c in spelling_of(m).containers}
    found = {text: take_apart(text, str(metadata.get("name")), [*containers.values()])
             for text in tensors}  # fmt: skip
    keys = [
        key
        for key in found.values()
        if key is not None
        and not any(f".{key.path}".endswith(f".{end}") for end in key.container.duplicates)
    ]
    paths = [key.path for key in keys if key.container.at == "layer"]
    sites = [site for path in paths if (site := find_layer_site(info, path)) is not None]
    members = [spelling_of(m).place(m, sites, info.anatomy) for m in members]
    members = [spelling_of(m).convention(info.model_type, m) for m in members]
    config = union_of([*members, *added(members, info.anatomy)])
    members = config.members
    here: dict[tuple[str, BlockLocation | None], list[Place]] = {}
    for container, there, place in _containers(places_of(config, info.anatomy)):
        here.setdefault((container.name, there), []).append(place)
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in keys:
        groups.setdefault((key.container.name, key.path), []).append(key)
    named = {text: tensors[text] for text, key in found.items() if key is None}
    for (container_name, path), own in groups.items():
        location = find_location(info, own[0].container, path)
        at = here.get((container_name, location), [])
        try:
            named |= _read_group(info, own, tensors, at, members, location)
        except CheckpointError as error:
            raise CheckpointError(f"at {path!r}: {error}") from error
    return config, named


def _read_group(
    info: ModelInfo,
    keys: Sequence[Key],
    tensors: Mapping[str, Tensor],
    places: Sequence[Place],
    members: Sequence[AdapterConfig],
    location: BlockLocation | None,
) -> dict[str, Tensor]:
    """Return the tensors of one container at one path."""
    texts = {key.text: tensors[key.text] for key in keys}
    own = {key.parameter: tensors[key.text] for key in keys}
    container = keys[0].container
    if container.at == "model":
        named = [(n, m, _container(m, container.name)) for n, m in enumerate(members)]
        holding = [(n, m, c) for n, m, c in named if c is not None and c.held_by(m)]
        if location is None or not holding:
            return texts
        own = {to_location(info, parameter): tensor for parameter, tensor in own.items()}
        # the members of a union share them
        return {
            shared_key(parameter, number if len(members) > 1 else None): tensor
            for number, config, held in holding
            for parameter, tensor in held.to_ours(own, config).items()
        }
    if not places:
        return texts
    fused = places[0].placement.site.output_slice is not None
    if fused:
        places = in_order(places)
        if any(t.dim() == 0 or t.shape[0] % len(places) for t in own.values()):
            return texts
    found: dict[str, Tensor] = {}
    for number, place in enumerate(places):
        config = place.placement.config
        part = {k: t.chunk(len(places))[number] for k, t in own.items()} if fused else own
        if (held := _container(config, container.name)) is not None:
            mine = held.to_ours(part, config)
            found |= {place.key(parameter): tensor for parameter, tensor in mine.items()}
    return found


def _container(config: AdapterConfig, name: str) -> Container | None:
    """Return the container with this name that the config's method declares."""
    return next((c for c in spelling_of(config).containers if c.name == name), None)


def in_order(places: Sequence[Place]) -> list[Place]:
    """Return the parts of a fused layer in AdapterHub's order.

    Raises:
        CheckpointError: the layer does not stack queries, keys and values one after the other.
    """
    for place in places:
        site = place.placement.site
        rows = site.output_slice
        if rows is None or rows.groups != 1 or site.role not in PART_ORDER:
            raise CheckpointError(
                f"in the fused layer {site.path!r} adapters uses other rows for its parts. Train "
                f"the adapter at other layers, or write {argument('format', 'native')}."
            )
    return sorted(places, key=lambda place: PART_ORDER.index(place.placement.site.role))


def _containers(places: Iterable[Place]) -> Iterator[tuple[Container, BlockLocation, Place]]:
    """Yield the containers of the tensors of each place, with its location."""
    for place in places:
        for container in spelling_of(place.placement.config).containers:
            if (location := location_of(container, place)) is not None:
                yield container, location, place


def write_adapter(
    info: ModelInfo, config: AdapterConfig, name: str, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the fields of the config, and the tensors by AdapterHub's keys.

    Raises:
        CheckpointError: `adapters` lacks the model family, the method or the places.
    """
    for member in config.members:
        check_convention(info, member)
    layout = layout_of(info)
    own = {n: m for n, m in enumerate(config.members) if not spelling_of(m).added}
    # files do not name the configs that adapters adds in such a model
    more = [m for n, m in enumerate(config.members) if n not in own]
    expected = added([*own.values()], info.anatomy)
    if more != expected:
        raise inexpressible(
            f"in {info.model_type} models adapters computes it with {expected or 'nothing else'}, "
            f"not {more or 'alone'}. Train it again with {union_of([*own.values(), *expected])!r} "
            f"for adapters"
        )
    members: list[AdapterConfig] = []
    for member in own.values():
        # the same adapter, with AdapterHub's fields for its places
        flagged = spelling_of(member).as_flags(member, info.anatomy)
        if flagged is None:
            why = "AdapterHub names only queries, keys, values, first and last layers"
            raise refused(member, why)
        members.append(flagged)
    # refuses a config that cannot be expressed, before fields are swapped
    written = write_config(union_of(members))
    if layout.swapped:
        written = write_config(union_of([_swapped(m) for m in members]))
    containers: dict[str, tuple[Container, list[Place]]] = {}
    for container, _, place in _containers(places_of(union_of(members), info.anatomy)):
        path = _joined_path(prefix_of(info), name_of(info, container, place, layout))
        containers.setdefault(f"{path}.{container.name}", (container, []))[1].append(place)
    found: dict[str, Tensor] = {}
    tensors_at = fit.by_path(tensors)
    for path, (container, here) in containers.items():
        for parameter, tensor in _to_container(container, here, tensors_at).items():
            found[f"{path}.{name}.{parameter}"] = tensor
    for number, member in zip(own, members, strict=True):
        shared = shared_tensors(tensors, number if len(config.members) > 1 else None)
        for container in spelling_of(member).containers if shared else ():
            if container.at == "model":
                path = _joined_path(prefix_of(info), below_model(info, container), container.name)
                given = {
                    f"{path}.{name}.{from_location(layout, key)}": tensor
                    for key, tensor in container.to_theirs(shared, member).items()
                }
                before = {key: t for key, t in found.items() if key.startswith(f"{path}.{name}.")}
                is_same = given.keys() == before.keys() and all(
                    torch.equal(tensor, before[key]) for key, tensor in given.items()
                )
                if given and before and not is_same:
                    raise inexpressible(
                        f"AdapterHub has one {path!r}, but the methods here differ in it"
                    )
                found |= given
    return written, found


def check_convention(info: ModelInfo, config: AdapterConfig) -> None:
    """Check that `adapters` computes in such a model what the fields of a config say.

    Raises:
        CheckpointError: it computes something else.
    """
    mine = config.to_dict()
    theirs = spelling_of(config).convention(info.model_type, config).to_dict()
    if differing := [name for name, value in mine.items() if theirs[name] != value]:
        other = _shown(theirs, differing)
        raise inexpressible(
            f"in {info.model_type} models adapters computes {other}, but this adapter has "
            f"{_shown(mine, differing)}. Train it again with {other} for adapters"
        )


def _joined_path(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _swapped(config: AdapterConfig) -> AdapterConfig:
    """Return the config with the feed-forward layers swapped, as `adapters` names them."""
    names = spelling_of(config).feed_forward
    if names is None:
        return config
    first, last = names
    values = config.to_dict()
    return config.replace(**{first: values[last], last: values[first]})


def _to_container(
    container: Container, places: Sequence[Place], tensors: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors of one container at one path; those of a fused layer are concatenated."""
    if places[0].placement.site.output_slice is not None:
        places = in_order(places)
        reason = spelling_of(places[0].placement.config).fused
        if reason is not None:
            hints = argument("format", "native"), argument("format", "peft")
            raise inexpressible(f"{reason}, such as {places[0].path!r}", *hints)
    elif len(places) > 1:
        raise inexpressible(
            f"{len(places)} adapters are at {places[0].path!r}, where AdapterHub has one name"
        )
    each = [container.to_theirs(p.own(tensors), p.placement.config) for p in places]
    return {name: torch.cat([part[name] for part in each]) for name in each[0]}


# --- folders ---


def _read(folder: Path, kind: Kind, info: ModelInfo) -> Checkpoint:
    if kind == "adapter_fusion":
        return _read_fusion(folder, info)
    head = Checkpoint({"name": None, "head": None})
    if kind == "head" or (info.with_head and any((folder / f).is_file() for f in _owned("head"))):
        head = _read_head(info, *_files_in(folder, "head"))
    if kind == "head":
        return head
    metadata, tensors = _files_in(folder, "adapter")
    config, adapter = read_adapter(info, metadata, tensors)
    described = {
        "name": metadata.get("name"),
        "model_type": metadata.get("model_type"),
        "model_name": metadata.get("model_name"),
        **base_of(metadata).entries(),
        "config": config.to_dict(),
        "head": head.metadata["head"],
        "meta": meta_of(metadata),
    }
    if head.metadata["name"] not in (None, described["name"]):
        described["head_name"] = head.metadata["name"]
    return Checkpoint(described, adapter, head.head)


def _encode(checkpoint: Checkpoint, kind: Kind, info: ModelInfo, *, safe: bool) -> dict[str, bytes]:
    if kind == "adapter_fusion":
        return _encode_fusion(checkpoint, info, safe)
    metadata = checkpoint.metadata
    name = str(metadata["name"])
    common = {key: metadata.get(key) for key in ADAPTERHUB_COMMON}
    contents: dict[str, bytes] = {}
    if kind == "adapter":
        config = AdapterConfig.from_dict(metadata["config"])
        fields, tensors = write_adapter(info, config, name, checkpoint.adapter)
        fields = {**common, "config": fields, **base_of(metadata).entries()}
        contents |= _files("adapter", fields, tensors, safe, metadata.get("meta"))
    if metadata.get("head") is not None:
        fields, tensors = write_head(info, name, metadata["head"], checkpoint.head)
        contents |= _files("head", {**common, **fields}, tensors, safe)
    return contents


def _files(
    kind: Kind,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    safe: bool,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """Return names and contents of a config and of its tensors.

    Args:
        kind: of what they hold.
        fields: the config's fields.
        tensors: the tensors by AdapterHub's keys.
        safe: whether to write safetensors.
        meta: `meta_dict`, whose entries are saved next to the fields.

    Raises:
        CheckpointError: one of its keys is such a field.
    """
    meta = meta or {}
    if taken := sorted(ADAPTERHUB_FIELDS & meta.keys()):
        raise inexpressible(
            f"AdapterHub's format has fields named {listing(taken)}. Rename these keys of meta_dict"
        )
    names = NAMES[kind]
    file, pickled = names.adapterhub
    written = files.tensor_bytes(tensors, {}) if safe else files.pickle_bytes(tensors)
    text = files.json_bytes({**meta, **fields, "version": VERSION})
    return {names.config: text, file if safe else pickled: written}


for _name, _safe in (("adapterhub", False), ("adapterhub-safetensors", True)):
    formats.register(_name)(
        Format(
            _read,
            functools.partial(_encode, safe=_safe),
            owned=lambda kind: _owned(kind) + (_owned("head") if kind == "adapter" else ()),
        )
    )


def _owned(kind: Kind) -> tuple[str, ...]:
    return (NAMES[kind].config, *NAMES[kind].adapterhub)


def _files_in(folder: Path, kind: Kind) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors."""
    names = NAMES[kind]
    return read_json(folder / names.config), files.tensors_in(folder, names.adapterhub)


def _read_head(
    info: ModelInfo, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Checkpoint:
    """Return a head.

    Args:
        info: the model's info.
        metadata: `head_config.json`.
        tensors: the tensors next to it.

    Raises:
        CheckpointError: the head has no equivalent in this model.
    """
    name, config = metadata.get("name"), metadata.get("config")
    if config is None:
        # the head of a task class: translated for a named head, unchanged for such a class
        cls, labels = str(metadata.get("model_class")), metadata.get("label2id")
        if info.named_heads:
            labels = labels if isinstance(labels, Mapping) else None
            head, own = info.from_static(cls, tensors, labels)
            return Checkpoint({"name": name, "head": head}, {}, own)
        own = {}
        for key, tensor in tensors.items():
            # adapters saves the layer onto the vocabulary with every head
            base = None if key in info.static_head else info.tensor(key)
            if base is None:
                own[key] = tensor
            elif not fit.same_values(tensor, base):
                raise CheckpointError(
                    f"{key!r} differs from the model's own. Write "
                    f"{argument('with_head', False, 'load_adapter')}."
                )
        return Checkpoint({"name": name, "head": {STATIC: cls}}, {}, own)
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config={config!r} in head_config.json is not an object. {AGAIN}.")
    _refuse_quirks(info, config)
    start = f"heads.{name}"
    # adapters saves all heads whose names begin with this one
    own = {
        key.removeprefix(f"{start}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{start}.") or not key.startswith(start)
    }
    if info.named_heads:
        config, own = info.untied(config, own)
    return Checkpoint({"name": name, "head": {"config": dict(config)}}, {}, own)


def write_head(
    info: ModelInfo, name: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return further fields of `head_config.json`, and tensors by AdapterHub's keys.

    Raises:
        CheckpointError: `adapters` has no such head.
    """
    config = metadata.get("config")
    if not isinstance(config, Mapping):
        return _task_fields(info.config.get("label2id")), dict(tensors)
    hints = argument("with_head", False), argument("format", "native")
    # adapters, with transformers 4, does not tie T5 1.1 and mT5; transformers 5 does
    is_apart = info.model_type == "mt5" or info.config.get("scale_decoder_outputs") is False
    is_tied = info.config.get("tie_word_embeddings") and not is_apart
    if is_tied and config.get("tie_word_embeddings") is False:
        raise inexpressible(f"adapters ties the output layer of a {info.model_type}", *hints)
    fields = dataclasses.fields(HeadConfig.from_dict(config))
    ours = {f.name for f in fields if "ours" in f.metadata} - {"tie_word_embeddings"}
    if used := sorted(ours & set(config)):
        why = f"AdapterHub's format cannot express a head with {_shown(config, used)}"
        raise inexpressible(why, *hints)
    if config["head_type"] == STATIC:
        own = {"model_class": config["model_class"], **_task_fields(config.get("label2id"))}
        return own, {**tensors, **info.tied(metadata)}
    _refuse_quirks(info, config)
    whole = {**tensors, **info.tied(metadata)}
    config = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    return {"config": config}, {f"heads.{name}.{key}": t for key, t in whole.items()}


def _task_fields(label2id: object) -> dict[str, Any]:
    """Return the fields of the head of a task class."""
    count = len(label2id) if isinstance(label2id, Mapping) else None
    return {"config": None, "label2id": label2id, "num_labels": count}


def _refuse_quirks(info: ModelInfo, config: Mapping[str, Any]) -> None:
    known = head_types.get(str(config.get("head_type")))
    what = None if known is None else known.adapterhub_quirk(info.model_type, info.config)
    if what is not None:
        raise CheckpointError(
            f"in such a {info.model_type} adapters {what} below a {config['head_type']!r} head, "
            f"so its outputs would differ there. Write {argument('with_head', False)}."
        )


def _read_fusion(folder: Path, info: ModelInfo) -> Checkpoint:
    """Return the fusion in our terms.

    A tensor without a place in the model keeps its AdapterHub key, so that the comparison with
    the model names it.

    Raises:
        CheckpointError: a file is missing or damaged, or `adapters` computes something else.
        UnknownNameError: the model lacks one of the adapters.
    """
    metadata, held = _files_in(folder, "adapter_fusion")
    names = metadata.get("adapter_names")
    if names is None and isinstance(metadata.get("name"), str):
        # adapter-transformers: the name is the adapters' names joined by commas
        names = metadata["name"].split(",")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise CheckpointError(f"{FUSION_CONFIG} has adapter_names={names!r}, not names. {AGAIN}.")
    configs = info.fused_configs(names)
    places = _fusion_places(info, configs)
    config = metadata.get("config")
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{FUSION_CONFIG} has no 'config' of a fusion. {AGAIN}.")
    name = metadata.get("name") if isinstance(metadata.get("name"), str) else ",".join(names)
    containers = {container.name: container for container, _ in places.values()}
    tensors: dict[str, Tensor] = {}
    for key, tensor in held.items():
        path, _, parameter = key.partition(f".adapter_fusion_layer.{name}.")
        locations = (find_location(info, c, path) for c in containers.values() if parameter)
        place = next((places[here][1] for here in locations if here in places), None)
        tensors[key if place is None else f"{place.path}/{parameter}"] = tensor
    if config.get("temperature"):
        # adapters starts again from the highest temperature too
        steps = torch.zeros((), dtype=torch.int64)
        tensors |= {f"{place.path}/steps": steps for _, place in places.values()}
    # adapters does not fuse functions of the embeddings
    entry = {"entry": "first"} if _at_entry(info, configs) else {}
    described = {
        "name": name,
        "adapter_names": names,
        "config": {**config, **_conventions(configs), **entry},
        "meta": meta_of(metadata),
    }
    return Checkpoint(described, tensors)


def _encode_fusion(checkpoint: Checkpoint, info: ModelInfo, safe: bool) -> dict[str, bytes]:
    """Return the names and contents of the files of a fusion.

    Raises:
        CheckpointError: `adapters` has no fusion in such a model, or computes something else.
    """
    metadata = dict(checkpoint.metadata)
    fused = info.fused_configs(metadata["adapter_names"])
    config = dict(metadata["config"])
    if config.pop("entry", "fused") == "fused" and _at_entry(info, fused):
        raise inexpressible(
            "adapters does not fuse functions of embeddings: only the first one acts"
        )
    metadata["config"] = config
    layout = layout_of(info)
    tensors: dict[str, Tensor] = {}
    at = fit.by_path(checkpoint.adapter)
    for container, place in _fusion_places(info, fused).values():
        named = name_of(info, container, place, layout)
        own = dict(at.get(place.path, {}))
        steps = own.pop("steps", None)
        if steps is not None and int(steps):
            raise inexpressible(f"adapters restarts the temperature, which is at step {int(steps)}")
        start = _joined_path(prefix_of(info), named, "adapter_fusion_layer", metadata["name"])
        tensors |= {f"{start}.{parameter}": tensor for parameter, tensor in own.items()}
    fields = {key: value for key, value in metadata.items() if key != "meta"}
    theirs = _conventions(fused)
    mine = {key: fields["config"][key] for key in theirs}
    if mine != theirs:
        raise inexpressible(
            f"adapters computes it with {_shown(theirs, theirs)}, not {_shown(mine, mine)}"
        )
    fields["config"] = {k: v for k, v in fields["config"].items() if k not in theirs}
    return _files("adapter_fusion", fields, tensors, safe, metadata.get("meta"))


def _conventions(fused: Sequence[AdapterConfig]) -> dict[str, Any]:
    """Return the fields that `adapters` computes a fusion with; the last adapter decides."""
    found: dict[str, Any] = {}
    for member in fused[-1].members if fused else ():
        found |= spelling_of(member).fusion(member)
    return found


def _at_entry(info: ModelInfo, fused: Sequence[AdapterConfig]) -> bool:
    """Return whether any of the fused adapters has a function of the embeddings."""
    entry = info.anatomy.entry
    sites = (p.site for config in fused for p in config.placements(info.anatomy))
    return entry is not None and any(site.path == entry.path for site in sites)


def _fusion_places(
    info: ModelInfo, fused: Sequence[AdapterConfig]
) -> dict[BlockLocation, tuple[Container, Place]]:
    """Return the places of the fused adapters, which all have the same."""
    found: dict[BlockLocation, tuple[Container, Place]] = {}
    for config in fused:
        places = places_of(config, info.anatomy)
        for member in config.members:
            check_convention(info, member)
        for container, location, place in _containers(places):
            if container.at == "sublayer":
                found[location] = container, place
    return found
