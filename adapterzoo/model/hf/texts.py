"""Embeddings of a text, by a model's tokenizer and table of tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.errors import ConfigError


def embedded_text(model: Any, table: nn.Module, text: str) -> Tensor:
    """Return the embeddings `[tokens, d]` of a text.

    Args:
        model: its config names the checkpoint with the tokenizer.
        table: the embedding layer.
        text: any text.

    Raises:
        ConfigError: there is no tokenizer, or the text has no tokens.
    """
    # importing tokenizers takes a tenth of all imports, and most models need none
    from transformers import AutoTokenizer

    name = getattr(model.config, "_name_or_path", "")
    try:
        ids = AutoTokenizer.from_pretrained(name)(text)["input_ids"] if name else []
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer of {name!r} was not found ({error}). Save one there: "
            f"tokenizer.save_pretrained({name!r})."
        ) from error
    if not ids:
        raise ConfigError(
            f"the text has no tokens; the tokenizer is that of "
            f"model.config._name_or_path={name!r}. Load the model from a folder with a tokenizer."
        )
    weight = cast("Tensor", table._parameters["weight"])
    with torch.no_grad():
        return cast("Tensor", table(torch.tensor(ids, device=weight.device)))  # [tokens, d]
