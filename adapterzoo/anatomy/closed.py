"""Models that cannot have an adapter at the first block, or tokens that join the embeddings.

The keys are `config.model_type` of the whole model; the values say why.
"""

from __future__ import annotations

from collections.abc import Mapping

from .tree import Tree

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
    "cosmos3_edge_vision": _PACKED,
    "dpt": "its embeddings return several tensors",
    "fun_asr_nano_encoder": _PACKED,
    "granite_docling_vision": _GRID,
    "hunyuan_vl_vision": _PACKED,
    "hy_v4_vl_vision": _PACKED,
    "levit": _GRID,
    "longformer": "it pads its tokens to whole windows before it embeds them",
    "mimi_encoder": _CHANNELS,
    "minicpm_ocr_vision": _PACKED,
    "minicpmv4_7_vision": _PACKED,
    "pocket_tts_audio_tokenizer_encoder": _CHANNELS,
    "qwen3_asr_encoder": "it embeds audio in chunks, which it then joins",
    "swiftformer": _GRID,
    "timesformer": _GRID,
    "videoprism": "its embeddings add a token of their own",
    "vilt": "its embeddings join words and patches",
    "vitdet": _GRID,
    "yolos": "its blocks add positions to the patches",
}


def reason(table: Mapping[str, str], tree: Tree) -> str:
    """Return why a model is closed; empty if it is not in the table."""
    found = (table.get(model_type, "") for model_type in tree.branch("").model_types)
    return next(filter(None, found), "")
