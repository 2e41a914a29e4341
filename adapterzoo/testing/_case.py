"""What a check is, what it is run on (the suite's models, or one of transformers), how it fails."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from adapterzoo.composition import Stack
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import ConfigError, SiteError
from adapterzoo.formats.fit import same_bits as same_bits
from adapterzoo.inject.building import own_parameters
from adapterzoo.model import init
from adapterzoo.registry import Registry

from ._host import ATTENTION, KINDS, VOCABULARY, WIDTH, Host

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ConformanceError(AssertionError):
    """A method fails a check that every method must pass."""


@dataclass(frozen=True)
class Case:
    """A config on one kind of layer, in a dtype, on a device.

    Attributes:
        config: the config to check.
        kind: one of `KINDS`: how the layers of the model are stored.
        dtype: of the model.
        device: of the model.
        margin: how many times as far from float64 a merged model may be as one that is not.
    """

    margin: ClassVar[float] = 2.0

    config: AdapterConfig
    kind: str = "linear"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __str__(self) -> str:
        """Return `linear, float32`, and the device if it is not the CPU."""
        shown = f"{self.kind}, {str(self.dtype).removeprefix('torch.')}"
        return shown if self.device == "cpu" else f"{shown}, {self.device}"

    def model(self) -> Host:
        """Return a new model without adapters."""
        return Host(self.kind, self.device, self.dtype)

    def host(self, *names: str, config: AdapterConfig | None = None) -> Host:
        """Return a model in evaluation mode with new, inactive adapters of these names.

        Equal calls give equal bits.

        Args:
            names: of the adapters.
            config: of the adapters; None: that of the case.
        """
        model = self.model()
        for i, name in enumerate(names):
            self.add(model, name, i, config)
        return model

    def add(
        self, model: Host, name: str, seed: int = 0, config: AdapterConfig | None = None
    ) -> None:
        """Add a new adapter to a model.

        Args:
            model: of `model`.
            name: of the adapter.
            seed: of its initial values.
            config: of the adapter; None: that of the case.
        """
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            model.add_adapter(name, self.fitted(config))

    def trained(self, *names: str, config: AdapterConfig | None = None) -> Host:
        """Return the same with every parameter changed, as if the adapters had been trained."""
        model = self.host(*names, config=config)
        for i, name in enumerate(names):
            stir(model, name, seed=i)
        return model

    def exact(self, *names: str) -> Callable[[Tensor], Tensor]:
        """Return the model with a stack of these adapters in float64, with the same values."""
        model = self.trained(*names).double()
        model.set_active_adapters(Stack(*names))
        return lambda x: run(model, x.double() if x.is_floating_point() else x)

    def silent(self, model: Host) -> frozenset[str]:
        """Return the paths of the modules that no gradient of the output reaches: none here.

        Args:
            model: with its active adapters.
        """
        return frozenset()

    def fitted(self, config: AdapterConfig | None = None) -> AdapterConfig:
        """Return the config, targeting the embedding if that is the kind."""
        config = config or self.config
        if self.kind == "embedding":
            return config.replace(target_modules=("embed_tokens",))
        return config

    def input(self, *batch: int, seed: int = 0) -> Tensor:
        """Return token ids `[*batch]` for embeddings, else hidden states `[*batch, d_model]`."""
        source = torch.Generator().manual_seed(seed)
        if self.kind == "embedding":
            tokens = torch.randint(VOCABULARY, batch, generator=source, device="cpu")
            return tokens.to(self.device)
        hidden = torch.randn((*batch, WIDTH), generator=source, device="cpu", dtype=torch.float32)
        return hidden.to(self.device, self.dtype)


def cases(config: AdapterConfig, kinds: Iterable[str] = KINDS) -> Iterator[Case]:
    """Yield every case on which a config can be checked: kinds × dtypes × devices.

    Kinds that raise a `ConfigError` or `SiteError` for the config are skipped.

    Args:
        config: the config to check.
        kinds: those of `KINDS` to consider.
    """
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    fitting = [kind for kind in kinds if refusal(config, kind) is None]
    # a method of attention alone
    if not fitting and refusal(config, ATTENTION) is None:
        fitting = [ATTENTION]
    for kind in fitting:
        yield from (Case(config, kind, dtype, d) for d in devices for dtype in DTYPES)


@dataclass(frozen=True)
class Check:
    """A named check; call it with a case to raise `ConformanceError` if the case fails.

    Attributes:
        name: in the registry.
        run: the check itself; its docstring states what must hold.
        dtypes: to which it applies.
        kinds: to which it applies.
    """

    name: str
    run: Callable[[Case], None]
    dtypes: tuple[torch.dtype, ...]
    kinds: tuple[str, ...]

    def __call__(self, case: Case) -> None:
        """Run it."""
        self.run(case)

    def wants(self, case: Case) -> bool:
        """Return whether the check applies to the case."""
        kinds = (*self.kinds, ATTENTION) if self.kinds == KINDS else self.kinds
        return case.dtype in self.dtypes and case.kind in kinds


checks: Registry[Check] = Registry("check")
"""Every check by name, in the order in which they run."""


def check(
    *dtypes: torch.dtype, kinds: tuple[str, ...] = KINDS
) -> Callable[[Callable[[Case], None]], Check]:
    """Decorate a function of a case to register it as a check of the same name.

    Args:
        *dtypes: to which it applies; none: float32 only.
        kinds: to which it applies.
    """

    def enter(run: Callable[[Case], None]) -> Check:
        made = Check(run.__name__, run, dtypes or (torch.float32,), kinds)
        return checks.register(run.__name__)(made)

    return enter


def require(holds: bool, otherwise: str) -> None:
    """Raise with a message unless a condition holds.

    Raises:
        ConformanceError: it does not hold.
    """
    if not holds:
        raise ConformanceError(otherwise)


@torch.no_grad()
def run(model: Host, x: Tensor) -> Tensor:
    """Run the model without gradients."""
    out: Tensor = model(x)
    return out


@torch.no_grad()
def stir(model: Host, name: str, seed: int = 0, size: float = 0.1) -> None:
    """Add normal noise to every parameter of an adapter, the same for every dtype and device."""
    source = torch.Generator().manual_seed(1000 + seed)
    for _, module in model.adapter_modules(name):
        for parameter in module.parameters():
            noise = torch.empty(parameter.shape, device="cpu", dtype=torch.float32)
            noise.normal_(0.0, size, generator=source)
            parameter.add_(noise.to(parameter.device, parameter.dtype))


def like(tensor: Tensor, seed: int = 1) -> Tensor:
    """Return random weights for a loss: after a norm, the sum of squares is constant."""
    source = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tensor.shape, generator=source, device="cpu", dtype=torch.float64)
    return drawn.to(tensor.device, tensor.dtype)


def bits(model: Host, name: str) -> dict[str, Tensor]:
    """Copy all tensors of an adapter, by path and key."""
    return {
        f"{path}/{key}": tensor.detach().clone()
        for path, module in model.adapter_modules(name)
        for key, tensor in module.state_dict().items()
    }


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference; infinite for NaN or different shapes."""
    if one.shape != other.shape:
        return float("inf")
    if one.numel() == 0:
        return 0.0
    largest = (one.double() - other.double()).abs().max().item()
    return largest if largest == largest else float("inf")


def refusal(config: AdapterConfig, kind: str) -> str | None:
    """Return why a config does not fit a kind of layer; None if it does, empty if it is left out.

    Args:
        config: the config to place.
        kind: one of `KINDS`.
    """
    # a config that names its layers decides itself about embeddings
    if kind == "embedding" and getattr(config, "target_modules", ()) is not None:
        return ""
    try:
        Case(config, kind, device="meta").host("a")
    except (ConfigError, SiteError) as error:
        return str(error).partition("\n")[0]
    return None


# --- a model of transformers ---

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
    tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
    found = [t.reshape(-1) for t in tensors if t.is_floating_point()]
    return torch.cat(found) if found else torch.zeros(0)


class _OneTensor:
    """Mixin for the class of a model, which then takes `Inputs` and returns one tensor."""

    def __call__(self, x: Inputs, **kwargs: Any) -> Any:
        return flat(seeded(cast("Any", super()).__call__, x))


@dataclass(frozen=True)
class ModelCase(Case):
    """A config on a model of transformers.

    Attributes:
        tiny: the model, which is copied and never changed, and its inputs.
    """

    # rounding errors of a whole model vary: one of the two may be small by chance
    margin: ClassVar[float] = 8.0

    tiny: TinyModel = dataclasses.field(kw_only=True, compare=False, repr=False)

    def __str__(self) -> str:
        """Return the class of the model."""
        return type(self.tiny.model).__name__

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
