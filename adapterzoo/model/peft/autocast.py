"""PEFT's `autocast_adapter_dtype`: adapters of layers in half precision have float32 parameters.

As in PEFT, copies of layers (`modules_to_save`, norms, heads) and biases keep the dtype of theirs.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from adapterzoo.configs import AdapterConfig, ConfigUnion
from adapterzoo.errors import ConfigError
from adapterzoo.model.activation import replan
from adapterzoo.model.adapters import make
from adapterzoo.model.state import AdaptedModel, modules_of

_HALF = (torch.float16, torch.bfloat16)


def check(flag: object) -> None:
    """Check the switch.

    Raises:
        ConfigError: it is not a bool.
    """
    if not isinstance(flag, bool):
        raise ConfigError(
            f"autocast_adapter_dtype={flag!r} is not True or False. Write "
            f"autocast_adapter_dtype=True."
        )


def widened(model: AdaptedModel, config: AdapterConfig) -> AdapterConfig:
    """Return the config with float32 parameters over layers in half precision.

    A `dtype` that the config names is kept.

    Args:
        model: that gets, or has, the adapter.
        config: of the adapter.
    """
    if not any(p.dtype in _HALF for p in model._backbone.parameters()):
        return config
    members = [
        c.replace(dtype="float32") if "dtype" in c.field_names() and c["dtype"] is None else c
        for c in config.members
    ]
    return members[0] if len(members) == 1 else ConfigUnion(*members)


def widen(model: AdaptedModel, name: str) -> None:
    """Convert the parameters of an adapter that was loaded as those of a new one would be."""
    record = model._adapter_state.find(name)
    config = widened(model, record.config)
    if config == record.config:
        return
    made = make(model, config, torch.device("meta"))
    modules = dict(modules_of(model, name))
    for path, like in made.coming.items():
        own = _tensors(modules[path])
        for key, tensor in _tensors(like).items():
            own[key].data = own[key].data.to(tensor.dtype)
    model._adapter_state.records[name] = dataclasses.replace(
        record, config=config, places={**record.places, **made.places}
    )
    replan(model)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
