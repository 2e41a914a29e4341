"""What a server makes of a folder: the changes it applies, and what it drops or refuses."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from adapterzoo.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Update:
    """A change of a weight of the base model: scale · B A.

    Attributes:
        path: path of the module in transformers.
        a: `[rank, d_in]`.
        b: `[d_out, rank]`.
        scale: as the server computes it.
        parameter: the module's parameter.
        expert: number of the expert, if the parameter holds several.
        part: its number and their count, if it is one of several parts of the output features.
        looked_up: whether the layer looks rows up, so that the weight is `[d_in, d_out]`.
    """

    path: str
    a: Tensor
    b: Tensor
    scale: float
    parameter: str = "weight"
    expert: int | None = None
    part: tuple[int, int] | None = None
    looked_up: bool = False


@dataclass(slots=True)
class Reading:
    """What a server makes of a folder.

    Attributes:
        updates: the updates that it applies.
        heads: full tensors that replace those of the base model, by key in transformers.
        dropped: keys in the file that it ignores.
        refused: why it does not load the folder; empty if it does.
        needs: options that it must be started with.
    """

    updates: list[Update] = field(default_factory=list)
    heads: dict[str, Tensor] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)


def opened(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a PEFT folder.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    except (OSError, RecursionError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{str(folder)!r} is not a PEFT folder with safetensors ({error}). Write it with "
            "save_adapter(…, format='peft')."
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"adapter_config.json in {str(folder)!r} is not an object.")
    return config, tensors


def type_of(base: nn.Module, known: Container[str], found: Reading) -> str | None:
    """Return a model's type; None, with a reason in `found`, if the server cannot adapt it.

    Args:
        base: the plain model.
        known: types of the models that take adapters in the server.
        found: what the server makes of the folder.
    """
    model_type = str(base.config.model_type)  # type: ignore[union-attr]
    if model_type in known:
        return model_type
    found.refused.append(f"{model_type!r} models take no adapters there, or are not known")
    return None


def linear_layers(base: nn.Module) -> set[str]:
    """Return the paths of a model's linear layers."""
    # GPT-2's are transformers' own class
    kinds = ("Linear", "Conv1D")
    return {path for path, module in base.named_modules() if type(module).__name__ in kinds}


@torch.no_grad()
def apply(base: nn.Module, reading: Reading) -> None:
    """Apply what a server has read to a plain model; its layers then share no weights.

    Args:
        base: the plain model; changed in place.
        reading: reading of a folder.

    Raises:
        CheckpointError: a change or a head does not fit its weight.
    """
    untie(base)
    for update in reading.updates:
        module = base.get_submodule(update.path)
        target: Tensor = getattr(module, update.parameter)
        if update.expert is not None:
            target = target[update.expert]
        if update.part is not None:
            number, count = update.part
            target = target.chunk(count, 0)[number]
        is_transposed = update.looked_up or type(module).__name__ == "Conv1D"
        change = update.scale * (update.b.to(target.dtype) @ update.a.to(target.dtype))
        change = change.mT if is_transposed else change
        if change.shape != target.shape:
            raise CheckpointError(
                f"{update.path}: a change {[*change.shape]} does not fit {[*target.shape]}"
            )
        target.add_(change)
    for key, tensor in reading.heads.items():
        path, _, name = key.rpartition(".")
        module = base.get_submodule(path)
        shape = getattr(module, name).shape
        if tensor.shape != shape:
            raise CheckpointError(f"{key}: a head {[*tensor.shape]} does not fit {[*shape]}")
        setattr(module, name, nn.Parameter(tensor.to(base.dtype)))  # type: ignore[arg-type]


def untie(base: nn.Module) -> None:
    """Give each module its own weight: servers change the layer, not what it shares."""
    seen: set[int] = set()
    for module in base.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
            seen.add(id(parameter))
