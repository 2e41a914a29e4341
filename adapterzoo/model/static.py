"""Static heads of transformers checkpoints, kept as named heads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch
from torch import Tensor
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.hub import cached_file

if TYPE_CHECKING:
    from .heads import HeadsMixin

DEFAULT_HEAD = "default"


def keep_static_head(
    model: HeadsMixin, path: str, unexpected: Iterable[str], hub: Mapping[str, Any]
) -> None:
    """x"""


def leftover_tensors(
    path: str, keys: Iterable[str], prefix: str, hub: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint that the base model did not take.

    Args:
        path: a folder, or a name on the Hub.
        keys: as transformers reported them: the base model's prefix may have been added.
        prefix: that prefix.
        hub: arguments for the Hub, such as `revision`.
    """
    wanted = {name for key in keys for name in (key, key.removeprefix(f"{prefix}."))}
    found: dict[str, Tensor] = {}
    for file in _files(path, wanted, hub):
        if file.suffix == ".safetensors":
            with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
                names = wanted & set(opened.keys())
                found.update({name: opened.get_tensor(name).clone() for name in names})
        else:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
            found.update({name: loaded[name] for name in wanted & set(loaded)})
    return found


def _files(path: str, wanted: set[str], hub: Mapping[str, Any]) -> list[Path]:
    for name, index in (
        (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME),
        (WEIGHTS_NAME, WEIGHTS_INDEX_NAME),
    ):
        if (whole := _cached(path, name, hub)) is not None:
            return [whole]
        if (listed := _cached(path, index, hub)) is not None:
            shards = json.loads(listed.read_text())["weight_map"]
            names = sorted({shard for key, shard in shards.items() if key in wanted})
            return [f for n in names if (f := _cached(path, n, hub)) is not None]
    return []


def _cached(path: str, name: str, hub: Mapping[str, Any]) -> Path | None:
    file = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **hub,
    )
    return None if file is None else Path(file)
