"""The facts about a model that heads need, from its config: widths, dropout and pooling."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.models.auto import modeling_auto

from adapterzoo.errors import ConfigError
from adapterzoo.heads import Backbone, HeadConfig, Pooling
from adapterzoo.inject.building import own_parameters

from .task_classes import build_task_head, text_config

# vision models that average patches and normalize the result, with or without a class token
_POOLING_VISION = frozenset({"beit", "data2vec-vision"})
# decoders in name, used as encoders unless config.is_decoder says otherwise
_ENCODERS = frozenset({"bert-generation"})
# relatives of T5 whose config has no scale_decoder_outputs
_SCALING_TIED = frozenset({"switch_transformers", "udop", "umt5"})
_CLASS_TOKENS = frozenset({"cls_token", "class_token", "class_embedding"})


def describe(model: Any) -> Backbone:
    """Return the facts about a model for a new head; its device is that of the last layers.

    Args:
        model: a `PreTrainedModel`.

    Raises:
        ConfigError: the config does not have the width of the hidden states.
    """
    config = model.config
    text = text_config(config)
    # the last parameter: with a device_map, hidden states come from the last layers
    floating = [p for p in own_parameters(model.base_model) if p.is_floating_point()]
    reference = floating[-1] if floating else torch.empty(0)
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    vocab_size = getattr(text, "vocab_size", None)
    if encoder_decoder:
        vocab_size = getattr(config, "decoder_vocab_size", None) or vocab_size
    # OPT projects its last hidden states; CNNs have a width for each stage
    width = _first(text, "word_embed_proj_dim", "hidden_size", "decoder_hidden_size")
    if width is None and (stages := getattr(text, "hidden_sizes", None)):
        width = stages[-1]
    if not isinstance(width, int):
        name = type(model).__name__
        raise ConfigError(f"{name} has hidden_size={width!r}. Write config.hidden_size = ….")
    dropout = _first(text, "classifier_dropout", "hidden_dropout_prob")
    return Backbone(
        hidden_size=width,
        device=reference.device,
        dtype=reference.dtype,
        vocab_size=vocab_size,
        embedding_size=getattr(text, "embedding_size", None),
        dropout=0.0 if dropout is None else dropout,
        layer_norm_eps=getattr(text, "layer_norm_eps", None) or 1e-12,
        init_std=getattr(text, "initializer_range", None) or 0.02,
        pooling=_auto_pooling(model),
        encoder_decoder=encoder_decoder,
        lm_scale=lm_scale(text) if encoder_decoder else None,
        task_head=functools.partial(build_task_head, model),
    )


def ties_output(config: Any, head: HeadConfig) -> bool:
    """Return whether the last layer of a language modeling head is the input embedding.

    Args:
        config: of the model.
        head: config of the head, which takes precedence.
    """
    return head.ties_output(bool(getattr(text_config(config), "tie_word_embeddings", False)))


def lm_scale(text: Any) -> float | None:
    """Return the factor of the hidden states before the output embeddings; T5 has one if tied.

    Args:
        text: config of the decoder.
    """
    scales = getattr(text, "scale_decoder_outputs", None)
    if scales is None and text.model_type in _SCALING_TIED:
        scales = text.tie_word_embeddings
    return text.d_model**-0.5 if scales else None


def _auto_pooling(model: Any) -> Pooling:
    """Return the default pooling of a model.

    Encoders: the first token. Decoders: the last one. Encoder–decoders: the end of the sequence.
    Vision: the class token, or the mean where there is none. Audio: the mean.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "last" if getattr(text_config(config), "eos_token_id", None) is None else "eos"
    if model.main_input_name == "pixel_values":
        if config.model_type in _POOLING_VISION:
            return "pooler"
        names = {name.rpartition(".")[2] for name, _ in model.base_model.named_parameters()}
        return "cls" if names & _CLASS_TOKENS else "mean"
    if model.main_input_name in ("input_values", "input_features"):
        return "mean"
    text = text_config(config)
    types = {config.model_type, text.model_type} - _ENCODERS
    causal = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    } - set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return "last" if getattr(text, "is_decoder", False) or types & causal else "cls"


def plain_token(config: Any) -> int:
    """Return the first token id that is not a special token, such as padding.

    Args:
        config: of a model.
    """
    special: set[object] = set()
    for part in (config, text_config(config)):
        for name, value in vars(part).items():
            if name.endswith(("_token_id", "_token_index", "_token_ids")):
                special.update(value if isinstance(value, (list, tuple)) else (value,))
    return next(token for token in range(len(special) + 1) if token not in special)


def _first(config: Any, *names: str) -> Any:
    return next((v for n in names if (v := getattr(config, n, None)) is not None), None)
