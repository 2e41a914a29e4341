"""The checks that apply to a model of transformers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from adapterzoo.composition import Stack
from adapterzoo.configs import AdapterConfig
from adapterzoo.inject.building import own_parameters
from adapterzoo.model import init

from ._case import Case, like, run
from ._host import Host

# the checks that depend on where an adapter sits; the others concern the method alone
MODEL_CHECKS = (
    "identity_at_birth",
    "inactive_is_base",
    "gradients",
    "merge_equals_forward",
    "take_leaves_no_trace",
)


class Inputs(dict[str, Any]):
    """Keyword arguments of a forward, which the checks pass on as one value."""

    def is_floating_point(self) -> bool:
        """Return whether any of them is."""
        return any(isinstance(v, Tensor) and v.is_floating_point() for v in self.values())

    def double(self) -> Inputs:
        """Return the same in float64."""
        return Inputs(
            {
                name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
                for name, v in self.items()
            }
        )


class TinyModel(NamedTuple):
    """A model and the inputs on which the checks call it.

    Attributes:
        model: in evaluation mode; the checks work on copies.
        inputs: keyword arguments of its forward.
    """

    model: nn.Module
    inputs: Mapping[str, Any]


def seeded(model: Any, inputs: Inputs) -> Any:
    """Call the model with a fixed seed: some models mask or sample even in evaluation."""
    with torch.random.fork_rng(devices=()):
        # the CPU only: torch.manual_seed would also seed GPUs
        torch.default_generator.manual_seed(0)
        return model(**inputs)


def flat(outputs: Any) -> Tensor:
    """Concatenate all floating-point outputs of a model. `[numbers]`."""
    found = [t.reshape(-1) for t in _tensors(outputs) if t.is_floating_point()]
    return torch.cat(found) if found else torch.zeros(0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


class _OneTensor:
    """Mixin for the class of a model, which then takes `Inputs` and returns one tensor."""

    def __call__(self, x: Inputs, **kwargs: Any) -> Any:
        call = cast("Any", super()).__call__
        return flat(seeded(lambda **inputs: call(**inputs), x))


@dataclass(frozen=True)
class ModelCase(Case):
    """A config on a model of transformers.

    Attributes:
        tiny: the model, which is copied and never changed, and its inputs.
    """

    # rounding errors of a whole model vary: one of the two may be small by chance
    margin: ClassVar[float] = 8.0

    tiny: TinyModel = dataclasses.field(
        default=TinyModel(nn.Identity(), {}), compare=False, repr=False
    )

    def __str__(self) -> str:
        """Return the class of the model."""
        return type(self.tiny.model).__name__

    def fitted(self, config: AdapterConfig | None = None) -> AdapterConfig:
        """Return the config."""
        return config or self.config

    def input(self, *batch: int, seed: int = 0) -> Tensor:
        """Return the inputs of the model, for any batch."""
        return cast("Tensor", Inputs(self.tiny.inputs))

    def exact(self, *names: str) -> Callable[[Tensor], Tensor]:
        """Return the model in float64 where it can be: some have parts that are always float32."""
        exact = super().exact(*names)

        def compute(x: Tensor) -> Tensor:
            try:
                return exact(x)
            except RuntimeError:
                stacked = self.trained(*names)
                stacked.set_active_adapters(Stack(*names))
                return run(stacked, x)

        return compute

    def silent(self, model: Host) -> frozenset[str]:
        """Return the paths of the modules whose own weights get no gradient.

        If a module has a matrix, only that counts: a bias gets a gradient even from an input of 0.
        A location of which all modules are silent is among them, as `/<location>`.
        """
        model = copy.deepcopy(model).requires_grad_(True)
        y = model(self.input())
        (y * like(y)).sum().backward()
        found: set[str] = set()
        for path, module in model._backbone.named_modules():
            own = list(own_parameters(module))
            told = [p for p in own if p.dim() > 1] or own
            above = path.rpartition(".")[0]
            if all(p.grad is None or not p.grad.count_nonzero() for p in told) and (
                own or above in found
            ):
                found.add(path)
        at: dict[str | None, list[str]] = {}
        for record in model._adapter_state.records.values():
            for path, placements in record.places.items():
                for placement in placements:
                    at.setdefault(placement.location, []).append(path)
        found |= {f"/{name}" for name, paths in at.items() if name and found.issuperset(paths)}
        return frozenset(found)

    def model(self) -> Host:
        """Return a copy of the model."""
        model: Any = init(copy.deepcopy(self.tiny.model))
        model.__class__ = type(type(model).__name__, (_OneTensor, type(model)), {})
        return cast("Host", model)
