"""Tiny models with adapters: what the tests of one method start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from families import tiny_config, tiny_inputs
from snapshots import stir
from torch import Tensor
from transformers import AutoModel

from adapterzoo import init


def made(
    family: str = "bert",
    dtype: torch.dtype = torch.float64,
    *,
    auto: Any = AutoModel,
    fill: Callable[[Any, str, int], None] = stir,
    **configs: Any,
) -> Any:
    """A model in evaluation mode; adapters by name, filled with random numbers, none active."""
    torch.manual_seed(0)
    model = init(auto.from_config(tiny_config(family)).to(dtype).eval())
    for number, (name, config) in enumerate(configs.items()):
        model.add_adapter(name, config)
        fill(model, name, number)
    return model


def hidden(model: Any, **inputs: Any) -> Tensor:
    """The first output without gradients; of the family's own inputs where none are given."""
    with torch.no_grad():
        found: Tensor = model(**(inputs or tiny_inputs(model.config.model_type)))[0]
    return found
