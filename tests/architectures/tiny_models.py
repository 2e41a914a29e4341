"""A tiny model of any model type of transformers, with inputs that it takes."""

from __future__ import annotations

import itertools
import re
import textwrap
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adapterzoo.model.state import is_base
from adapterzoo.testing import TinyModel
from adapterzoo.testing._case import Inputs, flat, seeded

from .meta_inputs import (
    of_codes,
    of_first_layer,
    of_images,
    of_model,
    of_series,
    of_sound,
    without_cache,
)
from .tiny_configs import VOCABULARY, tiny_configs

# special tokens are at both ends of the vocabulary
_FIRST_TOKEN, _LAST_TOKEN = 10, VOCABULARY // 2
# a page is 1000 wide, a tiny model's table of positions is shorter
_PAGE = 60
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
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
    # rare inputs come last: a later config with usual ones may have more kinds of blocks
    configs = ((config, rare) for rare in (False, True) for config in tiny_configs(model_type))
    while True:
        stage, what = 0, "no tiny config"
        try:
            config, rare = next(configs)
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
                inputs, refusal = _taken(model, feeds(model, rare=rare))
                if inputs is not None:
                    return TinyModel(model, inputs)
                failed.append((2, f"{what}{refusal}"))
        except StopIteration:
            break
        except ImportError:
            failed.append((3, "needs a package that is not installed"))
        except Exception as error:  # noqa: BLE001  configs and models refuse in every way
            failed.append((stage, f"{what}{_said(error)}"))
    reason = max(failed, key=lambda f: f[0])[1] if failed else "no tiny config"
    raise NoTinyModelError(reason)


def _said(error: Exception) -> str:
    """Return what an error says, as the end of a reason in a table."""
    text = " ".join(str(error).split()).replace("|", "/").replace("`", "'")
    short = re.split(r"(?<=[a-z)\]'])[.;] | @|: expected|, but got", text)[0]
    return f": {type(error).__name__}: {textwrap.shorten(short, 100, placeholder=' …')}"


def _taken(model: nn.Module, tried: Iterator[Inputs]) -> tuple[Inputs | None, str]:
    """Return inputs from which the model computes finite numbers, or what it says to the most."""
    asked: list[Inputs] = []
    refusals = [(0, "")]
    while (inputs := asked.pop() if asked else next(tried, None)) is not None:
        try:
            with torch.no_grad():
                # some want labels in training
                seeded(_in_training(model), inputs)
                found = flat(seeded(model.eval(), inputs))
        except Exception as error:  # noqa: BLE001  models refuse inputs in every way
            model.eval()
            asked += _with_images(inputs, model, str(error))
            refusals.append((len(inputs), _said(error)))
            continue
        if found.numel() and bool(found.isfinite().all()):
            return inputs, ""
    # of equally many, the first: those are the usual ones
    return None, max(refusals, key=lambda refusal: refusal[0])[1]


def _with_images(inputs: Inputs, model: nn.Module, refusal: str) -> Iterator[Inputs]:
    """Yield the inputs with as many tokens of an image as the model says that it takes."""
    said = re.search(r"tokens: 0, features: (\d+)", refusal)
    token = next(filter(None, (getattr(model.config, name, None) for name in _IMAGE_TOKENS)), None)
    if said is None or token is None or "input_ids" not in inputs:
        return
    count = int(said[1])
    ids = inputs["input_ids"]
    longer = {"input_ids": torch.cat([torch.full((1, count), token), ids], -1)}
    for name, value in inputs.items():
        if name != "input_ids" and value.shape[:2] == ids.shape and not value.is_floating_point():
            # what stands beside each token
            longer[name] = torch.cat([value[:, :1].expand(1, count), value], -1)
    yield Inputs({**inputs, **longer})


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


def feeds(model: nn.Module, seed: int = 0, *, rare: bool = True) -> Iterator[Inputs]:
    """Yield sets of inputs to try for a model's forward.

    Text alone if the model reads text; then everything that it reads; the input of its first layer;
    sounds with time in front; its main input alone; then what few models read: what stands beside
    the main input, sounds and images of other shapes, codes, text without a cache.

    Args:
        model: of real or meta tensors.
        seed: of the values.
        rare: whether to yield what few models read too.
    """
    main = getattr(model, "main_input_name", "input_ids")
    text, every = of_model(model), of_model(model, modal=True)
    turned = {n: v.mT if v.dim() == 3 and "features" in n else v for n, v in every.items()}
    alone = {n: v for n, v in every.items() if n == main or "mask" in n}
    tried: list[list[tuple[str, tuple[int, ...]]]] = []
    usual = (text, every, of_first_layer(model), turned, alone)
    beside = (of_model(model, more=True), of_model(model, modal=True, more=True)) if rare else ()
    kinds = (of_sound, of_images, of_codes, of_series, without_cache) if rare else ()
    for made in itertools.chain(usual, beside, *(kind(model) for kind in kinds)):
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
