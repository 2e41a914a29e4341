"""Fusion layers in AdapterHub's format: `adapter_fusion_config.json` and the tensors beside it.

`<path>.adapter_fusion_layer.<name>.{query,key,value}.{weight,bias}` is the fusion of the adapters
at that path, as `adapters` 1.3 writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.formats.checkpoint import Checkpoint, ModelInfo, inexpressible
from adapterzoo.formats.files import (
    AGAIN,
    json_bytes,
    pickle_bytes,
    read_json,
    read_tensors,
    tensor_bytes,
)
from adapterzoo.formats.places import Place, places_of
from adapterzoo.spelling import Container

from .config import VERSION, spelling_of
from .meta import meta_for, meta_in
from .names import (
    BlockLocation,
    find_location,
    layout_of,
    location_of,
    name_of,
    prefix_of,
)
from .write import check_convention

CONFIG = "adapter_fusion_config.json"
# of two files with the same tensors the one that cannot hold code goes first
TENSORS = ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin")


def recognizes(folder: Path) -> bool:
    """Return whether a folder holds fusion layers under AdapterHub's names."""
    return any((folder / name).is_file() for name in TENSORS)


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
            f"{CONFIG} has adapter_names={names!r}; it is a list of names. {AGAIN}."
        )
    return names


def read(info: ModelInfo, folder: Path, config_of: Callable[[str], AdapterConfig]) -> Checkpoint:
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
    metadata = read_json(folder / CONFIG)
    names = _fused_names(metadata)
    configs = [config_of(name) for name in names]
    places = _places(info, configs)
    config = metadata.get("config")
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{CONFIG} has no 'config' of a fusion. {AGAIN}.")
    name = metadata.get("name") if isinstance(metadata.get("name"), str) else ",".join(names)
    file = next(folder / n for n in TENSORS if (folder / n).is_file())
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


def encode(
    info: ModelInfo, checkpoint: Checkpoint, fused: Sequence[AdapterConfig], *, safe: bool = False
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
    for container, place in _places(info, fused).values():
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
        TENSORS[not safe]: tensor_bytes(tensors, {}) if safe else pickle_bytes(tensors),
        CONFIG: json_bytes({**meta, **fields, "version": VERSION}),
    }


def _conventions(fused: Sequence[AdapterConfig]) -> dict[str, Any]:
    """Return the fields in which `adapters` computes a fusion; the last adapter decides."""
    found: dict[str, Any] = {}
    for member in fused[-1].members if fused else ():
        found |= spelling_of(member).fusion(member)
    return found


def _at_entry(info: ModelInfo, fused: Sequence[AdapterConfig]) -> bool:
    """Return whether any of the fused adapters has a function of the embeddings."""
    entry = info.anatomy.entry
    sites = (p.site for config in fused for p in config.placements(info.anatomy))
    return entry is not None and any(site.path == entry.path for site in sites)


def _places(
    info: ModelInfo, fused: Sequence[AdapterConfig]
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
