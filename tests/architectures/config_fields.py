"""What the fields of transformers' configs mean, by their names.

No model type is named here: a field such as `num_key_value_heads` means the same wherever it
stands.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

# the first pattern that is found in the name decides
_MEANINGS: tuple[tuple[str, str], ...] = (
    (r"type_vocab|vocab_offset|vocab_.*divisible", "kept"),
    (r"vocab", "vocabulary"),
    (r"axial_pos_shape", "sides"),
    (r"num_pos_feats", "half"),
    (r"token_(id|ids|index)$|^_?pad_token|(^|_)(eos|bos|pad|unk|mask|sep)_(index|id)$", "token"),
    (r"image_size|img_size|^resolution$|crop_size|spec_size|pretrain_image", "image"),
    (r"num_position_embeddings", "grid"),
    (r"patch_size|kernel|stride|padding|window_size_per|dilation|ratio|_cost$|temperature", "kept"),
    (r"num_(in_|input_|out_)?channels|in_chans|audio_channels|^in_channels$", "kept"),
    (r"input_channels|num_mel_bins|feature_size|hop_length|n_fft|num_frames", "kept"),
    (r"sampling_rate|sample_rate", "kept"),
    (r"position_embeddings|max_.*positions|n_positions|n_ctx|context_length|max_length", "length"),
    (r"position_buckets|num_buckets|max_distance|rel_pos|max_depth", "kept"),
    (r"sliding_window$|sliding_window_size|local_attention$|attention_chunk_size", "window"),
    (r"_(period|frequency|interval|step|pattern)$|every_n|_interval_|group_size$", "period"),
    (r"_offset$", "offset"),
    (r"layers_per_stage|^depths$|blocks_per_stage|layer_depths|num_blocks|^depths_", "depths"),
    (r"kv_shared_layers|num_nextn", "none"),
    (r"first_k_dense|max_window_layers|num_dense_layers|n_dense_layers", "one"),
    (r"(^|_)(num|n)_.*layers?$|(^|_)layers$|^depth$|_depth$|^n_layers?$|^num_layers_", "layers"),
    (r"experts_per_tok|moe_topk|^top_k$|num_selected_experts|moe_k$|moe_top_k|router_top", "two"),
    (r"shared_experts$", "one"),
    (r"experts?$|expert_num$", "experts"),
    (r"^n_group$|^topk_group$", "one"),
    (r"(key_value|kv)_heads|n_kv|_kv_head|multi_query_group", "key-value heads"),
    (r"head_dim$|dim_head$|^d_kv$|^d_head$|head_size$|kv_channels|_d_head$|head_width", "head"),
    (r"mamba_n_heads|mamba_num_heads", "state heads"),
    (r"heads?$|^n_heads?$|heads_per_stage|attention_heads", "heads"),
    (r"rotary_dim|lora_rank|laurel_rank", "head"),
    (r"num_queries|query_tokens|n_latents|num_latents|query_num", "queries"),
    (r"coordinate_size|shape_size", "width"),
    (r"intermediate|ffn|mlp_dim|d_ff$|d_inner|n_inner|feedforward", "inner"),
    (r"codebook_size|num_embeddings|hash_buckets", "vocabulary"),
    (r"upsample_groups|embd", "width"),
    (r"n_groups$", "one"),
    (r"hidden|dim|width|channels|embed|filters|units|size|d_model|rank|inner", "width"),
)
# numbers of layers, in lists
_INDICES = re.compile(r"indexes$|indices$|_indexes|fullatt|_idxs$|extract_layers|_layers$|_blocks$")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "depth", "n_layers", "encoder_layers")
_STREAMS = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim")
_HEADS = re.compile("num_attention_heads|^n_head|num_heads")


def meaning(name: str) -> str | None:
    """What a field counts, None where its name does not tell."""
    return next((kind for pattern, kind in _MEANINGS if re.search(pattern, name)), None)


def holds_indices(name: str) -> bool:
    """Whether a list of this name holds numbers of layers."""
    return _INDICES.search(name) is not None


def get(config: Any, name: str) -> Any:
    """The value of a field, None where it has none."""
    try:
        return getattr(config, name, None)
    except (AttributeError, RuntimeError):
        # one that differs from layer to layer cannot be asked for
        return vars(config).get(name)


def fields(config: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of all fields."""
    for field in dataclasses.fields(type(config)):
        yield field.name, get(config, field.name)


def is_config(value: Any) -> bool:
    """Whether it is a config of transformers."""
    from transformers import PreTrainedConfig

    return isinstance(value, PreTrainedConfig)


def tree(config: Any) -> Iterator[Any]:
    """The config and those inside it."""
    yield config
    for value in list(vars(config).values()):
        for inner in value if isinstance(value, list | tuple) else [value]:
            if is_config(inner):
                yield from tree(inner)


def are_whole(value: Any) -> bool:
    """Whether a list holds whole numbers, one at least."""
    return bool(value) and all(type(v) is int for v in value)


def has_stages(config: Any) -> bool:
    """Whether the model has stages of several widths."""
    return any(meaning(k) == "depths" and isinstance(v, list | tuple) for k, v in fields(config))


def layers(config: Any) -> int:
    """The number of layers, 0 where it is not said."""
    found = (get(config, name) for name in _LAYERS)
    return next((v for v in found if type(v) is int), 0)


def streams(config: Any) -> Iterator[int]:
    """Widths of the residual stream."""
    for name, value in fields(config):
        if name in _STREAMS and type(value) is int:
            yield value


def heads(config: Any) -> int | None:
    """The number of attention heads, None where it is not one number."""
    found = next((v for k, v in fields(config) if _HEADS.search(k)), None)
    return found if type(found) is int else None


def patch(config: Any) -> int:
    """The side of a patch of an image, 0 where there is none."""
    size = next((v for k, v in fields(config) if k == "patch_size" and v), 0)
    return int(max(size) if isinstance(size, list | tuple) else size)
