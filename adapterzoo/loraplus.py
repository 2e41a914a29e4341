"""LoRA+: a higher learning rate for B than for A.

Paper: Hayou et al. 2024, arXiv:2402.12354. As in PEFT, parameters of one dimension (biases,
magnitudes) are trained like B, and those at embeddings have a rate of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .config import Positive, Range
from .contracts import Adapter
from .errors import ConfigError, StateError, names_call

EMBEDDING_RATE = 1e-6


@names_call
def create_loraplus_optimizer(
    model: nn.Module,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    lr: float,
    loraplus_lr_ratio: float,
    loraplus_lr_embedding: float = EMBEDDING_RATE,
    loraplus_weight_decay: float = 0.0,
    **kwargs: Any,
) -> torch.optim.Optimizer:
    """Return an optimizer of the trainable parameters, with the learning rates of LoRA+.

    Args:
        model: with adapters that are trained.
        optimizer_cls: class of the optimizer.
        lr: learning rate of A and of all else.
        loraplus_lr_ratio: the rate of B divided by that of A, from 1.
        loraplus_lr_embedding: the rate of adapters at embeddings.
        loraplus_weight_decay: for parameters with two dimensions or more.
        **kwargs: other arguments of the class.

    Raises:
        ConfigError: a value is not legal.
        StateError: nothing is trained that has an A and a B.
    """
    if "weight_decay" in kwargs:
        raise ConfigError("weight_decay would be ignored. Write loraplus_weight_decay=….")
    Range(0.0, 1e6)("LoRA+", "lr", lr, 1e-4)
    Range(0.0, 1e6)("LoRA+", "loraplus_weight_decay", loraplus_weight_decay, 0.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": loraplus_weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = optimizer_cls([g for g in groups if g["params"]], lr=lr, **kwargs)  # type: ignore[call-arg]
    set_rates(model, optimizer, loraplus_lr_ratio, loraplus_lr_embedding)
    return optimizer


def set_rates(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ratio: float,
    embedding: float = EMBEDDING_RATE,
) -> None:
    """Split the groups of a new optimizer by their learning rates.

    Args:
        model: with adapters.
        optimizer: that has made no step.
        ratio: the rate of B divided by that of A.
        embedding: the rate at embeddings.

    Raises:
        ConfigError: a value is not legal.
        StateError: nothing is trained that has an A and a B.
    """
    Range(1.0, 1e6)("LoRA+", "loraplus_lr_ratio", ratio, 16.0)
    Positive()("LoRA+", "loraplus_lr_embedding", embedding, EMBEDDING_RATE)
    fast, looked_up = _parameters(model)
    if not fast:
        raise StateError("no trained adapter has factors A and B. Leave loraplus_lr_ratio out.")
    split: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        rates: dict[float, list[nn.Parameter]] = {}
        for p in group["params"]:
            times = ratio if id(p) in fast or p.dim() == 1 else 1.0
            rate = embedding if id(p) in looked_up else group["lr"] * times
            rates.setdefault(rate, []).append(p)
        split += [{**group, "params": params, "lr": rate} for rate, params in rates.items()]
    optimizer.param_groups[:] = split


def _parameters(model: nn.Module) -> tuple[set[int], set[int]]:
    """Return the trained parameters like B, and those at embeddings, by `id`."""
    fast: set[int] = set()
    looked_up: set[int] = set()
    for adapter in (module for module in model.modules() if isinstance(module, Adapter)):
        own = {name: p for name, p in adapter.named_parameters() if p.requires_grad}
        fast |= {id(p) for name, p in own.items() if name in adapter.learns_faster}
        if adapter.at_embedding:
            looked_up |= {id(p) for p in own.values()}
    return fast, looked_up
