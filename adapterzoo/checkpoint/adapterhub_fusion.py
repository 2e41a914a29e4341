"""Fusion layers in AdapterHub's format: `adapter_fusion_config.json` and the tensors beside it.

`<path>.adapter_fusion_layer.<name>.{query,key,value}.{weight,bias}` is the fusion of the
bottlenecks at that path, as `adapters` 1.3 writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError

from .adapterhub import meta_for, meta_in, pickled
from .adapterhub_config import VERSION
from .adapterhub_keys import LOCATIONS
from .adapterhub_names import find_block, find_sublayer, layout_of, name_of_sublayer
from .adapterhub_quirks import refuse_fusion_quirks
from .files import json_bytes
from .foreign import read_json, read_tensors
from .formats import Facts
from .places import places_of
from .stored import Stored

_CONFIG = "adapter_fusion_config.json"
# of two files with the same tensors the one that cannot hold code goes first
TENSORS = ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin")


def recognises(folder: Path) -> bool:
    """Whether a folder holds fusion layers under AdapterHub's names."""
    return any((folder / name).is_file() for name in TENSORS)


def fused_names(call: str, folder: Path) -> list[str]:
    """The adapters that the fusion in a folder fuses, in their order.

    Args:
        call: what the user wrote, for messages.
        folder: one that `recognises` knows.

    Raises:
        CheckpointError: the config is missing or damaged, or does not say.
    """
    document = read_json(call, folder / _CONFIG)
    names = document.get("adapter_names")
    if names is None and isinstance(document.get("name"), str):
        # adapter-transformers: the name is that of the adapters with commas between
        names = document["name"].split(",")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise CheckpointError(
            f"{call}: {_CONFIG} has adapter_names={names!r}; it is a list of names. Copy the "
            f"checkpoint again from where it was saved."
        )
    return names


def read(facts: Facts, folder: Path, fused: Sequence[AdapterConfig]) -> Stored:
    """The fusion, in this library's words.

    What has no place in the model keeps its key of AdapterHub, so that the comparison with the
    model names it.

    Args:
        facts: of the model.
        folder: one that `recognises` knows.
        fused: the configs of `fused_names`.

    Raises:
        CheckpointError: a file is missing or damaged, or `adapters` computes something else.
    """
    places = _places(facts, fused)
    names = fused_names(facts.call, folder)
    document = read_json(facts.call, folder / _CONFIG)
    config = document.get("config")
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{facts.call}: {_CONFIG} has no 'config' of a fusion. Copy the checkpoint again from "
            f"where it was saved."
        )
    name = document.get("name") if isinstance(document.get("name"), str) else ",".join(names)
    file = next(folder / n for n in TENSORS if (folder / n).is_file())
    tensors: dict[str, Tensor] = {}
    for key, tensor in read_tensors(facts.call, file).items():
        path, marker, parameter = key.partition(f".adapter_fusion_layer.{name}.")
        located = find_block(facts, path) if marker else None
        sub = None if located is None else find_sublayer(*located)
        spot = None if located is None or sub is None else (located[0].layer, LOCATIONS[sub.kind])
        place = None if spot is None else places.get(spot)
        tensors[key if place is None else f"{place}/{parameter}"] = tensor
    if config.get("temperature"):
        # adapters starts anew from the highest one too
        tensors |= {f"{path}/steps": torch.zeros((), dtype=torch.int64) for path in places.values()}
    described = {
        "name": name,
        "adapter_names": names,
        "config": dict(config),
        "meta": meta_in(document),
    }
    return Stored(described, tensors)


def encode(facts: Facts, stored: Stored, fused: Sequence[AdapterConfig]) -> dict[str, bytes]:
    """The names and contents of the files to write.

    Args:
        facts: of the model.
        stored: the fusion.
        fused: the configs of its adapters.

    Raises:
        CheckpointError: `adapters` has no fusion in such a model, or computes something else.
    """
    document = stored.document
    layout = layout_of(facts)
    blocks = {block.layer: block for block in facts.anatomy.blocks}
    tensors: dict[str, Tensor] = {}
    for (layer, location), path in _places(facts, fused).items():
        block = blocks[layer]
        sub = next(sub for sub in block.sublayers if LOCATIONS[sub.kind] == location)
        named = name_of_sublayer(block, sub, layout)
        if named is None:
            raise CheckpointError(
                f"{facts.call}: AdapterHub's format has no name for a fusion at {path!r} of a "
                f"{facts.model_type}. Nothing has been written. Write format='native'."
            )
        start = f"{facts.prefix}.{named}" if facts.prefix else named
        own = {k.partition("/")[2]: t for k, t in stored.adapter.items() if _is_at(k, path)}
        steps = own.pop("steps", None)
        if steps is not None and int(steps):
            raise CheckpointError(
                f"{facts.call}: the temperature of this fusion has decayed for {int(steps)} steps, "
                f"and adapters starts anew from the highest one. Nothing has been written. Write "
                f"format='native'."
            )
        start = f"{start}.adapter_fusion_layer.{document['name']}."
        tensors |= {start + parameter: tensor for parameter, tensor in own.items()}
    fields = {key: value for key, value in document.items() if key != "meta"}
    meta = meta_for(facts.call, document.get("meta") or {})
    return {
        TENSORS[1]: pickled(tensors),
        _CONFIG: json_bytes({**meta, **fields, "version": VERSION}),
    }


def _places(facts: Facts, fused: Sequence[AdapterConfig]) -> dict[tuple[int, str], str]:
    """Number of the block and location of the bottlenecks, to the path of each."""
    for config in fused:
        places = places_of(config, facts.anatomy)
        refuse_fusion_quirks(facts, places)
    # of all of them: a fusion is of adapters that sit in the same places
    return {(p.placement.site.layer, str(p.placement.location)): p.path for p in places}


def _is_at(key: str, path: str) -> bool:
    return key.partition("/")[0] == path
