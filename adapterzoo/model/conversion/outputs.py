"""The outputs of a model with one adapter, on given or random inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from adapterzoo.composition import parse
from adapterzoo.errors import ConfigError, in_python
from adapterzoo.model.activation import make_plan
from adapterzoo.model.hf.backbone import text_config
from adapterzoo.model.state import AdaptedModel, token_table

_TOKENS, _SAMPLES, _SEED = 16, 4000, 0


def outputs(
    model: AdaptedModel, adapter: str | None, head: str | None, inputs: Mapping[str, Any]
) -> list[Tensor]:
    """Return all tensors of numbers that a call returns, but the loss, in evaluation mode.

    Args:
        model: with adapters.
        adapter: the only one that acts; None: none does.
        head: the head to use; None: the active one.
        inputs: arguments of the call.
    """
    plan = make_plan(model, parse(adapter), head, ())
    with model._active.entered(plan):
        return plain_outputs(model, inputs)


def plain_outputs(model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Return all tensors of numbers that a call returns, as the model is set.

    Args:
        model: any model of transformers.
        inputs: arguments of the call.
    """
    training, device = model.training, next(model.parameters()).device
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    model.eval()
    try:
        with torch.no_grad():
            found = model(**given, return_dict=True)
    finally:
        model.train(training)
    values = [t for key, t in found.items() if key != "loss" and isinstance(t, Tensor)]
    return [t.cpu().double() for t in values if t.is_floating_point()]


def difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference between outputs of two calls."""
    pairs = zip(some, others, strict=True)
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def check_inputs(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call, if that is what a user gave.

    Raises:
        ConfigError: they have another type.
    """
    if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
        raise ConfigError(
            f"inputs, a {type(inputs).__name__}, does not map names of arguments of a call to "
            f"values. Write inputs={{'input_ids': …}}."
        )
    return inputs


def random_inputs(model: AdaptedModel) -> dict[str, Tensor]:
    """Return the same random inputs each time: one row of tokens, one image, or one sound.

    Raises:
        ConfigError: the model reads something else, or more.
    """
    called = cast("Any", model)
    source = torch.Generator("cpu").manual_seed(_SEED)
    found = _drawn(called, called.main_input_name, token_table(model), source)
    if found is None:
        raise _other(called, f"it reads {called.main_input_name}")
    given = {k: v.to(called.dtype) if v.is_floating_point() else v for k, v in found.items()}
    try:
        outputs(model, None, None, given)
    # a model that reads more raises errors of any kind
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _other(called, " ".join(str(error).split())[:200]) from error
    return given


def _other(model: Any, reason: str) -> ConfigError:
    inputs = f"inputs={{{model.main_input_name!r}: …}}"
    hint = in_python(
        f"Write {inputs}, the arguments of a call.",
        f"Write in Python: model.convert_adapter(…, {inputs}), with the arguments of a call.",
    )
    return ConfigError(
        f"no random inputs can be made for this {type(model).__name__} ({reason}). {hint}"
    )


def _drawn(
    model: Any, main: str, table: torch.nn.Embedding | None, source: torch.Generator
) -> dict[str, Tensor] | None:
    """Return random inputs, if the config has their sizes."""
    config = model.config

    def noise(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=source, device="cpu")

    if main == "input_ids" and table is not None:
        ids = _tokens(text_config(config), table.num_embeddings, source)  # [1, tokens]
        return {main: ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}
    size, channels = (getattr(config, name, None) for name in ("image_size", "num_channels"))
    if main == "pixel_values" and size and channels:
        return {main: noise(channels, *(size if isinstance(size, list | tuple) else (size, size)))}
    bins, frames = (getattr(config, n, None) for n in ("num_mel_bins", "max_source_positions"))
    if main == "input_features" and bins and frames and config.is_encoder_decoder:
        start = torch.tensor([[config.decoder_start_token_id or 0]], device="cpu")
        return {main: noise(bins, 2 * frames), "decoder_input_ids": start}
    if main == "input_values":
        return {main: noise(_SAMPLES)}
    return None


def _tokens(text: Any, count: int, source: torch.Generator) -> Tensor:
    """Return random tokens `[1, tokens]` without padding."""
    positions = getattr(text, "max_position_embeddings", None)
    length = min(_TOKENS, positions - 4) if isinstance(positions, int) else _TOKENS
    special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
    legal = torch.tensor([n for n in range(count) if n not in special], device="cpu")
    ids = legal[torch.randint(len(legal), (1, length), generator=source, device="cpu")]
    end = getattr(text, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < count:
        # BART and T5 classify at the end of the text
        ids[:, -1] = end
    return ids
