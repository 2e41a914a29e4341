"""Checkpoints of transformers' `Trainer`: the trained tensors of a model, filled in place.

`Trainer` knows adapters by the class of PEFT alone. Of other models it asks a `model.safetensors`,
which it gives to `load_state_dict`. So a folder `checkpoint-<step>` has that file too: it holds
adapters, their heads and what else is trained, and none of the frozen parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from adapterzoo.formats import files, fit
from adapterzoo.model import sharding
from adapterzoo.model.state import AdaptedModel, modules_of, own_parameters_of


def write(model: AdaptedModel, folder: Path) -> None:
    """Write the trained tensors if the folder is a checkpoint of a `Trainer`.

    Args:
        model: with adapters.
        folder: that the trainer saves to.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    if not re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", folder.name):
        return
    # a trainer of sharded models has files of its own
    if not sharding.groups_of(model):
        files.write_tensors(folder / SAFE_WEIGHTS_NAME, {}, tensors_of(model))


def holds_only_trained(model: AdaptedModel, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether tensors are those that `write` wrote, and not those of a whole model."""
    mine = tensors_of(model)
    return not any(key in tensors for key in model.state_dict(keep_vars=True) if key not in mine)


def fill(model: AdaptedModel, tensors: Mapping[str, Tensor]) -> None:
    """Give a model the values that `write` wrote; its tensors stay the same objects.

    Raises:
        CheckpointError: adapters, heads or what is trained differ; nothing has changed then.
    """
    mine = tensors_of(model)
    fit.check_fit(type(model).__name__, tensors, mine, None)
    with torch.no_grad():
        for key, tensor in mine.items():
            tensor.copy_(tensors[key])


def tensors_of(model: AdaptedModel) -> dict[str, Tensor]:
    """Return what adapters, heads and the training may change, each tensor once."""
    state, strategy = model._adapter_state, model._head_strategy
    modules: list[Any] = [m for name in state.records for _, m in modules_of(model, name)]
    modules += [m for name in state.records for m in strategy.modules_with(name)]
    own = {id(t) for m in modules for t in m.state_dict(keep_vars=True).values()}
    own |= {id(p) for p in own_parameters_of(model)}
    found: dict[int, tuple[str, Tensor]] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if tensor.requires_grad or id(tensor) in own:
            found.setdefault(id(tensor), (key, tensor))
    return dict(found.values())
