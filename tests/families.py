"""Tiny models of the families that every feature is tried on: real classes, random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedConfig

VOCABULARY = 99
HIDDEN = 32

_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_GQA = {
    **_TEXT, "num_key_value_heads": 2, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {**_GQA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 8, "d_ff": 64, "num_layers": 2,
    "num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_VISION = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "image_size": 8, "patch_size": 4,
}  # fmt: skip
_TOWERS = {
    "text_config": {**_TEXT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
                    "projection_dim": 16, },
    "vision_config": {**_VISION, "projection_dim": 16},
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "bert": _TEXT,
    "roberta": {**_TEXT, "pad_token_id": 1},
    "distilbert": {"vocab_size": VOCABULARY, "dim": HIDDEN, "n_layers": 2, "n_heads": 4,
                   "hidden_dim": 64, "max_position_embeddings": 64},
    "deberta-v2": {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "electra": {**_TEXT, "embedding_size": 16},
    "albert": {**_TEXT, "embedding_size": 16},
    "modernbert": {**_TEXT, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2,
                   "bos_token_id": 1, "eos_token_id": 2, "global_attn_every_n_layers": 2},
    "xlm-roberta": {**_TEXT, "pad_token_id": 1},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4,
             "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "gpt_neox": {**_TEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "llama": _GQA,
    "mistral": _GQA,
    "qwen2": _GQA,
    "qwen3": _GQA,
    "gemma2": {**_GQA, "sliding_window": 16},
    "gemma3_text": {**_GQA, "sliding_window": 16},
    "phi3": _GQA,
    "mixtral": _MOE,
    "qwen3_moe": _MOE,
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "whisper": {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
                "suppress_tokens": None, "begin_suppress_tokens": None},
    "vit": _VISION,
    "beit": {**_VISION, "vocab_size": VOCABULARY},
    "dinov2": _VISION,
    "clip": _TOWERS,
    "siglip": _TOWERS,
    "wav2vec2": {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": [16, 16],
                 "conv_kernel": [4, 4], "conv_stride": [4, 4], "num_feat_extract_layers": 2,
                 "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
                 "apply_spec_augment": False, "layerdrop": 0.0},
}  # fmt: skip
# for single tests
OTHERS = {
    "marian": {**_BART, "pad_token_id": 98},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 4},
    "umt5": _T5,
}


def tiny_config(family: str) -> PreTrainedConfig:
    """The config of a two-layer model of the family, width 32."""
    return AutoConfig.for_model(family, **{**FAMILIES, **OTHERS}[family])


def tiny_inputs(family: str, batch: int = 2, tokens: int = 7) -> dict[str, Tensor]:
    """Inputs that the family's base model takes; text has padding in its last row."""
    source = torch.Generator().manual_seed(0)
    if family == "wav2vec2":
        return {"input_values": torch.randn(batch, 160, generator=source)}
    if family == "whisper":
        return {
            "input_features": torch.randn(batch, 8, 32, generator=source),
            "decoder_input_ids": torch.randint(3, VOCABULARY, (batch, tokens), generator=source),
        }
    inputs: dict[str, Tensor] = {}
    if family in {"vit", "beit", "dinov2", "clip", "siglip"}:
        inputs["pixel_values"] = torch.randn(batch, 3, 8, 8, generator=source)
    if family not in {"vit", "beit", "dinov2"}:
        inputs["input_ids"] = torch.randint(3, VOCABULARY, (batch, tokens), generator=source)
        inputs["attention_mask"] = torch.ones(batch, tokens, dtype=torch.long)
        inputs["attention_mask"][-1:, tokens - 2 :] = 0
    if family in {"t5", "mt5", "bart", "mbart"}:
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, 5), generator=source)
    return inputs


def first_output(outputs: Any) -> Tensor:
    """The tensor to compare: hidden states, or the image–text scores of two towers."""
    for name in ("logits_per_image", "last_hidden_state", "logits"):
        if name in outputs and outputs[name] is not None:
            return outputs[name]
    return outputs[0]


def has_sdpa(family: str) -> bool:
    """Whether the installed transformers has sdpa for a family: for T5, older versions do not.

    They compute its attention in the module itself, so that it takes no prefixes.
    """
    kind = AutoModel._model_mapping[type(tiny_config(family))]
    return bool(kind._supports_sdpa)
