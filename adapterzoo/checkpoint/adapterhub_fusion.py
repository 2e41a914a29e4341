"""Fusion layers in AdapterHub's format: `adapter_fusion_config.json` and the tensors beside it.

`<path>.adapter_fusion_layer.<name>.{query,key,value}.{weight,bias}` is the fusion of the
bottlenecks at that path. They are read, never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from adapterzoo.errors import CheckpointError

from .adapterhub_keys import LOCATIONS
from .adapterhub_names import find_block, find_sublayer
from .foreign import read_json, read_tensors
from .formats import Facts
from .stored import Stored

_CONFIG = "adapter_fusion_config.json"
# of two files with the same tensors the one that cannot hold code goes first
_TENSORS = ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin")


def recognises(folder: Path) -> bool:
    """Whether a folder holds fusion layers under AdapterHub's names."""
    return any((folder / name).is_file() for name in _TENSORS)


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


def read(facts: Facts, folder: Path, places: Mapping[tuple[int, str], str]) -> Stored:
    """The fusion, in this library's words.

    What has no place in the model keeps its key of AdapterHub, so that the comparison with the
    model names it.

    Args:
        facts: of the model.
        folder: one that `recognises` knows.
        places: number of the block and location of the fused bottlenecks, to the path of each.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    names = fused_names(facts.call, folder)
    document = read_json(facts.call, folder / _CONFIG)
    config = document.get("config")
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{facts.call}: {_CONFIG} has no 'config' of a fusion. Copy the checkpoint again from "
            f"where it was saved."
        )
    name = document.get("name") if isinstance(document.get("name"), str) else ",".join(names)
    file = next(folder / name for name in _TENSORS if (folder / name).is_file())
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
    described = {"name": name, "adapter_names": names, "config": dict(config)}
    return Stored(described, tensors)
