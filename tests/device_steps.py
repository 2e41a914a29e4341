"""One step of training a tiny BERT with adapters, and what must hold of it: see `device_modes`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from architectures.small import small
from families import tiny_config, tiny_inputs
from snapshots import of_adapter, same_bits, stir
from torch import Tensor
from torch.distributed.tensor import DTensor

from adapterzoo import AutoAdapterModel
from adapterzoo.config import AdapterConfig, config_strings

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
ROWS = 4
RATE = 0.5

# in units of the dtype's eps: half precision adds up in float32, and so rounds less often
UNITS = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 64, torch.float64: 64}
# a gradient this much smaller than the largest is a difference of larger numbers
SMALLEST = 1 / 64


def _methods() -> dict[str, AdapterConfig]:
    """The package's config strings, the first of each class; unions are made of others."""
    found: dict[type, str] = {}
    for text in config_strings:
        config = None if text == "union" else AdapterConfig.load(small(text))
        kind = type(config)
        if config and len(config.members) == 1 and kind.__module__.startswith("adapterzoo."):
            found.setdefault(kind, text)
    return {text: AdapterConfig.load(small(text)) for text in sorted(found.values())}


METHODS = _methods()


def build(
    method: str, of: torch.dtype, device: str = "cpu", layers: int = 2, **changes: Any
) -> Any:
    """A model with the adapters and heads "a" and "b", born in its dtype; "a" is trained.

    Args:
        method: name of the config.
        of: the dtype.
        device: of the model.
        layers: how many blocks.
        changes: of the config's fields.
    """
    config = tiny_config("bert")
    config.num_hidden_layers = layers
    # the backward pass of eager attention is deterministic; small weights would hide attention
    config._attn_implementation, config.initializer_range = "eager", 0.2
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = AutoAdapterModel.from_config(config).to(device, of)
        for name in ("a", "b"):
            model.add_adapter(name, fitted(METHODS[method]).replace(**changes))
            model.add_classification_head(name, num_labels=3)
            stir(model, name)
    model.train_adapter("a")
    # without dropout, but in the mode that is about it
    return model.eval()


def fitted(config: AdapterConfig) -> AdapterConfig:
    """The config for a width of 32: two units may both be dead, and pass no gradient.

    Without ReLU, whose slope at 0 is chosen by rounding.
    """
    names = {field.name for field in dataclasses.fields(config)}
    changes: dict[str, Any] = {"reduction_factor": 2} if "reduction_factor" in names else {}
    if "non_linearity" in names and config["non_linearity"] == "relu":
        changes["non_linearity"] = "gelu"
    return config.replace(**changes)


def batch(device: str = "cpu") -> dict[str, Tensor]:
    inputs = {**tiny_inputs("bert", batch=ROWS), "labels": torch.arange(ROWS) % 3}
    return {key: value.to(device) for key, value in inputs.items()}


def subject(method: str, of: torch.dtype, device: str = "cpu", **given: Any) -> Any:
    """What `build` makes, to be judged: with the bug, where one is planted."""
    model = build(method, of, device, **given)
    for _, module in model.adapter_modules("a") if _bugs else ():
        cls, bug = type(module), _bugs[-1]

        def forward(self: Any, x: Tensor, base: Any, cls: Any = cls, bug: Any = bug) -> Tensor:
            return bug(self, x, cls.forward(self, x, base))

        module.__class__ = type(f"Planted{cls.__name__}", (cls,), {"forward": forward})
    return model


_bugs: list[Callable[[Any, Tensor, Tensor], Tensor]] = []


@contextlib.contextmanager
def planted(bug: Callable[[Any, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Every model that is judged has a bug.

    Args:
        bug: takes an adapter, its input and its output; returns another output.
    """
    _bugs.append(bug)
    try:
        yield
    finally:
        _bugs.pop()


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step of training leaves to look at.

    Attributes:
        logits: before the step.
        after: logits after it.
        gradients: of every parameter that has one.
        changed: names of the parameters that are not what they were, and of those whose update is
            below the rounding unit.
        wanted: names of the parameters that belong to the trained adapter and head.
    """

    logits: Tensor
    after: Tensor
    gradients: dict[str, Tensor]
    changed: set[str]
    wanted: set[str]

    def of_part(self, index: int, parts: int) -> Step:
        """The same step, with the logits of a part of the batch."""
        logits, after = (t.chunk(parts)[index] for t in (self.logits, self.after))
        return dataclasses.replace(self, logits=logits, after=after)


def is_trained(name: str) -> bool:
    """Whether a parameter of this name belongs to the adapter or the head that is trained."""
    return of_adapter(name, "a") or name.startswith("heads.a.")


def whole(tensor: Tensor) -> Tensor:
    """A copy of all that all processes hold of a tensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def part(inputs: dict[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
    return {key: value.chunk(parts)[index] for key, value in inputs.items()}


def train(model: Any, inputs: dict[str, Tensor], call: Callable[..., Any] | None = None) -> Step:
    """One step of SGD.

    Args:
        model: whose parameters are trained.
        inputs: the batch.
        call: what to call instead of the model, such as its compiled form.
    """
    call = model if call is None else call
    parameters = dict(model.named_parameters())
    before = {name: whole(parameter) for name, parameter in parameters.items()}
    optimizer = torch.optim.SGD([p for p in parameters.values() if p.requires_grad], RATE)
    out = call(**inputs)
    out.loss.backward()
    gradients = {n: whole(p.grad) for n, p in parameters.items() if p.grad is not None}
    optimizer.step()
    after = call(**inputs).logits.detach()
    return Step(
        logits=out.logits.detach(),
        after=after,
        gradients=gradients,
        changed={
            n
            for n, p in parameters.items()
            if not same_bits(before[n], whole(p)) or _rounds_away(before[n], gradients.get(n))
        },
        wanted=set(filter(is_trained, parameters)),
    )


def _rounds_away(value: Tensor, gradient: Tensor | None) -> bool:
    """Whether there is a gradient, and a step leaves each element what it is."""
    if gradient is None or not gradient.any():
        return False
    return same_bits(value - RATE * gradient.to(value.dtype), value)


@functools.lru_cache(maxsize=64)
def truth(method: str, of: torch.dtype, device: str = "cpu", **changes: Any) -> Step:
    """The step of the same model, of the same rounded parameters, in float64."""
    return train(build(method, of, device, **changes).double(), batch(device))


def require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def require_same(
    found: Step, expected: Step, dtype: torch.dtype, units: float, logits: torch.dtype
) -> None:
    """The right parameters were trained, and all numbers are near the expected ones.

    Args:
        found: what is judged.
        expected: the independent truth.
        dtype: whose eps is the unit.
        units: tolerance of gradients; that of logits is half of it; 0: equal bits.
        logits: what the dtype of the logits must be.
    """
    require(found.logits.dtype == found.after.dtype == logits, f"logits: {found.logits.dtype}")
    # four of the head, and one of the adapter at least
    require(len(found.wanted) >= 5, "the adapter or the head has no parameters")
    for what, names in (("gradients", set(found.gradients)), ("changes", found.changed)):
        surplus, missing = sorted(names - found.wanted), sorted(found.wanted - names)
        require(not surplus, f"{what} of what is not trained: {surplus[:2]}")
        require(not missing, f"no {what} of {missing[:2]}")
    tolerance = units * torch.finfo(dtype).eps
    for name in ("logits", "after"):
        _near(name, getattr(found, name), getattr(expected, name), tolerance / 2, 0.0)
    require(found.gradients.keys() == expected.gradients.keys(), "gradients of other parameters")
    largest = max(g.abs().max().item() for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        # the order in which layers add to what they share is not promised
        shared = of_adapter(".".join(name.split(".")[:2]))
        near = max(tolerance, 4 * torch.finfo(dtype).eps) if shared else tolerance
        _near(name, found.gradients[name], gradient, near, SMALLEST * largest)


def _near(name: str, found: Tensor, expected: Tensor, tolerance: float, least: float) -> None:
    """All elements, relative to the largest expected one."""
    require(found.shape == expected.shape, f"{name}: {found.shape}, not {expected.shape}")
    require(bool(found.isfinite().all()), f"{name} is not finite")
    error = (found.double() - expected.double()).abs().max().item()
    allowed = tolerance * max(expected.abs().max().item(), least)
    require(error <= allowed, f"{name} is off by {error:.3g}, {allowed:.3g} is allowed")
