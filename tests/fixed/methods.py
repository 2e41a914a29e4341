"""The methods of the tables, and models and adapters of which no value is drawn.

A generator gives other numbers on another processor or in another release of torch; a formula in
integers does not.
"""

from __future__ import annotations

import functools
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from architectures.small import small
from families import tiny_config
from torch import Tensor
from transformers import PreTrainedConfig
from variants import VARIANTS

from adapterzoo import AutoAdapterModel
from adapterzoo.config import AdapterConfig, ConfigUnion, architectures, config_strings
from adapterzoo.errors import AdapterZooError

_PRIME = 8191
_DROPS = ("dropout", "stochastic_depth")
_DROP = re.compile(rf"\w*(?:{'|'.join(_DROPS)})=[^],]*,?")


def methods() -> dict[str, AdapterConfig]:
    """Every registered config without dropout, with the options and conventions that act."""
    found: dict[str, AdapterConfig] = {}
    for text, registered in _registered():
        config = _without_dropout(registered)
        name = _DROP.sub("", text).replace(",]", "]").replace("[]", "")
        for label, each in [(name, config), *_conventions(name, config)]:
            if type(each).__module__.startswith("adapterzoo.") and each not in found.values():
                found[label] = each
    return found


def _registered() -> Iterator[tuple[str, AdapterConfig]]:
    for name in config_strings:
        # a union is made of others
        if name != "union":
            yield small(name), AdapterConfig.load(small(name))
    yield from VARIANTS.items()
    for name in architectures:
        # here only what VARIANTS leaves out
        if name not in {config.architecture for config in (*VARIANTS.values(), ConfigUnion)}:
            yield name, AdapterConfig.from_dict({"architecture": name})


def _without_dropout(config: AdapterConfig) -> AdapterConfig:
    if isinstance(config, ConfigUnion):
        return ConfigUnion(*map(_without_dropout, config.members))
    dropped = [n for n in config.field_names() if n.endswith(_DROPS) and config[n]]
    return config.replace(**dict.fromkeys(dropped, 0.0)) if dropped else config


def _conventions(name: str, config: AdapterConfig) -> Iterator[tuple[str, AdapterConfig]]:
    for convention in ("adapterhub", "peft"):
        option = f"convention={convention!r}"
        with warnings.catch_warnings():
            # a convention without an effect warns
            warnings.simplefilter("error")
            try:
                changed = config.replace(convention=convention)
            except (AdapterZooError, UserWarning):
                continue
        yield (f"{name[:-1]},{option}]" if name.endswith("]") else f"{name}[{option}]"), changed


@functools.lru_cache(maxsize=512)
def numbers(shape: torch.Size, key: str) -> Tensor:
    """Float64 between −½ and ½ in steps of 2⁻¹³, others for each key."""
    i, seed = torch.arange(shape.numel()), zlib.crc32(key.encode()) % _PRIME
    return ((31 * i * i + (2 * seed + 1) * i + seed) % _PRIME).double().view(shape) / 8192 - 0.5


def fill(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Give all floating-point tensors their numbers; what starts at one stays near it."""
    with torch.no_grad():
        for key, tensor in tensors:
            if tensor.is_floating_point():
                value = numbers(tensor.shape, key)
                tensor.copy_(1 + value / 8 if bool((tensor == 1).all()) else value / 2)


def undropped(family: str) -> PreTrainedConfig:
    """The config of a tiny model without dropout."""
    config = tiny_config(family)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def filled(family: str, dtype: torch.dtype) -> Any:
    """A model in evaluation mode, without dropout and without adapters."""
    model = AutoAdapterModel.from_config(undropped(family)).to(dtype).eval()
    fill(model.named_parameters())
    return model


def add(model: Any, name: str, config: AdapterConfig) -> None:
    """Add an adapter with the numbers of its name."""
    model.add_adapter(name, config)
    fill(tensors_of(name, model.adapter_modules(name)))


def tensors_of(name: str, modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, by the name of what they belong to and the keys of its file."""
    for path, module in modules:
        for tensors in (module.named_parameters(), module.named_buffers()):
            for key, tensor in tensors:
                yield f"{name}:{path}/{key}", tensor


def refusal(error: AdapterZooError) -> str:
    """The cell of what cannot be done."""
    return f"refused: {type(error).__name__}"
