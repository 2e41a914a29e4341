"""Names of the norms around sub-layers, and of other modules between a sub-layer and the stream.

Names are read as paths below the block; a pattern must match the end of the path.
"""

from __future__ import annotations

import re
from typing import Literal

from .names import tail
from .sites import SubLayerKind

NORM_CLASS = re.compile(r"norm", re.IGNORECASE)
# norms of channels, `[batch, d, *places]`, beside those whose `data_format` says so
CHANNEL_NORM_CLASS = re.compile(r"LayerNorm2d$|^(SqueezeBert|VitDet)LayerNorm$")
NORM_NAME = re.compile(r"(norm|(^|_)ln)(_?\d+)?$|^ln_|^norm|layer_?norm", re.IGNORECASE)

# the place of a norm: before its sub-layer, on the sub-layer's output, or after the addition;
# "at": before or after, depending on the style of the block; "after": depending on other norms
NormPosition = Literal["pre", "branch", "post", "at", "after"]

NORM_PLACES: tuple[tuple[re.Pattern[str], NormPosition, SubLayerKind], ...] = (
    (
        tail(
            "input_layernorm", "input_rmsnorm", "layernorm_before", "layer_norm_before",
            r"pre_(?:self_)?(?:attn|attention|sa)_(?:layer_?)?norm", "norm_pre_attn",
            "layernorm_before_attention", "attention_norm", "attn_norm", "operator_norm",
            "norm_self_att", "layer_norm_att", "attention_layernorm", "temporal_pre_norm",
            "norm_mlstm", "q_input_layernorm", "pre_attn_norm", "layernorm1", "^norm",
            "input_latents_norm",
        ),
        "pre",
        "attention",
    ),
    (tail("pre_ca_norm", "pre_cross_attn_layernorm"), "pre", "cross"),
    (
        tail(
            r"pre_(?:feedforward|mlp|ff)_(?:layer_?)?norm", "layernorm_after", "layer_norm_after",
            "feedforward_layernorm", "ffn_norm", "channel_pre_norm", "layernorm_before_ffn",
            "norm_ffn", "mlp_norm", r"norm_feed_forward\d", r"ffn\d_layer_norm", r"layernorm",
        ),
        "pre",
        "mlp",
    ),
    (tail("post_attention_layernorm", "post_attention_rmsnorm", "post_sa_norm"), "after",
     "attention"),
    (tail("post_self_attn_layernorm", "post_norm1", "norm_post_attn", "post_operator_norm"),
     "branch", "attention"),
    (tail("post_cross_attn_layernorm"), "branch", "cross"),
    (tail("post_feedforward_layernorm", "post_mlp_layernorm", "post_norm2", "post_ffn_norm"),
     "branch", "mlp"),
    (tail(r"(?:cross\w*)\.output\.\w*[nN]orm"), "post", "cross"),
    (tail(r"\w*att\w*\.\w*output\.\w*[nN]orm"), "post", "attention"),
    (tail(r"\w*output\w*\.(?:LayerNorm|layer_norm)"), "post", "mlp"),
    (tail(r"\w*(?:encoder_attn|cross)\w*_layer_?norm"), "at", "cross"),
    (tail("self_attn_layer_norm", "sa_layer_norm", "^layer_norm"), "at", "attention"),
    (
        tail(
            "final_layer_norm", "ffn_layer_norm", "ff_layer_norm", "feed_forward_layer_norm",
            "mlp_layer_norm", "output_layer_norm", "full_layer_layer_norm", "final_layernorm",
        ),
        "at",
        "mlp",
    ),
)  # fmt: skip

NUMBERED = re.compile(r"^(?!post)\w*(?:norm|ln)_?[1-4]$")

# norms inside attention or the feed-forward part, which are not on the stream
INNER_NORM = re.compile(
    r"^(q|k|kv|q_a|kv_a|o|v|inner_attn|ffn|attn_sub|ffn_sub|multihead)_|^norm$|expert"
)

# other modules that change a sub-layer's output before the addition: learned gains and short
# convolutions
SCALES: tuple[tuple[re.Pattern[str], SubLayerKind], ...] = (
    (tail("layer_scale1", "self_attn_layer_scale", "post_attention_convolution"), "attention"),
    (tail("layer_scale2", "mlp_layer_scale", "post_mlp_convolution"), "mlp"),
)

# a projection of the stream itself to another width, parallel to attention (Hiera)
WIDENING = re.compile(r"^proj$")
WIDENED = "the residual path beside attention is a projection to another width"

# a norm after the last block: next to the stack, and not part of the embeddings
FINAL_NORM = re.compile(
    r"^(?!.*emb)(?!.*(pre|input))(\w*layer_?norm\w*|\w*norm|ln_f|ln_post|norm_f|final_\w*norm)$",
    re.IGNORECASE,
)
