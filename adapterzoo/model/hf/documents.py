"""What all checkpoints of a model say about it, and the way to their folders."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

from adapterzoo import formats
from adapterzoo.errors import ConfigError, argument
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.inject.building import at_hand, is_offloaded, plain_modules
from adapterzoo.inject.quantized import is_quantized
from adapterzoo.model import sharding
from adapterzoo.model.state import DEFAULT_EMBEDDINGS, AdaptedModel, token_table
from adapterzoo.names import check_name

from .info import ModelInfo

_LOG = logging.getLogger(__name__)

BASE = "base"
"""The key of the sample of the base model's weights."""

StrPath: TypeAlias = "str | os.PathLike[str]"


def write(
    model: AdaptedModel, folder: StrPath, stored: Checkpoint, kind: formats.Kind, format: str
) -> None:
    """Write a checkpoint of a model.

    Args:
        model: with adapters.
        folder: made when missing.
        stored: the checkpoint.
        kind: what it is.
        format: name of the format.

    Raises:
        CheckpointError: the format cannot express it, or the folder cannot be written.
    """
    info = ModelInfo(model)
    _refuse_sharded(model, format)
    sharding.save(model, stored, lambda s: formats.write(Path(folder), s, kind, format, info))


def check(model: AdaptedModel, stored: Checkpoint, kind: formats.Kind, format: str) -> None:
    """Check that `write` can express a checkpoint; arguments as there.

    Raises:
        CheckpointError: it cannot.
    """
    _refuse_sharded(model, format)
    formats.encoded(stored, kind, format, ModelInfo(model))


def _refuse_sharded(model: AdaptedModel, format: str) -> None:
    if format != "native":
        # these formats read weights of the base model, in one process
        hint = (
            f"Write {argument('format', 'native')}, load it into a whole model, and save it from "
            f"there."
        )
        sharding.refuse_if_sharded(model, hint)


def provenance(model: AdaptedModel, name: str) -> dict[str, Any]:
    """Return what a checkpoint says about the model.

    Args:
        model: that it is taken from.
        name: of what is saved.
    """
    info = ModelInfo(model)
    return {
        "name": name,
        "model_type": info.model_type,
        "model_class": info.model_class,
        "model_name": info.model_name,
        "hidden_size": info.hidden_size,
    }


def base_weights(
    model: AdaptedModel, choose: Callable[[Mapping[str, int]], Iterable[str]]
) -> dict[str, Tensor]:
    """Return some of the base model's weights that are plain numbers, perhaps sharded, by key.

    Merging changes none of them. Of a quantized model the vectors are left out: some methods of
    quantization scale them.

    Args:
        model: with adapters.
        choose: returns the keys of these weights, from the dimensions of all by key.
    """
    replaced = model._adapter_state.embeddings != DEFAULT_EMBEDDINGS
    found: dict[str, Tensor] = {}
    offloaded: dict[str, tuple[nn.Module, str]] = {}
    quantized = getattr(model.config, "quantization_config", None) is not None
    for path, module in plain_modules(model._backbone):
        if is_quantized(module):
            quantized = True
            continue
        own = {**module._parameters, **model._adapter_state.originals.get(path, {})}
        for name, tensor in own.items():
            if tensor is None:
                continue
            if tensor.is_meta:
                if not is_offloaded(module):
                    continue
                offloaded[f"{path}.{name}"] = module, name
            plain = type(tensor) in (nn.Parameter, Tensor) or sharding.is_sharded(tensor)
            if plain and tensor.is_floating_point() and sharding.size_of(tensor):
                found[f"{path}.{name}"] = tensor
    if replaced and (table := token_table(model)) is not None:
        found = {k: t for k, t in found.items() if t is not table.weight}
    dims = {key: sharding.dim_of(tensor) for key, tensor in found.items()}
    keys = choose({key: dim for key, dim in dims.items() if dim > 1 or not quantized})
    for key in offloaded.keys() & set(keys):
        module, name = offloaded[key]
        with at_hand(module):
            found[key] = cast("Tensor", module._parameters[name])
    return {key: found[key] for key in keys}


def sample_of_base(model: AdaptedModel) -> dict[str, Any]:
    """Return a sample of the base model's weights; a collective call if they are sharded."""
    return fit.base_sample(sharding.gathered(base_weights(model, fit.sampled_keys)))


def warn_of_base(model: AdaptedModel, stored: Checkpoint, name: str) -> None:
    """Warn if a checkpoint's adapter was trained on other weights of the base model."""
    kept = stored.metadata.get(BASE)
    if not isinstance(kept, Mapping):
        return
    if fit.is_other_base(kept, base_weights(model, lambda dims: dims.keys() & kept.keys())):
        trained_on = stored.metadata.get("model_name")
        _LOG.warning(
            "load_adapter: the adapter %r was trained on other weights of the base model%s than "
            "this model has, so its outputs differ from those of its training.",
            name, f" ({trained_on!r})" if trained_on else "",
        )  # fmt: skip


def name_in(load_as: str | None, stored: Checkpoint, path: StrPath) -> str:
    """Return the name for an adapter or head: the one asked for, the stored one, or the path's.

    Raises:
        ConfigError: the name is not legal.
    """
    if load_as is not None:
        return check_name(load_as)
    name = stored.metadata.get("name")
    try:
        return check_name(PurePath(path).name if name is None else name)
    except ConfigError as error:
        raise ConfigError(
            f"{error} The checkpoint brought this one: write "
            f"{argument('load_as', 'my_task', 'load_adapter')} to give another."
        ) from error


def check_meta(meta: Mapping[str, Any] | None) -> None:
    """Check a user's `meta_dict`.

    Raises:
        ConfigError: it is not JSON.
    """
    try:
        json.dumps(dict(meta or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"meta_dict={meta!r} is not JSON ({error}). Write meta_dict={{'key': …}}."
        ) from error
