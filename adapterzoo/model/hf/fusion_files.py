"""Saving and loading of fusion layers."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adapterzoo import formats
from adapterzoo.composition import Fuse
from adapterzoo.errors import CheckpointError
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.methods.fusion import AdapterFusionConfig
from adapterzoo.model import fusion, sharding
from adapterzoo.model.fusion import FuseArgument
from adapterzoo.model.heads import store
from adapterzoo.model.state import AdaptedModel, LoadOptions, fusion_modules, named_tensors
from adapterzoo.names import check_name

from .info import ModelInfo, provenance


def save(
    model: AdaptedModel,
    folder: str | os.PathLike[str],
    adapter_names: FuseArgument,
    meta: Mapping[str, Any] | None = None,
    format: str = "native",
    with_head: bool | str = False,
) -> None:
    """Save fusion layers, without their adapters, to a folder."""
    name = fusion.as_fuse(adapter_names, None).name
    found = model._adapter_state.find_fusion(name)
    formats.formats.find(format)
    sharding.reshard(model)
    document = {
        **provenance(model, name),
        "config": found.config.to_dict(),
        "adapter_names": list(found.adapters),
        "meta": dict(meta or {}),
    }
    layers, info = dict(fusion_modules(model, name)), ModelInfo(model)
    if with_head:
        # whether it can be written is known before anything is
        head_name = with_head if isinstance(with_head, str) else name
        store.save(model, folder, head_name, format)
    write = functools.partial(
        formats.write, Path(folder), kind="adapter_fusion", name=format, info=info
    )
    with sharding.gathering(model, layers.values()):
        sharding.save(model, Checkpoint(document, named_tensors(layers, keep_vars=True)), write)


def load(model: AdaptedModel, folder: str | os.PathLike[str], asked: LoadOptions) -> str:
    """Load fusion layers; the model must have the adapters that they fuse.

    Raises:
        CheckpointError: the file holds no fusion.
    """
    sharding.refuse_if_sharded(model, "Load it before fully_shard(model).")
    folder = Path(folder)
    stored = formats.read(folder, "adapter_fusion", ModelInfo(model))
    names, values = stored.metadata.get("adapter_names"), stored.metadata.get("config")
    listed = names if isinstance(names, list) else []
    if not (listed and all(isinstance(n, str) for n in listed) and isinstance(values, Mapping)):
        raise CheckpointError("the checkpoint holds no fusion. Save it again.")
    name = asked.load_as or str(stored.metadata.get("name"))
    fuse = Fuse(*listed, name=None if name == ",".join(listed) else check_name(name))
    asked, warn = asked.overwriting(fuse.name, fusion=model._adapter_state.fusions)
    fusion.check_free(model, fuse.name, bool(asked.overwrite_ok))
    config = AdapterFusionConfig.load(values)
    with torch.random.fork_rng(devices=()):
        made = fusion.make(model, tuple(listed), config)
    fits = named_tensors(made, keep_vars=True)
    fit.check_fit(type(model).__name__, stored.adapter, fits, asked.dtype)
    by_path = fit.by_path(stored.adapter)
    for path, layer in made.items():
        fit.fill(layer.to(asked.dtype), by_path.get(path, {}))
    enter_head = None
    if asked.with_head and formats.of(folder, "head") is not None:
        _, enter_head = store.read(model, folder, asked)
    fusion.enter(model, fuse, config, made, asked.set_active)
    if enter_head is not None:
        enter_head()
    warn()
    asked.report()
    asked.load_weights(folder, fuse.name)
    return fuse.name
