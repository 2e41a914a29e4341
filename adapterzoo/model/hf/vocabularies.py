"""Embeddings for the vocabulary of a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from adapterzoo.errors import ConfigError
from adapterzoo.inject.building import device_of
from adapterzoo.model.heads.embeddings import (
    Waiting,
    biases_of,
    enter,
    find,
    free_place,
    layer_of,
    loaded,
)
from adapterzoo.model.state import DEFAULT_EMBEDDINGS, AdaptedModel

_LOG = logging.getLogger(__name__)
# as adapters draws them
_STD = 0.02


@torch.no_grad()
def add(
    model: AdaptedModel,
    name: str,
    tokenizer: Any,
    reference_embedding: str | None,
    reference_tokenizer: Any,
    embedding_dim: int | None,
) -> None:
    """Add embeddings for the vocabulary of a tokenizer, and activate them.

    Raises:
        ConfigError: an argument is not legal, or does not fit the others.
    """
    layer = free_place(model, name)
    if (reference_embedding is None) != (reference_tokenizer is None):
        raise ConfigError(
            f"reference_embedding={reference_embedding!r} needs the tokenizer of its vocabulary, "
            f"and reference_tokenizer the embeddings. Write both, or neither."
        )
    width = layer.embedding_dim
    if embedding_dim not in (None, width):
        raise ConfigError(
            f"embedding_dim={embedding_dim} is not the width of this model's embeddings, {width}. "
            f"Leave it out."
        )
    vocabulary = _vocabulary(tokenizer, "tokenizer")
    # identifiers may have gaps, so that there are more rows than tokens
    rows = max(len(tokenizer), *(n + 1 for n in vocabulary.values()))
    padding = padding_of(model, tokenizer, rows)
    table = torch.empty(rows, width).normal_(std=_STD)
    if padding is not None:
        table[padding] = 0.0
    made = Waiting(nn.Parameter(table.to(device_of(layer), layer.weight.dtype), False), padding)
    if reference_embedding is not None:
        known = _vocabulary(reference_tokenizer, "reference_tokenizer")
        _copy_rows(model, made, reference_embedding, vocabulary, known)
    enter(model, name, made)
    warn_of_positions(model, tokenizer)


def _copy_rows(
    model: AdaptedModel,
    made: Waiting,
    reference: str,
    vocabulary: Mapping[str, int],
    known: Mapping[str, int],
) -> None:
    """Copy the rows of the tokens that both vocabularies have, and their biases."""
    source = find(model, reference).weight
    if max(known.values()) >= len(source):
        raise ConfigError(
            f"reference_tokenizer has the token number {max(known.values())}, and the embedding "
            f"{reference!r} has {len(source)} rows. Write the tokenizer of {reference!r}."
        )
    shared = [token for token in vocabulary if token in known]
    to = torch.tensor([vocabulary[token] for token in shared], dtype=torch.long)
    of = torch.tensor([known[token] for token in shared], dtype=torch.long, device=source.device)
    made.weight[to.to(source.device)] = source[of].to(made.weight.dtype)
    for key, bias in biases_of(model, reference).items():
        mine = bias.new_zeros(*bias.shape[:-1], len(made.weight))
        mine[..., to.to(bias.device)] = bias[..., of.to(bias.device)]
        made.keep(key, nn.Parameter(mine, False) if isinstance(bias, nn.Parameter) else mine)


def _vocabulary(tokenizer: Any, argument: str) -> dict[str, int]:
    """Return the tokens of a tokenizer with their numbers.

    Raises:
        ConfigError: it has none.
    """
    find = getattr(tokenizer, "get_vocab", None)
    found = find() if callable(find) else None
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(
            f"{argument}={type(tokenizer).__name__}: this is not a tokenizer with a vocabulary. "
            f"Write AutoTokenizer.from_pretrained(…)."
        )
    return dict(found)


def check_tokenizer(tokenizer: Any, rows: int) -> None:
    """Check that a tokenizer has no token without a row.

    Raises:
        ConfigError: it has.
    """
    last = max(_vocabulary(tokenizer, "tokenizer").values())
    if last >= rows:
        raise ConfigError(
            f"the tokenizer has the token number {last}, and the embeddings have {rows} rows. "
            f"Write the tokenizer that they were made for."
        )


def padding_of(model: AdaptedModel, tokenizer: Any, rows: int) -> int | None:
    """Return the token whose row gets no gradient, for models that have one.

    Args:
        model: with adapters.
        tokenizer: None: the model's own padding token is meant.
        rows: of the table.
    """
    own = loaded(model)[DEFAULT_EMBEDDINGS].padding_idx
    if own is None:
        return None
    padding = own if tokenizer is None else getattr(tokenizer, "pad_token_id", None)
    return padding if isinstance(padding, int) and 0 <= padding < rows else None


def warn_of_positions(model: AdaptedModel, tokenizer: Any) -> None:
    """Warn where a model finds padding by a number that is another token of the tokenizer.

    Args:
        model: with adapters.
        tokenizer: of the vocabulary of the embeddings that are active now.
    """
    padding, table = getattr(tokenizer, "pad_token_id", None), layer_of(model).weight
    for module in model._backbone.modules():
        number = vars(module).get("padding_idx")
        tables = (m for m in module.children() if isinstance(m, nn.Embedding))
        # RoBERTa and its relatives count positions, whose table has a row for padding
        counts = [m for m in tables if m.padding_idx == number and m.weight is not table]
        if isinstance(number, int) and counts and number != padding:
            _LOG.warning(
                "This model counts positions by the tokens that are not number %s, and the "
                "tokenizer pads with %s. Pass position_ids.", number, padding,
            )  # fmt: skip
            return
