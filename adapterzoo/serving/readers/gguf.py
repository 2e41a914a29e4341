"""How llama.cpp reads an adapter, through its converter to GGUF.

Version: llama.cpp in the sdist of llama-cpp-python 0.3.36. Source files: convert_lora_to_gguf.py
(keys, alpha), conversion/*.py (which models and names), gguf-py/gguf/tensor_mapping.py,
src/llama-adapter.cpp and llama-adapter.h (scale, shapes, norms that are skipped).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .reading import Reading, Update

VERSION = "llama.cpp in llama-cpp-python 0.3.36"

_BLOCK = r"model\.layers\.(\d+)\."
_ATTENTION = rf"{_BLOCK}self_attn\.[qkvo]_proj"
_LLAMA = rf"{_ATTENTION}|{_BLOCK}mlp\.(gate|up|down)_proj|model\.embed_tokens|lm_head"
# names in conversion/*.py and tensor_mapping.py, as far as models of transformers have them
_MODELS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"), _LLAMA),
    "phi3": rf"{_BLOCK}(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)|"
    r"model\.embed_tokens|lm_head",
    "mixtral": rf"{_ATTENTION}|{_BLOCK}block_sparse_moe\.experts\.\d+\.w[123]|"
    r"model\.embed_tokens|lm_head",
    "qwen3_moe": rf"{_LLAMA}|{_BLOCK}mlp\.experts\.\d+\.(gate|up|down)_proj",
    "bert": r"(bert\.)?encoder\.layer\.(\d+)\.(attention\.self\.(query|key|value)|"
    r"attention\.output\.dense|intermediate\.dense|output\.dense)",
}
# w1, w2 and w3 of Mixtral → parameter, and its half
_EXPERTS = {
    "w1": ("gate_up_proj", (0, 2)), "gate_proj": ("gate_up_proj", (0, 2)),
    "w3": ("gate_up_proj", (1, 2)), "up_proj": ("gate_up_proj", (1, 2)),
    "w2": ("down_proj", None), "down_proj": ("down_proj", None),
}  # fmt: skip


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor], base: nn.Module) -> Reading:
    """Return what llama.cpp makes of an adapter; arguments as of the reader for vLLM."""
    found = Reading()
    model_type = str(base.config.model_type)  # type: ignore[union-attr]
    pattern = _MODELS.get(model_type)
    if pattern is None:
        found.refused.append(f"its {model_type!r} models take no adapters, or it is not known")
        return found
    if "lora_alpha" not in config:
        found.refused.append("KeyError: 'lora_alpha'")
        return found
    if config.get("alora_invocation_tokens"):
        found.refused.append("the adapter acts from an invocation on, which weights cannot show")
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in sorted(tensors.items()):
        factor = re.search(r"\.lora_(?:embedding_)?([AB])(\.weight)?$", key)
        if factor is None:
            # `.base_layer.weight` is skipped; norms are converted, and skipped by the loader
            if ".base_layer.weight" in key or "_layernorm" in key or ".norm" in key:
                found.dropped.append(key)
            else:
                found.refused.append(f"unexpected name {key!r}")
            continue
        name = key.replace("base_model.model.", "")[: -len(factor[0])]
        pairs.setdefault(name, {})[factor[1]] = tensor
    experts: dict[str, int] = {}
    config_of: Any = base.config
    for name, pair in pairs.items():
        if re.fullmatch(pattern, name) is None:
            found.refused.append(f"cannot map tensor {name!r}")
        elif {*pair} != {"A", "B"}:
            found.refused.append(f"{name!r} has only {[*pair]}")
        elif name == "lm_head" and config_of.tie_word_embeddings:
            found.refused.append("the base model has no tensor 'output.weight'")
        else:
            found.updates.append(_update(name, pair, float(config["lora_alpha"]), base, experts))
    counts = (getattr(config_of, name, None) for name in ("num_local_experts", "num_experts"))
    count = next((n for n in counts if n), 0)
    found.refused += [
        f"unprocessed experts of {path!r}: {n} of {3 * count} matrices"
        for path, n in experts.items() if n != 3 * count
    ]  # fmt: skip
    layers = {*dict(base.named_modules())}
    found.refused += [
        f"{update.path!r} does not exist in the base model"
        for update in found.updates if update.path not in layers
    ]  # fmt: skip
    return found


def _update(
    name: str, pair: Mapping[str, Tensor], alpha: float, base: nn.Module, experts: dict[str, int]
) -> Update:
    """Return the change of a layer; counts the matrices of experts."""
    a, b = pair["A"], pair["B"]
    # get_scale: by the rank of each tensor
    scale = alpha / b.shape[-1] if alpha else 1.0
    expert = re.fullmatch(r"(.+)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)", name)
    if expert is not None:
        path = f"{expert[1]}.mlp.experts"
        experts[path] = experts.get(path, 0) + 1
        parameter, half = _EXPERTS[expert[3]]
        return Update(path, a, b, scale, parameter, int(expert[2]), half)
    path = name
    names = dict(base.named_modules())
    if path not in names:
        # a BertModel or a model around it
        path = next((p for p in (f"bert.{name}", name.removeprefix("bert.")) if p in names), name)
    return Update(path, a, b, scale, looked_up=isinstance(names.get(path), nn.Embedding))
