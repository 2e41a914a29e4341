"""What a check is, what it is run on, and how it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adapterzoo.composition import Stack
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import ConfigError, SiteError
from adapterzoo.formats.digest import same_bits as same_bits
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
    fitting = [kind for kind in kinds if _fits(Case(config, kind, device="meta"))]
    # a method of attention alone
    if not fitting and _fits(Case(config, ATTENTION, device="meta")):
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


def fields_of(config: AdapterConfig) -> set[str]:
    """Return the names of a config's fields."""
    return {f.name for f in dataclasses.fields(config)}


def _fits(case: Case) -> bool:
    # a config that names its layers decides itself about embeddings
    if case.kind == "embedding" and getattr(case.config, "target_modules", ()) is not None:
        return False
    try:
        case.host("a")
    except (ConfigError, SiteError):
        return False
    return True
