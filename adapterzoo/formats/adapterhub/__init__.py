"""AdapterHub's format: folders of `adapters`, and of adapter-transformers before it.

`adapter_config.json` with `pytorch_adapter.bin` or `adapter.safetensors`; with a head
`head_config.json` and `pytorch_model_head.bin` or `model_head.safetensors`. "adapterhub" writes
pickled tensors, as `adapters` 1.3 does by default; "adapterhub-safetensors" the other files.

Fusion layers: `adapter_fusion_config.json` and the tensors beside it.
`<path>.adapter_fusion_layer.<name>.{query,key,value}.{weight,bias}` is the fusion of the adapters
at that path, as `adapters` 1.3 writes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterzoo.config import AdapterConfig
from adapterzoo.errors import AdapterZooError, CheckpointError, argument, listing
from adapterzoo.formats.checkpoint import (
    Checkpoint,
    Format,
    Kind,
    Place,
    SavedModel,
    base_of,
    formats,
    inexpressible,
    places_of,
)
from adapterzoo.formats.files import (
    AGAIN,
    fields_of,
    json_bytes,
    pickle_bytes,
    read_json,
    read_tensors,
    tensor_bytes,
)
from adapterzoo.formats.fit import same_values
from adapterzoo.heads import STATIC, HeadConfig, head_types
from adapterzoo.spelling import Container

from .adapters import VERSION, check_convention, read_adapter, spelling_of, write_adapter
from .names import BlockLocation, find_location, layout_of, location_of, name_of, prefix_of

_FIELDS = frozenset(
    ("adapter_names", "config", "hidden_size", "model_class", "model_name", "model_type", "name",
     "version")
)  # fmt: skip


def meta_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `meta_dict` entries of a config."""
    return {key: value for key, value in metadata.items() if key not in _FIELDS}


def meta_for(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `meta_dict` entries to write next to the fields of a config.

    Raises:
        CheckpointError: it has a key that is such a field.
    """
    if taken := sorted(_FIELDS & set(meta)):
        raise CheckpointError(
            f"AdapterHub's format keeps meta_dict beside its own fields, and {listing(taken)} are "
            f"among these. Nothing has been written. Rename these keys of meta_dict, or write "
            f"{argument('format', 'native')}."
        )
    return meta


_ADAPTER = ("adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin")

_HEAD = ("head_config.json", "model_head.safetensors", "pytorch_model_head.bin")

_COMMON = ("name", "model_type", "model_class", "model_name", "hidden_size")


def names_of_files(kind: str) -> tuple[str, str, str]:
    """Return the names of the config, of the tensors in safetensors, and of those in a pickle.

    Args:
        kind: "adapter", "head" or "fusion".
    """
    return {"adapter": _ADAPTER, "head": _HEAD, "fusion": (FUSION_CONFIG, *FUSION_TENSORS)}[kind]


def _recognizes(folder: Path, kind: Kind) -> bool:
    config, safe, pickled = _ADAPTER if kind == "adapter" else _HEAD
    if (folder / safe).is_file() or (folder / pickled).is_file():
        return True
    return {"config", "model_class"} <= fields_of(folder / config)


def _read(folder: Path, kind: Kind, info: SavedModel) -> Checkpoint:
    head: tuple[dict[str, Any] | None, dict[str, Tensor]] = None, {}
    name = None
    if kind == "head" or (info.with_head and any((folder / f).is_file() for f in _HEAD)):
        metadata, tensors = _files_in(folder, _HEAD)
        name = metadata.get("name")
        head = read_head(info, metadata, tensors)
    if kind == "head":
        return Checkpoint({"name": name, "head": head[0]}, {}, head[1])
    metadata, tensors = _files_in(folder, _ADAPTER)
    config, adapter = read_adapter(info, metadata, tensors)
    described = {
        "name": metadata.get("name"),
        "model_type": metadata.get("model_type"),
        "model_name": metadata.get("model_name"),
        "config": config.to_dict(),
        "head": head[0],
        "meta": meta_in(metadata),
    }
    if head[0] is not None and name not in (None, described["name"]):
        described["head_name"] = name
    return Checkpoint(described, adapter, head[1])


def _encode(
    checkpoint: Checkpoint, kind: Kind, info: SavedModel, *, safe: bool
) -> dict[str, bytes]:
    metadata = checkpoint.metadata
    name = str(metadata["name"])
    common = {key: metadata.get(key) for key in _COMMON} | {"version": VERSION}
    contents: dict[str, bytes] = {}
    if kind == "adapter":
        config = AdapterConfig.from_dict(metadata["config"])
        fields, tensors = write_adapter(info, config, name, checkpoint.adapter)
        meta = meta_for(metadata.get("meta") or {})
        contents |= _tensor_file(_ADAPTER, tensors, safe)
        contents[_ADAPTER[0]] = json_bytes({**meta, **common, "config": fields})
    if metadata.get("head") is not None:
        more, tensors = write_head(info, name, metadata["head"], checkpoint.head)
        contents |= _tensor_file(_HEAD, tensors, safe)
        contents[_HEAD[0]] = json_bytes({**common, **more})
    return contents


def _tensor_file(
    names: tuple[str, str, str], tensors: Mapping[str, Tensor], safe: bool
) -> dict[str, bytes]:
    return {names[1]: tensor_bytes(tensors, {})} if safe else {names[2]: pickle_bytes(tensors)}


for _name, _safe in (("adapterhub", False), ("adapterhub-safetensors", True)):
    formats.register(_name)(
        Format(
            _recognizes,
            _read,
            functools.partial(_encode, safe=_safe),
            base=lambda folder: base_of(read_json(folder / _ADAPTER[0]), "model_name", ""),
            owned=lambda kind: (*_ADAPTER, *_HEAD) if kind == "adapter" else _HEAD,
        )
    )


def _files_in(
    folder: Path, names: tuple[str, str, str]
) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    config, safe, pickled = names
    metadata = read_json(folder / config)
    # of two files with the same tensors, prefer the one that cannot hold code
    file = next((folder / n for n in (safe, pickled) if (folder / n).is_file()), None)
    if file is None:
        raise CheckpointError(
            f"{str(folder)!r} has {config}, but neither {safe} nor {pickled}. {AGAIN}."
        )
    return metadata, read_tensors(file)


def read_head(
    info: SavedModel, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and tensors of a head.

    Args:
        info: of the model.
        metadata: `head_config.json`.
        tensors: what lies beside it.

    Raises:
        CheckpointError: the head has no equivalent in this model.
    """
    config = metadata.get("config")
    if config is None:
        return _read_static(info, metadata, tensors)
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"head_config.json has config={config!r}, which is not an object of fields. "
            f"Write "
            f"{argument('with_head', False, 'load_adapter')}, or copy the checkpoint again from "
            f"where it was saved."
        )
    _refuse_quirks(info, config)
    start = f"heads.{metadata.get('name')}"
    # adapters also saves heads whose names begin with this one
    own = {
        key.removeprefix(f"{start}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{start}.") or not key.startswith(start)
    }
    if info.named_heads:
        config, own = info.untied(config, own)
    return {"config": dict(config)}, own


def write_head(
    info: SavedModel, name: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return fields of `head_config.json` beside the common ones, and tensors by AdapterHub's keys.

    Raises:
        CheckpointError: `adapters` has no such head.
    """
    config = metadata.get("config")
    if not isinstance(config, Mapping):
        return _task_fields(info.config.get("label2id")), dict(tensors)
    _check_sayable(info, config)
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


def _refuse_quirks(info: SavedModel, config: Mapping[str, Any]) -> None:
    known = head_types.get(str(config.get("head_type")))
    what = None if known is None else known.adapterhub_quirk(info.model_type, info.config)
    if what is not None:
        raise CheckpointError(
            f"in such a {info.model_type} adapters {what} below a {config['head_type']!r} head, "
            f"and the same tensors give other outputs there than here. Nothing has been done. "
            f"Write {argument('with_head', False)}."
        )


def _ties_there(info: SavedModel) -> bool:
    """Return whether `adapters`, with transformers 4, ties the output layers of such a model."""
    # transformers 5 ties every T5; those of release 1.1, and mT5, have an output layer of their own
    if info.model_type == "mt5" or info.config.get("scale_decoder_outputs") is False:
        return False
    return bool(info.config.get("tie_word_embeddings"))


def _check_sayable(info: SavedModel, config: Mapping[str, Any]) -> None:
    hints = argument("with_head", False), argument("format", "native")
    try:
        known = HeadConfig.from_dict(config)
    except AdapterZooError as error:
        raise inexpressible(
            f"AdapterHub's format has no head of the type {config.get('head_type')!r}; it has "
            f"{listing(sorted(head_types))}",
            *hints,
        ) from error
    ours = {f.name for f in dataclasses.fields(known) if "ours" in f.metadata}
    if config.get("tie_word_embeddings") is False and _ties_there(info):
        raise inexpressible(
            f"the head has an output layer of its own, and adapters would write it into the "
            f"embeddings of a {info.model_type}, which it ties",
            *hints,
        )
    ours -= {"tie_word_embeddings"}
    if used := sorted(ours & set(config)):
        shown = ", ".join(f"{field}={config[field]!r}" for field in used)
        raise inexpressible(f"AdapterHub's format cannot express a head with {shown}", *hints)


def _read_static(
    info: SavedModel, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the head of a task class: for a named head translated, for such a class as it is."""
    theirs = str(metadata.get("model_class"))
    labels = metadata.get("label2id")
    if info.named_heads:
        return info.from_static(theirs, tensors, labels if isinstance(labels, Mapping) else None)
    static = info.static_head
    mine = {key: tensor for key, tensor in tensors.items() if key in static}
    for key, tensor in tensors.items():
        if key in mine:
            continue
        # the layer onto the vocabulary, which adapters saves with every head
        own = info.tensor(key)
        if own is None:
            mine[key] = tensor
        elif not same_values(tensor, own):
            raise CheckpointError(
                f"the checkpoint has {key!r}, and the model's own is another; an "
                f"adapter does not replace the output layer of a language model. Write "
                f"{argument('with_head', False, 'load_adapter')}."
            )
    return {STATIC: theirs}, mine


FUSION_CONFIG = "adapter_fusion_config.json"

# of two files with the same tensors the one that cannot hold code goes first
FUSION_TENSORS = ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin")


def holds_fusion(folder: Path) -> bool:
    """Return whether a folder holds fusion layers under AdapterHub's names."""
    return any((folder / name).is_file() for name in FUSION_TENSORS)


def _fused_names(metadata: Mapping[str, Any]) -> list[str]:
    """Return the adapters that a fusion fuses, in their order.

    Raises:
        CheckpointError: the config does not say.
    """
    names = metadata.get("adapter_names")
    if names is None and isinstance(metadata.get("name"), str):
        # adapter-transformers: the name is that of the adapters with commas between
        names = metadata["name"].split(",")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise CheckpointError(
            f"{FUSION_CONFIG} has adapter_names={names!r}; it is a list of names. {AGAIN}."
        )
    return names


def read_fusion(
    info: SavedModel, folder: Path, config_of: Callable[[str], AdapterConfig]
) -> Checkpoint:
    """Return the fusion, in our terms.

    What has no place in the model keeps its key of AdapterHub, so that the comparison with the
    model names it.

    Args:
        info: of the model.
        folder: one that `recognizes` accepts.
        config_of: the config of the adapter of a name.

    Raises:
        CheckpointError: a file is missing or damaged, or `adapters` computes something else.
    """
    metadata = read_json(folder / FUSION_CONFIG)
    names = _fused_names(metadata)
    configs = [config_of(name) for name in names]
    places = _fusion_places(info, configs)
    config = metadata.get("config")
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{FUSION_CONFIG} has no 'config' of a fusion. {AGAIN}.")
    name = metadata.get("name") if isinstance(metadata.get("name"), str) else ",".join(names)
    file = next(folder / n for n in FUSION_TENSORS if (folder / n).is_file())
    containers = {container.name: container for container, _ in places.values()}
    tensors: dict[str, Tensor] = {}
    for key, tensor in read_tensors(file).items():
        path, _, parameter = key.partition(f".adapter_fusion_layer.{name}.")
        locations = (find_location(info, c, path) for c in containers.values() if parameter)
        place = next((places[here][1] for here in locations if here in places), None)
        tensors[key if place is None else f"{place.path}/{parameter}"] = tensor
    if config.get("temperature"):
        # adapters starts anew from the highest one too
        steps = torch.zeros((), dtype=torch.int64)
        tensors |= {f"{place.path}/steps": steps for _, place in places.values()}
    # adapters fuses no functions of the embeddings
    entry = {"entry": "first"} if _at_entry(info, configs) else {}
    described = {
        "name": name,
        "adapter_names": names,
        "config": {**config, **_conventions(configs), **entry},
        "meta": meta_in(metadata),
    }
    return Checkpoint(described, tensors)


def encode_fusion(
    info: SavedModel, checkpoint: Checkpoint, fused: Sequence[AdapterConfig], *, safe: bool = False
) -> dict[str, bytes]:
    """Return the names and contents of the files to write.

    Args:
        info: of the model.
        checkpoint: the fusion.
        fused: the configs of its adapters.
        safe: whether tensors are written in safetensors instead of a pickle.

    Raises:
        CheckpointError: `adapters` has no fusion in such a model, or computes something else.
    """
    metadata = dict(checkpoint.metadata)
    config = dict(metadata["config"])
    if config.pop("entry", "fused") == "fused" and _at_entry(info, fused):
        raise inexpressible(
            "adapters fuses no functions of the embeddings: only that of the first adapter acts"
        )
    metadata["config"] = config
    layout = layout_of(info)
    tensors: dict[str, Tensor] = {}
    for container, place in _fusion_places(info, fused).values():
        named = name_of(info, container, place, layout)
        prefix = prefix_of(info)
        start = f"{prefix}.{named}" if prefix else named
        at = f"{place.path}/"
        own = {k.removeprefix(at): t for k, t in checkpoint.adapter.items() if k.startswith(at)}
        steps = own.pop("steps", None)
        if steps is not None and int(steps):
            raise inexpressible(
                f"the temperature of this fusion has decayed for {int(steps)} steps, and adapters "
                f"starts anew from the highest one"
            )
        start = f"{start}.adapter_fusion_layer.{metadata['name']}."
        tensors |= {start + parameter: tensor for parameter, tensor in own.items()}
    fields = {key: value for key, value in metadata.items() if key != "meta"}
    theirs = _conventions(fused)
    mine = {key: fields["config"][key] for key in theirs}
    if mine != theirs:
        shown = [", ".join(f"{k}={v!r}" for k, v in values.items()) for values in (theirs, mine)]
        raise inexpressible(
            f"adapters computes a fusion of these adapters with {shown[0]}, and this one has "
            f"{shown[1]}, so that the same tensors would give other outputs there"
        )
    fields["config"] = {k: v for k, v in fields["config"].items() if k not in theirs}
    meta = meta_for(metadata.get("meta") or {})
    return {
        FUSION_TENSORS[not safe]: tensor_bytes(tensors, {}) if safe else pickle_bytes(tensors),
        FUSION_CONFIG: json_bytes({**meta, **fields, "version": VERSION}),
    }


def _conventions(fused: Sequence[AdapterConfig]) -> dict[str, Any]:
    """Return the fields in which `adapters` computes a fusion; the last adapter decides."""
    found: dict[str, Any] = {}
    for member in fused[-1].members if fused else ():
        found |= spelling_of(member).fusion(member)
    return found


def _at_entry(info: SavedModel, fused: Sequence[AdapterConfig]) -> bool:
    """Return whether any of the fused adapters has a function of the embeddings."""
    entry = info.anatomy.entry
    sites = (p.site for config in fused for p in config.placements(info.anatomy))
    return entry is not None and any(site.path == entry.path for site in sites)


def _fusion_places(
    info: SavedModel, fused: Sequence[AdapterConfig]
) -> dict[BlockLocation, tuple[Container, Place]]:
    """Return the places of the fused adapters, which share them."""
    found: dict[BlockLocation, tuple[Container, Place]] = {}
    for config in fused:
        places = places_of(config, info.anatomy)
        for member in config.members:
            check_convention(info, member)
        for place in places:
            for container in spelling_of(place.placement.config).containers:
                if container.at == "sublayer" and (location := location_of(container, place)):
                    found[location] = container, place
    return found
