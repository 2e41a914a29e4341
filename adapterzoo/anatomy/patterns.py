"""The tables of anatomy: usual names of layers and norms, and the architectures that differ.

Names are read as paths relative to the block, e.g. `attention.self.query`. A pattern must match the
end of the path; dimensions then confirm it. `ARCHITECTURES` lists the architectures that differ,
`NO_ENTRY` and `NO_TOKENS` the models, by `config.model_type`, without a site at the first block or
at the embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .sites import Role, SubLayerKind
from .tree import tail

NORM_CLASS = re.compile(r"norm", re.IGNORECASE)
# norms over channels, `[batch, d, *places]`, besides those whose `data_format` says so
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
    r"^(q|k|kv|q_a|kv_a|o|v|dt|b|c|inner_attn|ffn|attn_sub|ffn_sub|multihead)_|^norm$|expert"
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


# layers that steer, gate, route or encode positions have no role, whatever their last name
ASIDE = re.compile(
    r"(^|\.)(\w*indexer|compressor|forget_gate|router\w*|gateway|altup|laurel|ple_block|\w+_hc"
    r"|\w*rel\w*_pos\w*|relative\w*|continuous_position_bias_mlp|adapter_modules"
    r"|\w+_adapter_list|mamba|lconv1d|conv|conv_module|ada_rms_norm|\w*norm|gate|downsample"
    r"|per_layer_\w+|\w+_sconv|shared_expert_gate|prompt_encoder|bottleneck)(\.|$)"
)

# input projections of attention: these names are unambiguous and show where attention is
ATTENTION_IN: tuple[tuple[Role, re.Pattern[str]], ...] = (
    (
        "query",
        tail(
            "q", "query", "q_proj", "query_proj", "q_lin", "linear_q", "to_q", "to_query",
            "project_q", "projection_query", "Wq", "q_b_proj", "queries", "query_key", "q_attn",
        ),
    ),
    (
        "key",
        tail(
            "k", "key", "k_proj", "key_proj", "k_lin", "linear_k", "to_k", "to_key",
            "project_k", "projection_key", "Wk",
        ),
    ),
    (
        "value",
        tail(
            "v", "value", "v_proj", "value_proj", "v_lin", "linear_v", "to_v", "to_value",
            "project_v", "projection_value", "Wv",
        ),
    ),
    (
        "qkv",
        tail(
            "qkv", "qkv_proj", "c_attn", "Wqkv", "query_key_value", "att_proj", "in_proj_qkvz?",
            "queries_keys_values", "keys_values", "to_kv", "kv_proj", "kv_b_proj",
            r"attention\.self\.in_proj",
        ),
    ),
)  # fmt: skip

# output projections of attention, searched only in modules with attention; the first match wins
ATTENTION_OUT: tuple[re.Pattern[str], ...] = (
    tail("o", "o_proj", "o_b_proj", "out_proj", "out_lin", "linear_out", "to_out", "attention_out",
          "Wo", "wo", "c_proj", "projection_layer", "output_proj", "final"),
    tail("output", r"\w*output\.dense", "projection", "dense", "proj", "post"),
)  # fmt: skip

# the projections of a mixer, a module that convolves each channel over time: state-space
# models, recurrences, gated convolutions
MIXER: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("mixer_in", tail("in_proj", "linear_x", "linear_y", "linear_start", "pointwise_lin1")),
    ("mixer_out", tail("out_proj", "linear_out", "linear_end", "pointwise_lin2")),
)

# the feed-forward part, searched only outside attention
MLP: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("mlp_gate", tail("gate_proj", "w1", "wi_0", r"w_in\.w_0", "proj_up_gate")),
    (
        "mlp_in",
        tail(
            "fc1", "fc1.proj", "up_proj", "gate_up_proj", "lin1", "linear1", "c_fc", "fc_in",
            "dense_h_to_4h", "wi", "wi_1", "w3", "Wi", "linear_fc1", "proj_in", "dense1", "in_proj",
            "ffn", r"\w*intermediate\w*\.dense", "intermediate", "intermediate_dense",
            "ffw_layer_1", r"w_in\.w_1", r"\w+_inter\.dense", r"dense\.dense", "input_linear",
            "proj_up", "linear_up", r"(?:mlp|ffn?)\.0", r"(?:mlp|ffn?)\.layers\.0",
        ),
    ),
    (
        "mlp_out",
        tail(
            "fc2", "down_proj", "lin2", "linear2", "c_proj", "fc_out", "dense_4h_to_h", "wo", "w2",
            "Wo", "linear_fc2", "proj_out", "dense2", "out_proj", "ffn_output", "output",
            r"\w*output\w*\.dense", "output_dense", "ffw_layer_2", "w_out", "output_linear",
            "proj_down", "linear_down", r"(?:mlp|ffn?)\.[23]", r"(?:mlp|ffn?)\.layers\.1",
        ),
    ),
)  # fmt: skip

# names of fused projections of attention → a layout of `blocks._slices`
FUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (tail("query_key_value", r"attention\.self\.in_proj"), "q, k, v per head"),
    (tail("in_proj_qkv"), "q, k, v of linear attention"),
    (tail("in_proj_qkvz"), "q, k, v, z per head"),
    (tail("kv_b_proj"), "k, v per head"),
    (tail("to_kv", "kv_proj"), "k, v"),
    (tail("queries_keys_values", "keys_values"), "levit"),
    (tail("qkv", "qkv_proj", "c_attn", "Wqkv", "att_proj", "in_proj_weight"), "q, k, v"),
)

# parameters that hold the weights of all experts of a layer in one tensor
EXPERTS: Mapping[str, Role] = {
    "gate_up_proj": "mlp_in",
    "up_proj": "mlp_in",
    "gate_proj": "mlp_gate",
    "down_proj": "mlp_out",
}

CROSS = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Row:
    """How one architecture differs from the patterns.

    Keys of the mappings are regular expressions for whole paths relative to the block.

    Attributes:
        roles: layer → role.
        absent: roles that a block may lack because the values come from elsewhere.
        functional: layers whose weights the model reads without calling the layer.
        overwritten: layers whose output the model changes in place.
        experts: module with a 3-D `weight` that holds all experts → role.
        layouts: fused layer → name of a layout in `blocks._slices`.
        post_norm: whether ambiguous norms follow the addition, or the name of the config flag that
            says so, with `!` in front if the flag means the opposite.
        norms: norm → its place and sub-layer; None if it is not on the stream.
        outs: output projection → path of the module whose output is added instead; empty for none.
        lists: names of parallel lists that hold the parts of the blocks, if a block is not a
            module.
        mixed: sub-layers whose source reads more than the stream; `note` says what it reads.
        apart: sub-layers whose output is not simply added to the stream; `note` says how.
        states: what a block's output is, if not one state for each token of each row.
        languages: the module that ends with language adapters.
        outside: whether the class only looks like a block.
        note: why there are no stream sites, or an explanation of `mixed` and `apart`.
    """

    roles: Mapping[str, Role] = field(default_factory=dict)
    absent: frozenset[Role] = frozenset()
    functional: str | None = None
    overwritten: str | None = None
    experts: Mapping[str, Role] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    post_norm: bool | str | None = None
    norms: Mapping[str, tuple[NormPosition, SubLayerKind] | None] = field(default_factory=dict)
    outs: Mapping[str, str] = field(default_factory=dict)
    lists: tuple[str, ...] = ()
    mixed: frozenset[SubLayerKind] = frozenset()
    apart: frozenset[SubLayerKind] = frozenset()
    states: str = ""
    languages: str = ""
    outside: bool = False
    note: str = ""


_FIRST = "[tokens, rows, d_model]"
_BRANCH_NORMS = Row(
    norms={"layernorm_before": ("branch", "attention"), "layernorm_after": ("branch", "mlp")}
)
_BOTH: frozenset[SubLayerKind] = frozenset({"attention", "mlp"})
_HYPER = Row(
    states="several residual streams",
    layouts={r"self_attn\.kv_proj": "k = v"},
    apart=_BOTH,
    note="hyper-connections: several residual streams, mixed by learned weights",
)
_HYPER_WIDE = Row(
    states="several residual streams, side by side",
    note="hyper-connections: several residual streams side by side, mixed by learned weights",
)
_SHARED_BLOCK = Row(
    apart=_BOTH, note="the shared attention block only adds to what the next Mamba layer reads"
)
_ATTENTION: frozenset[SubLayerKind] = frozenset({"attention", "cross"})
_OVERWRITTEN_QUERY = Row(overwritten=r".*\.query(_global)?")
_QUERIES = Row(post_norm=True, mixed=_ATTENTION, note="attention reads the stream plus positions")
_LW_DETR = Row(
    norms={r"layer_norm": ("at", "mlp")}, post_norm=True, mixed=_ATTENTION, note=_QUERIES.note
)
_GROUNDING = Row(
    norms={
        r"text_enhancer_layer\.layer_norm_before": ("post", "attention"),
        r"text_enhancer_layer\.layer_norm_after": ("post", "mlp"),
        r"deformable_layer\.self_attn_layer_norm": ("post", "attention"),
        r"deformable_layer\.final_layer_norm": ("post", "mlp"),
        r"fusion_layer\..*": None,
    },
    mixed=_ATTENTION,
    note=_QUERIES.note,
)
_INKLING2 = Row(mixed=_BOTH, note="each sub-layer reads a mix of the outputs of earlier blocks")
_XLM_LISTS = ("attentions", "layer_norm1", "ffns", "layer_norm2")
_XLM_NORMS: Mapping[str, tuple[NormPosition, SubLayerKind] | None] = {
    r"layer_norm1\.\d+": ("at", "attention"),
    r"layer_norm2\.\d+": ("at", "mlp"),
}
_XMOD_NORMS: Mapping[str, tuple[NormPosition, SubLayerKind] | None] = {
    r"attention\.output\.LayerNorm": ("at", "attention"), r"output\.LayerNorm": ("at", "mlp"),
}  # fmt: skip

# architectures that share a row
_SHARED: tuple[tuple[Row, tuple[str, ...]], ...] = (
    (Row(post_norm=True), (
        "data2vec-audio", "maskformer", "openai-gpt", "pp_doclayout_v3",
        "SeamlessM4Tv2TextToUnitDecoderLayer", "sew", "speecht5",
    )),
    (Row(post_norm="!do_stable_layer_norm"), ("hubert", "unispeech", "unispeech-sat", "wav2vec2")),
    (_HYPER, ("deepseek_v4", "glm5_next_text", "hy_v4", "hy_v4_vl_text")),
    (_HYPER_WIDE, ("Qwen4ExpTextDecoderLayer",)),
    (Row(mixed=_ATTENTION, note="attention reads a convolution of the stream"), (
        "SeamlessM4TConformerAdapterLayer", "SeamlessM4Tv2ConformerAdapterLayer",
    )),
    (_QUERIES, (
        "EdgeTamVideoTwoWayAttentionBlock", "GroundingDinoDecoderLayer",
        "MMGroundingDinoDecoderLayer", "Sam2TwoWayAttentionBlock", "Sam2VideoTwoWayAttentionBlock",
        "Sam3DetrDecoderLayer", "Sam3LiteTextDetrDecoderLayer", "Sam3TrackerTwoWayAttentionBlock",
        "Sam3TrackerVideoTwoWayAttentionBlock", "SamHQTwoWayAttentionBlock",
        "SamTwoWayAttentionBlock",
    )),
)  # fmt: skip
# keyed by the block's class, or by `model_type` of the nearest configuration
ARCHITECTURES: Mapping[str, Row] = {
    **{name: row for row, names in _SHARED for name in names},
    "axk2": Row(
        roles={r"self_attn\.q_gate_proj": "qkv"},
        layouts={r"self_attn\.q_gate_proj": "q, gate per head"},
    ),
    "bigbird_pegasus": Row(post_norm=False),
    "BridgeTowerResidualAttention": Row(states=_FIRST),
    "blt": Row(norms={"q_norm": ("pre", "cross")}),
    "ClvpEncoderLayer": Row(layouts={r"mlp\.fc1\.proj": "in, gate"}),
    "ClvpSelfAttention": Row(outside=True),
    "codegen": Row(layouts={r"attn\.qkv_proj": "codegen"}),
    "cpmant": Row(states="preceded by the model's own prompt, which is removed at the end"),
    "dory": Row(apart=_BOTH, note="the stream moves a learned part of the way to each output"),
    "EdgeTamVideoPerceiverEncoderLayer": Row(
        norms={r"layer_norm_latents": ("pre", "cross"), r"layer_norm_self": ("pre", "attention")}
    ),
    "EfficientLoFTRLocalFeatureTransformerLayer": Row(
        norms={r".*\.mlp\.layer_norm": ("branch", "mlp")},
        mixed=frozenset({"mlp"}),
        apart=frozenset({"attention", "cross"}),
        note="the feed-forward part reads the stream beside attention's output",
    ),
    "FastSpeech2ConformerEncoderLayer": Row(post_norm="!normalize_before"),
    "GroundingDinoEncoderLayer": _GROUNDING,
    "falcon": Row(layouts={r".*query_key_value": "falcon"}, overwritten=r"mlp\.dense_4h_to_h"),
    "flaubert": Row(lists=_XLM_LISTS, norms=_XLM_NORMS, post_norm="!pre_norm"),
    "fsmt": Row(states=_FIRST),
    "gemma3n_text": Row(
        absent=frozenset({"key", "value"}), states="several residual streams (AltUp)"
    ),
    "gemma4_text": Row(absent=frozenset({"key", "value"})),
    "gpt_bigcode": Row(layouts={r"attn\.c_attn": "q, k, v by multi_query"}),
    "gpt_oss": Row(layouts={r"mlp\.experts": "gate, in by turns"}),
    "HiggsAudioV2DecoderLayer": Row(
        outs={r"self_attn\.o_proj": ""},
        apart=frozenset({"mlp"}),
        note="tokens of text and of audio have norms and feed-forward parts of their own",
    ),
    "ibert": Row(note="quantized layers that return scaling factors with their output"),
    "inkling2_loop_text": _INKLING2,
    "inkling2_text": _INKLING2,
    "jetmoe": Row(
        experts={
            r"self_attention\.experts\.input_linear": "query",
            r"self_attention\.experts\.output_linear": "attention_out",
            r"mlp\.input_linear": "mlp_in",
            r"mlp\.output_linear": "mlp_out",
        },
        outs={
            r"self_attention\.experts\.output_linear": "self_attention",
            r"mlp\.output_linear": "mlp",
        },
    ),
    "led": _OVERWRITTEN_QUERY,
    "levit": Row(
        states="that of the next stage, narrower in tokens and wider in features",
        note="attention and feed-forward part are blocks of their own, of convolutions",
    ),
    "LightGlueTransformerLayer": Row(
        norms={r".*_mlp\.layer_norm": None},
        mixed=frozenset({"mlp"}),
        apart=frozenset({"attention", "cross"}),
        note="the feed-forward part reads the stream beside attention's output",
    ),
    "llama4_text": Row(overwritten=r"feed_forward\.shared_expert\.down_proj"),
    "longformer": _OVERWRITTEN_QUERY,
    "LwDetrDecoderLayer": _LW_DETR,
    "Mask2FormerMaskedAttentionDecoderLayer": Row(
        post_norm="!pre_norm", mixed=_ATTENTION, note=_QUERIES.note
    ),
    "megatron-bert": Row(norms={"ln": ("pre", "mlp")}),
    "minimax": Row(
        layouts={r"self_attn\.qkv_proj": "q, k, v per head"},
        # the normalized stream becomes the stream
        norms={"input_layernorm": None, "post_attention_layernorm": None},
    ),
    "MMGroundingDinoEncoderLayer": _GROUNDING,
    "mobilebert": Row(mixed=_ATTENTION, note="attention reads a narrow projection of the stream"),
    "MoonshineDecoderLayer": Row(layouts={r"mlp\.fc1": "in, gate"}),
    "MoonshineStreamingDecoderLayer": Row(layouts={r"mlp\.fc1": "in, gate"}),
    "neomme": Row(mixed=_ATTENTION, note="attention reads a mix of the stream and the embeddings"),
    "OneFormerTransformerDecoderLayer": Row(
        norms={
            r"cross_attn\.norm": ("at", "cross"),
            r"self_attn\.norm": ("at", "attention"),
            r"ffn\.norm": ("at", "mlp"),
        },
        post_norm="!normalize_before",
        mixed=_ATTENTION,
        note=_QUERIES.note,
    ),
    "OneFormerTransformerDecoderQueryTransformerDecoderLayer": Row(
        post_norm="!normalize_before", mixed=_ATTENTION, note=_QUERIES.note
    ),
    "patchtst": Row(
        norms={"norm_sublayer1": ("at", "attention"), "norm_sublayer3": ("at", "mlp")},
        post_norm="!pre_norm",
    ),
    "pegasus_x": Row(outs={r"self_attn\.out_proj": "self_attn"}),
    "Phi4MultimodalAudioConformerEncoderLayer": Row(
        layouts={r"feed_forward_\w+\.gate_up_proj": "in, gate"}
    ),
    "ProphetNetDecoderLayer": Row(
        outs={r"self_attn\.out_proj": "self_attn"},
        states="the main stream, followed by the predicting streams",
    ),
    "pvt_v2": Row(norms={r"attention\.layer_norm": None}),
    "reformer": Row(
        absent=frozenset({"key"}),
        mixed=_BOTH,
        note="reversible: each sub-layer reads one of two streams and is added to the other",
    ),
    "RfDetrDecoderLayer": _LW_DETR,
    "roberta-prelayernorm": Row(
        norms={
            r"attention\.LayerNorm": ("pre", "attention"),
            r"intermediate\.LayerNorm": ("pre", "mlp"),
        }
    ),
    "rwkv": Row(
        roles={
            r"attention\.receptance": "query",
            r"feed_forward\.key": "mlp_in",
            r"feed_forward\.value": "mlp_out",
            r"feed_forward\.receptance": "mlp_gate",
        },
        outs={r"feed_forward\.value": "feed_forward"},
    ),
    "SwiftFormerStage": Row(
        absent=frozenset({"value"}), states="a feature map [rows, d_model, height, width]"
    ),
    "swin2sr": _BRANCH_NORMS,
    "swinv2": _BRANCH_NORMS,
    "timesformer": Row(outs={r"temporal_attention\.output\.dense": "temporal_dense"}),
    "wavlm": Row(functional=r"attention\.(q|k|v|out)_proj", post_norm="!do_stable_layer_norm"),
    "VitDetLayer": Row(states="a feature map [rows, d_model, height, width]"),
    "XCLIPVisionEncoderLayer": Row(
        norms={"layer_norm2": ("pre", "mlp")}, outs={r"message_attn\.out_proj": ""}
    ),
    "xlm": Row(lists=_XLM_LISTS, norms=_XLM_NORMS, post_norm=True),
    "xlm-roberta-xl": Row(norms={"LayerNorm": ("pre", "mlp")}),
    "xmod": Row(languages="output", post_norm="!pre_norm", norms=_XMOD_NORMS),
    "zaya": Row(
        roles={
            r"self_attn\.qkv_proj\.v_proj_current": "value",
            r"self_attn\.qkv_proj\.v_proj_delayed": "value",
        }
    ),
    "zamba": _SHARED_BLOCK,
    "zamba2": _SHARED_BLOCK,
}


_BOXES = "its first block embeds boxes, which a call may lack"

NO_ENTRY: Mapping[str, str] = {
    "albert": "its first block runs several times in one call",
    "maskformer": "its first block gets zeros, not embeddings",
    "mimi": "its encoder's output is quantized, which no gradient passes",
    "sam3": _BOXES,
    "sam3_lite_text": _BOXES,
    "vitdet": "its first block gets [rows, d_model, height, width]",
}

_GRID = "its blocks read a grid of patches"
_PACKED = "its blocks read all rows as one sequence"
_CHANNELS = "its embeddings are [rows, features, tokens]"

NO_TOKENS: Mapping[str, str] = {
    "blip_2_qformer": "its blocks have no feed-forward part for tokens beside its queries",
    "cosmos3_edge_vision": _PACKED,
    "decision_transformer": "its tokens are returns, states and actions in turn",
    "dpt": "its embeddings return several tensors",
    "fun_asr_nano_encoder": _PACKED,
    "gemma4_vision": "its blocks take the place of each patch",
    "granite_docling_vision": _GRID,
    "hunyuan_vl_vision": _PACKED,
    "hy_v4_vl_vision": _PACKED,
    "kyutai_speech_to_text": "each of its tokens is several ids",
    "levit": _GRID,
    "longformer": "it pads its tokens to whole windows before it embeds them",
    "mimi_decoder": _CHANNELS,
    "mimi_encoder": _CHANNELS,
    "minicpm_ocr_vision": _PACKED,
    "minicpmv4_7_vision": _PACKED,
    "pocket_tts_audio_tokenizer_decoder": _CHANNELS,
    "pocket_tts_audio_tokenizer_encoder": _CHANNELS,
    "qwen3_asr_encoder": "it embeds audio in chunks, which it then joins",
    "seggpt": _GRID,
    "swiftformer": _GRID,
    "timesformer": _GRID,
    "videoprism": "its embeddings add a token of their own",
    "vilt": "its embeddings join words and patches",
    "vitdet": _GRID,
    "yolos": "its blocks add positions to the patches",
}
