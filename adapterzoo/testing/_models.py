"""A tiny model of any model type of transformers, and the checks on it."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adapterzoo.composition import Stack
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import ConfigError
from adapterzoo.inject.building import own_parameters
from adapterzoo.model import init
from adapterzoo.model.state import is_base

from ._case import Case, like, run
from ._feed import Inputs, feeds
from ._host import Host
from ._tiny import tiny_configs

# the checks that say something about where an adapter sits; the others are of the method alone
MODEL_CHECKS = (
    "identity_at_birth",
    "inactive_is_base",
    "gradients",
    "merge_equals_forward",
    "take_leaves_no_trace",
)
_MOST_PARAMETERS = 6_000_000


class TinyModel(NamedTuple):
    """A model and what its forward is called with."""

    model: nn.Module
    inputs: Inputs


def tiny_model(model_type: str) -> TinyModel:
    """A tiny model of a type with random weights, in evaluation, and inputs that it takes.

    Its config is the default one, made smaller by rules. Equal calls give equal bits.

    Args:
        model_type: as in `config.model_type`, of one that `AutoModel` knows.

    Raises:
        ConfigError: no config could be made that gives a model, or no inputs that it takes.
    """
    from transformers import AutoModel

    failed: list[tuple[int, str]] = []
    configs = tiny_configs(model_type)
    while True:
        stage, what = 0, "no tiny config"
        try:
            config = next(configs)
            stage, what = 1, "not built from a tiny config"
            config._experts_implementation = "eager"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with torch.device("meta"):
                    size = sum(p.numel() for p in AutoModel.from_config(config).parameters())
                if size > _MOST_PARAMETERS:
                    failed.append((1, "its smallest config has millions of parameters"))
                    continue
                with torch.random.fork_rng(devices=()), torch.device("cpu"):
                    torch.manual_seed(0)
                    model = AutoModel.from_config(config).eval().requires_grad_(False)
                if not is_base(model):
                    # what AutoModel gives has a head (Higgs Audio), which is trained with adapters
                    model = model.base_model
                _enliven(model)
                stage, what = 2, "no inputs found that it takes"
                if (inputs := _taken(model)) is not None:
                    return TinyModel(model, inputs)
                failed.append((2, what))
        except StopIteration:
            break
        except ImportError:
            failed.append((3, "needs a package that is not installed"))
        except Exception as error:  # noqa: BLE001  configs and models refuse in every way
            failed.append((stage, f"{what}: {type(error).__name__}"))
    reason = max(failed, key=lambda f: f[0])[1] if failed else "no tiny config"
    raise ConfigError(
        f"tiny_model({model_type!r}): {reason}. Make the model from a config of your own, and "
        f"write report_on(TinyModel(model, inputs), …)."
    )


def _taken(model: nn.Module) -> Inputs | None:
    """Inputs that the model computes finite numbers from."""
    for inputs in feeds(model):
        try:
            with torch.no_grad():
                # some want labels in training
                _seeded(_in_training(model), inputs)
                found = _flat(_seeded(model.eval(), inputs))
        except Exception:  # noqa: BLE001  models refuse inputs in every way
            model.eval()
            continue
        if found.numel() and bool(found.isfinite().all()):
            return inputs
    return None


def _in_training(model: nn.Module) -> nn.Module:
    """The model as adapters are trained on it: norms keep their statistics."""
    for module in model.train().modules():
        if isinstance(module, _NormBase):
            module.training = False
    return model


@torch.no_grad()
def _enliven(model: nn.Module, seed: int = 0) -> None:
    """Give all weights values that matter: as initialised, attention sees all tokens alike."""
    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=source, device="cpu").to(parameter.dtype)
        if parameter.dim() > 1:
            parameter.copy_(noise / max(1, parameter[0].numel()) ** 0.5)
        else:
            parameter.add_(noise, alpha=0.1)


def _seeded(model: Any, inputs: Inputs) -> Any:
    """The outputs; some models mask or sample at random, in evaluation too."""
    with torch.random.fork_rng(devices=()):
        # of the CPU alone: torch.manual_seed also notes down for GPUs where it was called
        torch.default_generator.manual_seed(0)
        return model(**inputs)


def _flat(outputs: Any) -> Tensor:
    """All that a model computes, one after the other. `[numbers]`."""
    found = [t.reshape(-1) for t in _tensors(outputs) if t.is_floating_point()]
    return torch.cat(found) if found else torch.zeros(0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


class _OneTensor:
    """Mixed into the class of a model: it takes `Inputs`, and gives one tensor."""

    def __call__(self, x: Inputs, **kwargs: Any) -> Any:
        call = cast("Any", super()).__call__
        return _flat(_seeded(lambda **inputs: call(**inputs), x))


@dataclass(frozen=True)
class ModelCase(Case):
    """A config on a model of transformers.

    Attributes:
        tiny: the model, which is copied and never changed, and its inputs.
    """

    # two roundings of a whole model are two draws, of which one may be lucky
    margin: ClassVar[float] = 8.0

    tiny: TinyModel = dataclasses.field(
        default=TinyModel(nn.Identity(), Inputs()), compare=False, repr=False
    )

    def __str__(self) -> str:
        """For messages: the class of the model."""
        return type(self.tiny.model).__name__

    def host(self, *names: str, config: AdapterConfig | None = None) -> Host:
        """A copy of the model with fresh adapters of these names, none of them active."""
        model = self._copy()
        for i, name in enumerate(names):
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(i)
                model.add_adapter(name, config or self.config)
        return cast("Host", model)

    def fitted(self, config: AdapterConfig | None = None) -> AdapterConfig:
        """The config."""
        return config or self.config

    def input(self, *batch: int, seed: int = 0) -> Tensor:
        """The inputs of the model, whatever the batch."""
        return cast("Tensor", self.tiny.inputs)

    def exact(self, *names: str) -> Callable[[Tensor], Tensor]:
        """The model in float64, as far as it can be: some have parts that are always float32."""
        exact = super().exact(*names)
        stacked = self.trained(*names)
        stacked.set_active_adapters(Stack(*names))

        def compute(x: Tensor) -> Tensor:
            try:
                return exact(x)
            except RuntimeError:
                return run(stacked, x)

        return compute

    def silent(self, model: Host) -> frozenset[str]:
        """Paths of the modules that no gradient reaches, by the gradients of their own weights.

        A matrix tells, where a module has one: a bias gets a gradient although what comes in is 0.
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
        return frozenset(found)

    def _copy(self) -> Any:
        model: Any = init(copy.deepcopy(self.tiny.model))
        model.__class__ = type(type(model).__name__, (_OneTensor, type(model)), {})
        return model
