"""The weights that the layers of a base model had before it was quantized."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import safetensors
import torch
from torch import Tensor, nn
from transformers import utils
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from adapterzoo.contracts import OriginalWeight, WeightPlan
from adapterzoo.errors import ConfigError, listing
from adapterzoo.inject import quantized
from adapterzoo.inject.building import layer_at
from adapterzoo.model.state import AdaptedModel, base_prefix

from .renaming import renamer

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor]
"""A folder, a file of safetensors, or a name on the Hub; or tensors by their keys in a model."""


def collected(model: AdaptedModel, plan: WeightPlan, source: Any) -> Mapping[str, OriginalWeight]:
    """Return the original weight of each quantized layer, which is read when it is needed.

    Args:
        model: with a quantized base model.
        plan: names the layers.
        source: see `Source`; None: what the base model was loaded from.

    Raises:
        ConfigError: no layer is quantized, or the source lacks a weight.
    """
    layers = {path: layer_at(model._backbone, path) for path in plan.shapes}
    wanted = {path: layer for path, layer in layers.items() if quantized.is_quantized(layer)}
    if not wanted:
        raise ConfigError(
            f"none of the adapted layers, {listing(plan.shapes)}, is quantized, so that there is "
            f"no error to make up for; PEFT would overwrite their weights with quantized ones, "
            f"and here the base model does not change. Load it quantized: from_pretrained(…, "
            f"quantization_config=BitsAndBytesConfig(load_in_4bit=True))."
        )
    found, name = _tensors(model, source)
    renamed = renamer(model)
    start = base_prefix(model)
    readers = {}
    for key, read in found:
        path, _, parameter = key.rpartition(".")
        if parameter == "weight":
            readers[renamed(path).removeprefix(start)] = read
    if missing := [path for path in wanted if path not in readers]:
        raise ConfigError(
            f"{name} has no weight of {listing(missing)}. Write init_data=plain.state_dict() with "
            f"the model that was quantized."
        )
    return {
        path: OriginalWeight(
            functools.partial(_checked, readers[path], layer, path, plan.shapes[path], name)
        )
        for path, layer in wanted.items()
    }


def _checked(
    read: Callable[[], Tensor], layer: nn.Module, path: str, shape: tuple[int, int], name: str
) -> Tensor:
    """Return an original weight `[d_out, d_in]`.

    Raises:
        ConfigError: it does not belong to the layer.
    """
    w = read()
    if quantized.was_transposed(layer):
        w = w.mT
    if w.shape != shape or not w.is_floating_point():
        kind = str(w.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{name} has {kind} {list(w.shape)} at {path!r}, where the model has a quantized "
            f"weight {list(shape)}. Write init_data='folder' with the model before quantization."
        )
    if w.is_meta or not bool(w.isfinite().all()):
        raise ConfigError(
            f"{name} has a weight without values, or with values that are not finite. Write "
            f"init_data='folder' with the model before quantization."
        )
    return w


def _tensors(
    model: AdaptedModel, source: Any
) -> tuple[Iterator[tuple[str, Callable[[], Tensor]]], str]:
    """Return the keys of a source with functions that read their tensors, and its name.

    Raises:
        ConfigError: there is no such source.
    """
    if isinstance(source, Mapping) and all(isinstance(t, Tensor) for t in source.values()):
        given: dict[str, Tensor] = {str(key): tensor for key, tensor in source.items()}
        reads = ((key, functools.partial(_given, tensor)) for key, tensor in given.items())
        return reads, "init_data"
    if source is not None and not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"init_data is a {type(source).__name__}; here it is a folder, a file of safetensors, "
            f"a name on the Hub, or a state dict. Write init_data='folder'."
        )
    own = model.config._name_or_path
    path = own if source is None else os.fspath(source)
    revision = getattr(model.config, "_commit_hash", None) if path == own else None
    files = _files(path, revision)
    if not files:
        raise ConfigError(
            f"the weights before quantization come from init_data, or from what the model was "
            f"loaded from, and {path!r} has no {utils.SAFE_WEIGHTS_NAME}. Write "
            f"init_data='folder', or init_data=plain.state_dict()."
        )
    return _in_files(files), repr(path)


def _given(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _files(path: str, revision: str | None) -> list[str]:
    """Return the files of safetensors of a model; empty if there are none."""
    if Path(path).suffix == ".safetensors":
        return [path] if Path(path).is_file() else []
    find = functools.partial(
        cached_file, path, revision=revision, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    try:
        if whole := find(utils.SAFE_WEIGHTS_NAME):
            return [whole]
        if index := find(utils.SAFE_WEIGHTS_INDEX_NAME):
            return list(get_checkpoint_shard_files(path, index, revision=revision)[0])
    except OSError:
        # transformers raises it for a name that is neither a folder nor a repository
        return []
    return []


def _in_files(files: list[str]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for file in files:
        with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
            for key in opened.keys():  # noqa: SIM118  it is not a mapping
                yield key, functools.partial(_read, file, key)


def _read(file: str, key: str) -> Tensor:
    with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
        tensor: Tensor = opened.get_tensor(key)
    return tensor.clone(memory_format=torch.contiguous_format)
