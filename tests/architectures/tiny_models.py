"""A tiny model of any model type of transformers, with inputs that it takes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adapterzoo.model.state import is_base
from adapterzoo.testing import TinyModel
from adapterzoo.testing._case import Inputs, flat, seeded

from .meta_inputs import of_first_layer, of_model
from .tiny_configs import VOCABULARY, tiny_configs

# special tokens are at both ends of the vocabulary
_FIRST_TOKEN, _LAST_TOKEN = 10, VOCABULARY // 2
# a page is 1000 wide, a tiny model's table of positions is shorter
_PAGE = 60
_MOST_PARAMETERS = 6_000_000


class NoTinyModelError(Exception):
    """No tiny model of the type can be made; the message says why."""


def tiny_model(model_type: str) -> TinyModel:
    """Return a tiny model with random weights, in evaluation mode, and inputs for it.

    Its config is the default one, made smaller by rules. Equal calls give equal bits.

    Args:
        model_type: as in `config.model_type`, of one that `AutoModel` knows.

    Raises:
        NoTinyModelError: no config gives a model, or the model takes none of the inputs.
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
    raise NoTinyModelError(reason)


def _taken(model: nn.Module) -> Inputs | None:
    """Return inputs from which the model computes finite numbers."""
    for inputs in feeds(model):
        try:
            with torch.no_grad():
                # some want labels in training
                seeded(_in_training(model), inputs)
                found = flat(seeded(model.eval(), inputs))
        except Exception:  # noqa: BLE001  models refuse inputs in every way
            model.eval()
            continue
        if found.numel() and bool(found.isfinite().all()):
            return inputs
    return None


def _in_training(model: nn.Module) -> nn.Module:
    """Set the mode in which adapters are trained: norms keep their statistics."""
    for module in model.train().modules():
        if isinstance(module, _NormBase):
            module.training = False
    return model


@torch.no_grad()
def _enliven(model: nn.Module, seed: int = 0) -> None:
    """Randomise all weights: at their initial values, attention treats all tokens alike."""
    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=source, device="cpu").to(parameter.dtype)
        if parameter.dim() > 1:
            parameter.copy_(noise / max(1, parameter[0].numel()) ** 0.5)
        else:
            parameter.add_(noise, alpha=0.1)


def feeds(model: nn.Module, seed: int = 0) -> Iterator[Inputs]:
    """Yield sets of inputs to try for a model's forward.

    Text alone if the model reads text; then everything that it reads; the input of its first layer;
    sounds with time in front; its main input alone.

    Args:
        model: of real or meta tensors.
        seed: of the values.
    """
    main = getattr(model, "main_input_name", "input_ids")
    text, every = of_model(model), of_model(model, modal=True)
    turned = {n: v.mT if v.dim() == 3 and "features" in n else v for n, v in every.items()}
    alone = {n: v for n, v in every.items() if n == main or "mask" in n}
    tried: list[list[tuple[str, tuple[int, ...]]]] = []
    for made in (text, every, of_first_layer(model), turned, alone):
        shapes = [(name, tuple(value.shape)) for name, value in made.items()]
        if made and shapes not in tried:
            tried.append(shapes)
            source = torch.Generator().manual_seed(seed)
            yield Inputs({name: _filled(name, v, source) for name, v in made.items()})


def _filled(name: str, value: Tensor, source: torch.Generator) -> Tensor:
    if not value.is_meta:
        # numbers that shapes are computed from
        return value
    with torch.device("cpu"):
        if value.is_floating_point():
            return torch.randn(value.shape, generator=source)
        if "mask" in name:
            return torch.ones(value.shape, dtype=value.dtype)
        if name == "bbox":
            # left, top, right, bottom
            return torch.randint(0, _PAGE, value.shape, generator=source).sort().values
        return torch.randint(_FIRST_TOKEN, _LAST_TOKEN, value.shape, generator=source)
