"""Saving and loading of fusion layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adapterzoo import formats
from adapterzoo.composition import Fuse
from adapterzoo.errors import CheckpointError, unknown_name
from adapterzoo.formats import adapterhub, files, fit, native
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.methods.fusion import AdapterFusionConfig
from adapterzoo.model import fusion, sharding
from adapterzoo.model.fusion import FuseArgument
from adapterzoo.model.heads import store
from adapterzoo.model.state import AdaptedModel, LoadOptions, fusion_modules, named_tensors
from adapterzoo.names import check_name

from .info import ModelInfo, provenance

_FORMATS = ("native", "adapterhub", "adapterhub-safetensors")


def save(
    model: AdaptedModel,
    folder: str | os.PathLike[str],
    adapter_names: FuseArgument,
    meta: Mapping[str, Any] | None = None,
    format: str = "native",
    with_head: bool | str = False,
) -> None:
    """Save fusion layers, without their adapters, to a folder."""
    state = model._adapter_state
    name = fusion.as_fuse(adapter_names, None).name
    found = state.find_fusion(name)
    if format not in _FORMATS:
        # PEFT has no fusion of adapters
        raise unknown_name("", "format", format, _FORMATS)
    sharding.reshard(model)
    document = {
        **provenance(model, name),
        "config": found.config.to_dict(),
        "adapter_names": list(found.adapters),
        "meta": dict(meta or {}),
    }
    layers = dict(fusion_modules(model, name))
    info = ModelInfo(model)
    configs = [state.find(adapter).config for adapter in found.adapters]
    if with_head:
        # whether it can be written is known before anything is
        head_name = with_head if isinstance(with_head, str) else name
        store.save(model, folder, head_name, format)

    def write(stored: Checkpoint) -> None:
        if format == "native":
            contents = native.encode(stored, native.FUSION)
        else:
            safe = format != "adapterhub"
            contents = adapterhub.encode_fusion(info, stored, configs, safe=safe)
        stale = (*native.names_of_files(native.FUSION), *adapterhub.FUSION_TENSORS)
        files.warn_of_another(Path(folder), native.FUSION, name)
        files.write_all(Path(folder), contents, stale)

    with sharding.gathering(model, layers.values()):
        sharding.save(model, Checkpoint(document, named_tensors(layers, keep_vars=True)), write)


def load(model: AdaptedModel, folder: str | os.PathLike[str], asked: LoadOptions) -> str:
    """Load fusion layers; the model must have the adapters that they fuse.

    Raises:
        CheckpointError: the file holds no fusion.
    """
    sharding.refuse_if_sharded(model, "Load it before fully_shard(model).")
    find = model._adapter_state.find
    folder = Path(folder)
    # a folder with both was mixed by hand: prefer the file that cannot hold code
    is_native = (folder / native.names_of_files(native.FUSION)[0]).is_file()
    if is_native or not adapterhub.holds_fusion(folder):
        stored = native.load(folder, native.FUSION)
    else:
        with files.one_save(folder):
            stored = adapterhub.read_fusion(ModelInfo(model), folder, lambda n: find(n).config)
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
