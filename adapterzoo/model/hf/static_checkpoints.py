"""Static heads of transformers checkpoints, kept as named heads."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, utils

from adapterzoo.contracts import Contained
from adapterzoo.errors import ConfigError, listing
from adapterzoo.heads import InexpressibleError
from adapterzoo.hub import OPTIONS
from adapterzoo.model.heads import named, store
from adapterzoo.model.state import base_prefix

from .info import ModelInfo
from .init_data import tensors_of
from .task_classes import has_head, is_task

_LOG = logging.getLogger(__name__)
_DEFAULT_HEAD = "default"
HUB_ARGUMENTS = (*OPTIONS, "subfolder")
"""Arguments of `from_pretrained` that locate a checkpoint on the Hub."""


def keep_static_head(
    model: Any, path: str | os.PathLike[str], info: dict[str, Any], hub: Mapping[str, Any]
) -> None:
    """Add the static head of a checkpoint as the active named head "default".

    Copies of the head that adapters have become named heads with the names of the adapters.
    Do nothing for a checkpoint of a base model, or of a model with named heads. A head without an
    equivalent of another type is of the type "static". If its class computes around another base
    model, it is left out, with a warning that gives the reason.

    Args:
        model: loaded from the checkpoint.
        path: a folder, or a name on the Hub.
        info: missing and unexpected keys of the base model, from transformers; keys of the head
            that is added are removed.
        hub: arguments for the Hub, such as `revision`.
    """
    architecture = next(iter(model.config.architectures or ()), "")
    if model.heads or not has_head(architecture, model.backbone_class):
        return
    prefix = base_prefix(model)
    wanted = {k for key in info["unexpected_keys"] for k in (key, key.removeprefix(prefix))}
    tensors = dict[str, Tensor]()
    if wanted:
        found = tensors_of(str(path), hub)
        tensors = {key: read() for key, read in found if key in wanted}
    below = dict(model._backbone.named_modules())
    missing = {key.rpartition(".")[0] for key in info["missing_keys"]}
    has_pooler = "pooler" in below and not any("pooler" in key.split(".") for key in missing)
    heads: dict[str, dict[str, Tensor]] = {_DEFAULT_HEAD: {}}
    copied: dict[str, str] = {}
    for key, tensor in tensors.items():
        path, is_copy, rest = key.partition(f".{Contained.container}.")
        owner, _, name = rest.rpartition(".")
        if not is_copy:
            heads[_DEFAULT_HEAD][key] = tensor
        elif owner in model._adapter_state.records:
            # `train_adapter` gave the adapter its own copy
            heads.setdefault(owner, {})[f"{path}.{name}"] = tensor
            copied[f"{owner}/{path}.{name}"] = key
    used: set[str] = set()
    for name, own in heads.items():
        keys = _add_head(model, name, architecture, heads[_DEFAULT_HEAD] | own, has_pooler)
        used |= {copied.get(f"{name}/{key}", key) for key in keys}
    if len(heads) > 1 and (active := model.active_adapters) is not None:
        names = [name for name in active.flatten() if name in model.heads]
        model.active_head = names[-1] if names else _DEFAULT_HEAD
    used |= {f"{prefix}{key}" for key in used}
    info["unexpected_keys"] = type(info["unexpected_keys"])(
        key for key in info["unexpected_keys"] if key not in used
    )


def _add_head(
    model: Any, name: str, architecture: str, tensors: Mapping[str, Tensor], has_pooler: bool
) -> Iterable[str]:
    """Add the named head that equals a static one, and return the keys of its tensors."""
    tasks = ModelInfo(model)
    labels = tasks.config.get("label2id")
    try:
        kind = {k: v for k, v in tasks.config.items() if k == "problem_type" and v is not None}
        head = tasks.equal_head(architecture, tensors, labels, has_pooler, kind, lenient=True)
        config, own = tasks.values_of(head, tensors)
        store.add(model, name, named.config_from(model, config))
    except (InexpressibleError, ConfigError) as error:
        if is_task(architecture):
            _LOG.warning("The checkpoint's head is left out; add one of your own. %s", error)
        return ()
    made = named.find(model, name)
    filled = made.state_dict(keep_vars=True)
    with torch.no_grad():
        for key, tensor in own.items():
            filled[key].copy_(tensor)
    if (layer := made.output_embeddings) is not None:
        # if it is tied, it is the embedding instead
        made.of_checkpoint = any(filled[key] is layer.weight for key in own)
    return tuple(head.keys)


def report_unused(model: Any, info: Mapping[str, Any]) -> None:
    """Log which weights of a checkpoint neither the base model nor a head uses.

    Args:
        model: loaded from the checkpoint.
        info: of transformers, without the keys of the head.
    """
    if unused := sorted(info["unexpected_keys"]):
        # as transformers' own report, which its verbosity and filters reach
        utils.logging.get_logger(PreTrainedModel.__module__).warning(
            f"{type(model).__name__}: the checkpoint has weights that the model does not use: "
            f"{listing(unused)}."
        )
