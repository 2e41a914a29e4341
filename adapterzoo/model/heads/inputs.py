"""The inputs of a base model and its heads: tokens, hidden states, masks and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from adapterzoo.errors import ConfigError, StateError, argument, in_python, listing
from adapterzoo.heads import Pooling, PredictionHead
from adapterzoo.model.hf.backbone import pad_and_eos, text_config


def decoder_labels(
    heads: Mapping[str, PredictionHead], given: Mapping[str, Any], copies: int
) -> Tensor | None:
    """Return the labels from which a decoder's inputs are made; None if no head has any.

    Args:
        heads: the active heads by name.
        given: arguments of `forward`; an argument may be a dict from names of heads to labels.
        copies: how often the batch is repeated, once for each head if `Parallel` is active.

    Returns:
        `[copies · batch, tokens]`.

    Raises:
        ConfigError: heads that share rows have different labels.
    """
    found: list[Tensor] = []
    for name, head in heads.items():
        value = given.get(head.config.decoder_inputs_from or "")
        value = value.get(name) if isinstance(value, Mapping) else value
        found += [] if value is None else [value]
    if not found:
        return None
    if len(found) == copies and len({labels.shape for labels in found}) == 1:
        return torch.cat(found)
    first, *others = found
    if any(labels is not first and not torch.equal(labels, first) for labels in others):
        raise ConfigError(
            f"labels={{…}}: the decoder reads the labels, shifted by one, and {listing(heads)} "
            f"have different ones for the same rows. Write the same labels for all, or "
            f"decoder_input_ids=…."
        )
    return first.repeat(copies, *(1 for _ in first.shape[1:]))  # [copies · batch, tokens]


def shift_labels(model: Any, inputs: dict[str, Any], labels: Tensor | None) -> None:
    """Add the decoder's inputs, the labels shifted by one, unless the caller gave them; in place.

    Args:
        model: an encoder–decoder.
        inputs: of the base model.
        labels: `[rows, tokens]` of a sequence-to-sequence head; None: the encoder's tokens are
            shifted instead.
    """
    if labels is not None:
        inputs.setdefault("use_cache", False)
    source = inputs.get("input_ids") if labels is None else labels
    given = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_input_values")
    if source is None or any(inputs.get(name) is not None for name in given):
        return
    # the family's own method, if its language model has one: mBART moves the language token first
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    inputs["decoder_input_ids"] = _shifted(model.config, source) if own is None else own(source)


def _shifted(config: Any, ids: Tensor) -> Tensor:
    text = text_config(config)
    # a composite config may have its own token: its parts are separate models
    asked = [(config, "decoder_start_token_id"), (text, "decoder_start_token_id"),
             (text, "bos_token_id")]  # fmt: skip
    found = (getattr(place, field, None) for place, field in asked)
    start = next((token for token in found if token is not None), None)
    if start is None:
        raise ConfigError(
            f"decoder_input_ids: {type(config).__name__} has no decoder_start_token_id to begin "
            f"with. Write model(…, decoder_input_ids=…), or set config.decoder_start_token_id."
        )
    shifted = ids.roll(1, dims=-1)
    shifted[:, 0] = start
    pad = getattr(text, "pad_token_id", None)
    return shifted.masked_fill(shifted == -100, start if pad is None else pad)


def head_input(
    model: Any,
    pooling: Pooling | None,
    outputs: ModelOutput,
    attention_mask: Tensor | Mapping[str, Tensor] | None,
    input_ids: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states and the mask for a head.

    Args:
        model: that computed the outputs.
        pooling: of the head; decides what it reads.
        outputs: of the base model.
        attention_mask: `[batch, tokens]`, or any other mask that the model takes, such as one for
            each kind of layer, which `generate` makes for a static cache.
        input_ids: the tokens of the hidden states; None if unknown.

    Raises:
        StateError: the model did not compute what the head needs.
    """
    if pooling == "pooler":
        pooled = outputs.get("pooler_output")
        if pooled is None:
            raise StateError(
                f"use_pooler=True: {type(model.base_model).__name__} has no pooled output. Write "
                f"{in_python('add_classification_head(…, use_pooler=False)', '--pooling cls')}."
            )
        # a CNN's has two more dimensions, of size 1
        return pooled.flatten(1), None  # [batch, d_model]
    hidden = cast("Tensor", outputs["last_hidden_state"])
    if hidden.dim() == 4:
        hidden = hidden.flatten(2).transpose(1, 2)  # [batch, height · width, channels]
    if pooling not in ("mean", "last", "eos"):
        return hidden, _fitting(model, attention_mask, hidden)
    mask = attention_mask
    pad, eos = pad_and_eos(model)
    if mask is None and input_ids is not None and pad is not None and pooling != "mean":
        mask = input_ids != pad
    is_one = mask is None or isinstance(mask, Tensor)
    if pooling == "eos" and input_ids is not None and eos and is_one:
        ends = torch.isin(input_ids, torch.tensor(eos, device=input_ids.device))
        real = torch.ones_like(ends)
        if isinstance(mask, Tensor):
            real = mask.to(ends.device, torch.bool)
        if real.shape == ends.shape:
            ends = ends & real
            # a truncated sequence has no end token: use its last token
            mask = ends.where(ends.any(dim=1, keepdim=True), real)
    fitting = _fitting(model, mask, hidden)
    if mask is not None and fitting is None:
        shown = list(mask.shape) if isinstance(mask, Tensor) else "of each kind of layer"
        raise StateError(
            f"pooling={pooling!r}: the mask {shown} does not say which of the "
            f"{hidden.shape[1]} hidden states {type(model.base_model).__name__} computed are "
            f"padding. Write {argument('pooling', 'cls')}{in_python(' when you add the head')}."
        )
    return hidden, fitting


def _fitting(model: Any, mask: object, hidden: Tensor) -> Tensor | None:
    """Return the mask of the tokens that have hidden states; None if it is unknown."""
    tokens = hidden.shape[1]
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    if mask.shape[1] > tokens:
        # audio models shorten the sequence, and have a method of their own for the mask
        shortened = getattr(model.base_model, "_get_feature_vector_attention_mask", None)
        if shortened is not None:
            return cast("Tensor", shortened(tokens, mask))
        # with a cache the mask includes the past
        return mask[:, -tokens:]
    return mask if mask.shape[1] == tokens else None
