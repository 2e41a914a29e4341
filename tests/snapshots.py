"""Everything that a failed call must leave as it was, and what the tests of models share."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import first_output, tiny_inputs
from safetensors import safe_open
from torch import Tensor

from adapterzoo.inject.adapted import adapters_of, below_wrappers
from adapterzoo.model.state import layer_in


def bits(tensor: Tensor) -> bytes:
    """The exact content, with NaNs and signs of zero."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def output(model: Any, **inputs: Any) -> Tensor:
    """The model's first output for fixed inputs, in the mode and with the setup it is in."""
    inputs = inputs or tiny_inputs(model.config.model_type)
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return first_output(model(**inputs))


def stir(model: Any, name: str, seed: int = 1, std: float = 0.1) -> None:
    """Fill an adapter with random numbers: a fresh one may be the identity."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, module in model.adapter_modules(name):
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=source) * std)


def adapter_bits(model: Any, name: str) -> dict[str, bytes]:
    return {
        f"{path}/{key}": bits(tensor)
        for path, module in model.adapter_modules(name)
        for key, tensor in module.state_dict().items()
    }


def snapshot(model: Any) -> dict[str, Any]:
    """The model as a caller can see it, piece by piece; equal snapshots: the same model."""
    return {**state(model), "next forward": bits(output(model))}


def check_plan(model: Any) -> None:
    """Check that the sites of the plan hold the adapters of their layers."""
    for path, site in model._active.plan.sites.items():
        if site.adapters is None:
            continue
        held = adapters_of(below_wrappers(layer_in(model, path)))
        for name, adapter in zip(site.names, site.adapters, strict=True):
            assert adapter is held[name], path


def state(model: Any) -> dict[str, Any]:
    """A snapshot without a forward."""
    check_plan(model)
    seen: dict[str, Any] = {
        f"tensor {key}": (tensor.dtype, tensor.shape, bits(tensor))
        for key, tensor in model.state_dict().items()
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        seen[f"requires_grad {name}"] = parameter.requires_grad
        seen[f"identity {name}"] = id(parameter)
    for path, module in model.named_modules():
        seen[f"class {path}"] = type(module)
        seen[f"training {path}"] = module.training
        seen[f"attributes {path}"] = sorted(vars(module))
    seen["default plan"] = model._active.default.plan
    seen["override"] = model._active.override
    seen["active adapters"] = repr(model.active_adapters)
    seen["adapters"] = list(model.adapters_config.items())
    seen["merged"] = model._adapter_state.merged
    seen["originals"] = {
        (path, name): bits(tensor)
        for path, kept in model._adapter_state.originals.items()
        for name, tensor in kept.items()
    }
    seen["config"] = copy.deepcopy(model.config.to_dict())
    if model.known_heads():
        seen["active head"] = model.active_head
        seen["heads"] = model.get_prediction_heads_config()
    return seen


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs between two snapshots."""
    missing = object()
    keys = dict.fromkeys([*before, *after])
    return [k for k in keys if before.get(k, missing) != after.get(k, missing)]


@contextmanager
def refused(model: Any, error: type[Exception], *says: str) -> Iterator[None]:
    """The block raises this error, whose message has all this, and changes nothing.

    Args:
        model: that is to stay as it is.
        error: the class, or one above it that says as much.
        says: at least the value that is wrong and what to write instead.
    """
    before = snapshot(model)
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    lost = [part for part in says if part not in text]
    assert not lost, f"{lost} not in: {text}"
    assert len(says) >= 2, "name the value and the hint"
    assert not changes(before, snapshot(model))


_CONTAINERS = (
    "adapters|loras|prefix_tunings|prefix_gates|prompt_tunings|refts|invertible_adapters|"
    "shared_parameters|adapter_fusion_layer|modules_to_save|trainable_tokens_delta"
)


def of_adapter(key: str, name: str | None = None) -> bool:
    """Whether a key of a state dict, or a path, is of an adapter: of this one, or of any."""
    inside = "" if name is None else rf"\.{re.escape(name)}"
    return re.search(rf"(^|\.)({_CONTAINERS}){inside}(\.|$)", key) is not None


def content(file: Path) -> object:
    """What a file holds but for the digest of the base model, unknown for one that is split."""
    if file.suffix != ".safetensors":
        return without_digest(file.read_text())
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    return {
        key: (t.dtype, t.shape, t.flatten().view(torch.uint8).tolist())
        for key, t in tensors.items()
    }


def without_digest(text: str) -> object:
    if not text.startswith("{"):
        return text
    document = json.loads(text)
    return {n: v for n, v in document.items() if not n.startswith("base_")}
