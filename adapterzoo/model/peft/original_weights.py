"""New values for an adapter from the weights that its layers had before quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from adapterzoo.contracts import WeightPlan
from adapterzoo.errors import ConfigError
from adapterzoo.model.activation import refuse_merged
from adapterzoo.model.adapters import init_values
from adapterzoo.model.hf.original_weights import collected
from adapterzoo.model.sharding import refuse_if_sharded
from adapterzoo.model.state import AdaptedModel, base_prefix, modules_of


def compensate(
    model: AdaptedModel,
    name: str,
    fields: Mapping[str, Any],
    source: Any,
    keeps: Callable[[Any, str], bool] | None,
) -> None:
    """Give an adapter initial values that need the original weights.

    Args:
        model: quantized, with the adapter.
        name: of the adapter.
        fields: of its config, that ask for these values.
        source: of the weights, see `collected`.
        keeps: called with the model and the name of each layer; whether its new values stay.

    Raises:
        ConfigError: no layer is quantized, a weight is missing, or there are no such values.
        StateError: the adapter is merged.
    """
    config = model._adapter_state.find(name).config
    refuse_merged(model, name)
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    if fields.keys() - config.field_names():
        raise ConfigError(
            f"{name!r} is {config!r}, which has no initial values that make up for quantization. "
            f"Write LoRAConfig(…) for the adapter."
        )
    plan = cast("WeightPlan", config.replace(**fields).init_plan(model.anatomy))
    modules: Mapping[str, Any] = dict(modules_of(model, name))
    start = base_prefix(model)
    for path, weight in collected(model, plan, source).items():
        module = modules[path]
        before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
        init_values(model, path, module, weight)
        if keeps is not None and not keeps(model, start + path):
            with torch.no_grad():
                for key, tensor in module.state_dict(keep_vars=True).items():
                    tensor.copy_(before[key])
