"""How SGLang reads an adapter.

Version: sglang 0.5.23 (wheel on PyPI). Source files: sglang/srt/lora/lora_config.py and
lora_manager.py (config, legal layers), sglang/srt/lora/lora.py (keys, fused layers),
sglang/srt/lora/mem_pool.py (shapes, experts, what is skipped), sglang/srt/lora/utils.py (names),
sglang/srt/layers/utils/common.py (`get_layer_id`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .reading import Reading, Update, linear_layers, type_of

VERSION = "SGLang 0.5.23"

# models of sglang/srt/models with layers that the manager finds
_MODELS = {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral",
           "qwen3_moe"}  # fmt: skip
# get_normalized_target_modules
_NORMALIZED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "vocab_emb": "embed_tokens", "embeddings": "embed_tokens", "word_embeddings": "embed_tokens",
    "output": "lm_head", "unembed_tokens": "lm_head",
}  # fmt: skip
# the only ones whose sizes get_default_hidden_dim knows
_SIZED = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"}


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor], base: nn.Module) -> Reading:
    """Return what SGLang makes of an adapter; the arguments are those of `vllm.read`."""
    found = Reading()
    if type_of(base, _MODELS, found) is None:
        return found
    for name in ("target_modules", "r", "lora_alpha", "peft_type"):
        if name not in config:
            found.refused.append(f"KeyError: {name!r}")
    if found.refused:
        return found
    if str(config["peft_type"]).lower() != "lora":
        found.refused.append(f"peft_type={config['peft_type']!r}")
    if config.get("use_dora"):
        found.refused.append("DoRA is not supported")
    wanted = config["target_modules"]
    if not isinstance(wanted, list):
        found.refused.append(f"target_modules={wanted!r} is not a list")
    if found.refused:
        return found
    targets = {_NORMALIZED.get(name.split(".")[-1], name.split(".")[-1]) for name in wanted}
    found.refused += [f"the sizes of {name!r} are not known" for name in sorted(targets - _SIZED)]
    blocks: dict[int, dict[str, Tensor]] = {}
    outside: dict[str, Tensor] = {}
    for key, tensor in sorted(tensors.items()):
        name = key.replace("unembed_tokens", "lm_head")
        layer_id = re.search(r"layers\.(\d+)\.", name)
        if layer_id is not None:
            blocks.setdefault(int(layer_id[1]), {})[name] = tensor
        elif "embed_tokens" in name or "lm_head" in name:
            module = "embed_tokens" if "embed_tokens" in name else "lm_head"
            (outside.update({name: tensor}) if module in targets else found.dropped.append(key))
        else:
            # input_embeddings and output_embeddings belong to added tokens, which are refused
            found.dropped.append(key)
    count = int(base.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    # always alpha / r: use_rslora and the patterns are not read
    scale = float(config["lora_alpha"]) / config["r"]
    for number, weights in blocks.items():
        if number >= count:
            found.refused.append(f"there is no layer {number}")
        elif not found.refused:
            _block(found, number, weights, targets, config["r"], scale, base)
    if not found.refused:
        _outside(found, outside, config["r"], scale, base)
    return found


def _block(
    found: Reading, number: int, weights: dict[str, Tensor], targets: set[str], rank: int,
    scale: float, base: nn.Module,
) -> None:  # fmt: skip
    """Read the weights of a block, `LoRAAdapter._normalize_weights` and `load_lora_weight_…`."""
    parts: dict[str, str] = {}
    for old, new in ((".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj.")):
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    has_k = any("k_proj" in name for name in weights)
    for name in sorted(weights):
        if "q_proj" in name:
            v = name.replace("q_proj", "v_proj")
            k = name.replace("q_proj", "k_proj")
            if v not in weights or (has_k and k not in weights):
                found.refused.append(f"{name} has no partner {v if v not in weights else k}")
            parts |= {name: "qkv_proj", v: "qkv_proj", k: "qkv_proj"}
        elif "gate_proj" in name:
            parts |= {name: "gate_up_proj", name.replace("gate_proj", "up_proj"): "gate_up_proj"}
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        target = parts.get(name) or max((t for t in targets if t in name), key=len, default=None)
        if target is None or target not in targets:
            # get_target_module_name
            found.refused.append(f"cannot find a target module for {name}")
            continue
        factor = "lora_A" if "lora_A" in name else "lora_B"
        if "lora_A" not in name and "lora_B.weight" not in name:
            # would be written to the buffer of B, which has another shape
            found.refused.append(f"{name}: the shape is not that of the buffer")
            continue
        if tensor.shape[0 if factor == "lora_A" else 1] != rank:
            found.refused.append(f"{name}: the shape is not that of a buffer of rank {rank}")
            continue
        pairs.setdefault(name.partition(f".{factor}")[0], {})[factor] = tensor
    for module, pair in pairs.items():
        if {*pair} != {"lora_A", "lora_B"}:
            # the other buffer is zero
            found.dropped += [f"{module}.{factor}.weight" for factor in pair]
            continue
        _update(found, number, module, pair, scale, base)


def _update(
    found: Reading, number: int, module: str, pair: Mapping[str, Tensor], scale: float,
    base: nn.Module,
) -> None:  # fmt: skip
    """Find the layer in the block by its last name alone."""
    a, b, leaf = pair["lora_A"], pair["lora_B"], module.rpartition(".")[2]
    expert = re.search(r"experts\.(\d+)\.", f"{module}.")
    if expert is not None:
        path = next(
            (p for p in (f"model.layers.{number}.mlp.experts",) if p in dict(base.named_modules())),
            None,
        )
        if path is None:
            found.refused.append(f"{module}: the block has no experts")
            return
        parameter = "down_proj" if leaf == "down_proj" else "gate_up_proj"
        half = {"gate_proj": (0, 2), "up_proj": (1, 2)}.get(leaf)
        found.updates.append(Update(path, a, b, scale, parameter, int(expert[1]), half))
        return
    start = f"model.layers.{number}."
    own = [p for p in linear_layers(base) if p.startswith(start) and p.endswith(f".{leaf}")]
    if len(own) != 1:
        found.dropped += [f"{module}.{factor}.weight" for factor in pair]
        return
    found.updates.append(Update(own[0], a, b, scale))


def _outside(
    found: Reading, weights: Mapping[str, Tensor], rank: int, scale: float, base: nn.Module
) -> None:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        factor = re.search(r"lora_(?:embedding_)?([AB])", name)
        if factor is None:
            # for example a trained copy of the layer
            found.dropped.append(name)
            continue
        if tensor.shape["AB".index(factor[1])] != rank:
            found.refused.append(f"{name}: the shape is not that of a buffer of rank {rank}")
        module = "embed_tokens" if "embed_tokens" in name else "lm_head"
        pairs.setdefault(module, {})[factor[1]] = tensor
    for module, pair in pairs.items():
        paths = [p for p, _ in base.named_modules() if p.endswith(module)]
        if {*pair} != {"A", "B"} or not paths:
            found.dropped += [f"{module}: {factor}" for factor in pair]
            continue
        is_table = isinstance(base.get_submodule(paths[0]), nn.Embedding)
        found.updates.append(Update(paths[0], pair["A"], pair["B"], scale, looked_up=is_table))
