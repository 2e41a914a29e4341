"""The outputs of a model with one adapter, on given or random inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from adapterzoo.composition import parse
from adapterzoo.errors import ConfigError
from adapterzoo.model.activation import make_plan
from adapterzoo.model.hf.backbone import text_config
from adapterzoo.model.state import AdaptedModel, token_table

_TOKENS, _SEED = 16, 0


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
    return [t.double().cpu() for t in values if t.is_floating_point()]


def difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference between outputs of two calls."""
    pairs = zip(some, others, strict=True)
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def random_inputs(model: AdaptedModel) -> dict[str, Tensor]:
    """Return the same random inputs each time: one row of tokens, or one image.

    Raises:
        ConfigError: the model reads something else.
    """
    called = cast("Any", model)
    config, source = called.config, torch.Generator().manual_seed(_SEED)
    text, table = text_config(config), token_table(model)
    main = called.main_input_name
    if main == "input_ids" and table is not None:
        positions = getattr(text, "max_position_embeddings", None)
        length = min(_TOKENS, positions - 4) if isinstance(positions, int) else _TOKENS
        special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
        legal = torch.tensor([n for n in range(table.num_embeddings) if n not in special])
        drawn = torch.randint(len(legal), (1, length), generator=source)
        ids = legal[drawn]  # [1, length]
        end = getattr(text, "eos_token_id", None)
        if isinstance(end, int) and end < table.num_embeddings:
            # BART and T5 classify at the end of the text
            ids[:, -1] = end
        decoder = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
        return {"input_ids": ids, **decoder}
    size, channels = (getattr(config, name, None) for name in ("image_size", "num_channels"))
    if main == "pixel_values" and size and channels:
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        drawn = torch.randn(1, channels, height, width, generator=source)
        return {main: drawn.to(called.dtype)}
    raise ConfigError(
        f"no random inputs can be made for a {type(model).__name__}, which reads {main}. Write "
        f"inputs={{{main!r}: …}}, the arguments of a call."
    )
