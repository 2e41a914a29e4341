"""What every method computes in every composition, in float64: outputs and gradients.

A cell holds, for the output and for the gradients of the parameters of each name, the norm and a
sum with fixed weights. Training, evaluation and evaluation without gradients are computed each.
Nothing is dropped, so that they agree; if one does not, its values stand in the cell beside those
of training.

Other processors, vector units and kernels change these sums by less than 1e-12 of their norm, and
the table holds 12 digits. `TOLERANCE` is well above that and far below what an operation in single
precision would change.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from adapterzoo import Average, BatchSplit, Fuse, MultiTask, Parallel, Split, Stack
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import AdapterZooError
from adapterzoo.methods.fusion import fusion_configs

from .methods import add, fill, filled, methods, numbers, refusal, tensors_of

TOLERANCE = 1e-9
# rows and tokens; layers with up to 2¹⁴ values have ways of their own
SIZES = {"few": (4, 5), "many": (12, 44)}

Setup = Callable[[int, int], Any]
COMPOSITIONS: dict[str, Setup] = {
    "single": lambda rows, tokens: "a",
    "Stack": lambda rows, tokens: Stack("a", "b"),
    "Average": lambda rows, tokens: Average("a", "b", weights=[0.75, 0.25]),
    "Parallel": lambda rows, tokens: Parallel("a", "b"),
    "Split": lambda rows, tokens: Split("a", "b", splits=[2, tokens - 2]),
    "BatchSplit": lambda rows, tokens: BatchSplit("a", None, "b", batch_sizes=[1, 1, rows - 2]),
    "MultiTask": lambda rows, tokens: MultiTask("a", "b"),
    "mixed rows": lambda rows, tokens: Parallel("a", "b"),
    **{
        f"Fuse {kind}": lambda rows, tokens, kind=kind: Fuse("a", "b", name=kind)
        for kind in fusion_configs
    },
}
# what the forward is given beside its inputs
ARGUMENTS: dict[str, Setup] = {
    "MultiTask": lambda rows, tokens: {"task_ids": [i % 3 % 2 for i in range(rows)]},
    "mixed rows": lambda rows, tokens: {
        "adapter_names": [("b", None, "a", "a")[i % 4] for i in range(rows)]
    },
}


def rows() -> dict[str, Callable[[], dict[str, Any]]]:
    """The rows of the table, to be computed."""
    return {name: functools.partial(compute, config) for name, config in methods().items()}


def compute(config: AdapterConfig) -> dict[str, Any]:
    """The cells of a method."""
    model = filled("bert", torch.float64)
    found: dict[str, Any] = {}
    trained: Any = None
    for name, compose in COMPOSITIONS.items():
        for size, (rows, tokens) in SIZES.items():
            setup = compose(rows, tokens)
            arguments = ARGUMENTS[name](rows, tokens) if name in ARGUMENTS else {}
            try:
                if setup != trained:
                    train(model, config, setup)
                    trained = setup
                cell = run(model, {**inputs_of(rows, tokens), **arguments})
            except AdapterZooError as error:
                cell = refusal(error)
            found[f"{name}, {size}"] = cell
    return found


def inputs_of(rows: int, tokens: int) -> dict[str, Any]:
    """Text with padding at the end of its last row."""
    i = torch.arange(rows * tokens).view(rows, tokens)
    mask = torch.ones_like(i)
    mask[-1, -2:] = 0
    return {"input_ids": (7 * i * i + 3 * i) % 90 + 5, "attention_mask": mask}


def train(model: Any, config: AdapterConfig, setup: Any) -> None:
    """Train all that a setup names; what the model does not have is added."""
    for name in "ab":
        if name not in model.adapters_config:
            add(model, name, config)
    if not isinstance(setup, Fuse):
        model.train_adapter(setup)
        return
    if setup.name not in model.adapters_config.fusions:
        model.add_adapter_fusion(setup, setup.name)
        fill(tensors_of(setup.name, model.fusion_modules(setup.name)))
    model.train_adapter_fusion(setup, unfreeze_adapters=True)


def run(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A cell; what a mode computes otherwise than training stands beside it."""
    found: dict[str, Any] = {}
    for mode in ("train", "eval", "no grad"):
        model.train(mode == "train")
        with torch.set_grad_enabled(mode != "no grad"):
            y = model(**inputs)[0]
        cell = {"output": sums([("output", y.detach())])}
        if mode != "no grad":
            (y * numbers(y.shape, "loss")).sum().backward()
            cell |= gradients(model)
        for name, value in cell.items():
            if mode == "train" or not same(found.get(name), value):
                found[name if mode == "train" else f"{name}, {mode}"] = value
    return found


def gradients(model: Any) -> dict[str, list[float]]:
    """The sums of all gradients by the last name of the parameter; they are taken away."""
    own = {name: model.adapter_modules(name) for name in model.adapters_config}
    own |= {name: model.fusion_modules(name) for name in model.adapters_config.fusions}
    keys = {id(t): key for name, modules in own.items() for key, t in tensors_of(name, modules)}
    groups: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            key = keys.get(id(parameter), "base model")
            groups[re.split("[./]", key)[-1]].append((key, parameter.grad))
            parameter.grad = None
    return {name: sums(tensors) for name, tensors in sorted(groups.items())}


def sums(tensors: list[tuple[str, Tensor]]) -> list[float]:
    """The norm of all tensors together, and their sum with weights."""
    norm = sum(t.square().sum().item() for _, t in tensors) ** 0.5
    return [norm, sum((t * numbers(t.shape, key)).sum().item() for key, t in tensors)]


def same(stored: Any, found: Any) -> bool:
    """Whether two entries are equal: sums, of which the first is the norm, up to rounding."""
    if not (is_sums(stored) and is_sums(found)):
        return bool(stored == found)
    allowed = TOLERANCE * max(stored[0], found[0])
    return all(abs(a - b) <= allowed for a, b in zip(stored, found, strict=True))


def is_sums(value: Any) -> bool:
    """Whether an entry is what `sums` returns."""
    return isinstance(value, list) and len(value) == 2 and all(type(x) is float for x in value)
