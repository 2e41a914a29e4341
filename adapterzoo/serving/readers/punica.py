"""How LoRAX and TGI read an adapter: TGI's code is a copy of LoRAX's, with other tables.

LoRAX: predibase/lorax at a7394ba (2026-05-28). Source files: server/lorax_server/adapters/lora.py
(names, scales, ranks), models/flash_*.py (`ADAPTER_LAYERS`, `adapter_target_to_layer`),
utils/sgmv.py (`pad_to_min_rank`).
TGI: huggingface/text-generation-inference at db931fc (2026-01-08). Source files:
server/text_generation_server/adapters/lora.py, utils/adapter.py (`build_layer_weight_lookup`),
models/__init__.py (`get_model_with_lora_adapters`: the list of layers), layers/lora.py,
models/custom_modeling/flash_*_modeling.py (which layers are wrapped).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .reading import Reading, Update, type_of

LORAX, TGI = "LoRAX at a7394ba", "TGI at db931fc"

_ATTENTION = tuple(f"self_attn.{n}_proj" for n in "qkvo")
_MLP = tuple(f"mlp.{n}_proj" for n in ("gate", "up", "down"))
_PHI3 = "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"
_LLAMA = "model.layers", (*_ATTENTION, *_MLP)
# where the blocks are → their layers in the order of ADAPTER_LAYERS, with those outside last
_LORAX: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llama": (_LLAMA[0], (*_LLAMA[1], "lm_head")),
    "mistral": (_LLAMA[0], (*_LLAMA[1], "lm_head")),
    "qwen2": (_LLAMA[0], (*_LLAMA[1], "lm_head")),
    "gemma2": _LLAMA,
    "mixtral": (_LLAMA[0], _ATTENTION),
    "phi3": (_LLAMA[0], _PHI3),
    "gpt2": ("transformer.h", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
}
# lm_head is looked up, but is not in the list of layers; neither is Phi-3's gate_up_proj
_TGI: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "gemma2": _LLAMA,
    "phi3": (_LLAMA[0], ("self_attn.o_proj", "mlp.down_proj", "self_attn.qkv_proj")),
}


def read_lorax(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], base: nn.Module
) -> Reading:
    """Return what LoRAX makes of an adapter; the arguments are those of `vllm.read`."""
    return _read(config, tensors, base, _LORAX)


def read_tgi(config: Mapping[str, Any], tensors: Mapping[str, Tensor], base: nn.Module) -> Reading:
    """Return what TGI makes of an adapter; the arguments are those of `vllm.read`."""
    return _read(config, tensors, base, _TGI)


def _read(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    base: nn.Module,
    models: Mapping[str, tuple[str, tuple[str, ...]]],
) -> Reading:
    found = Reading()
    model_type = type_of(base, models, found)
    if model_type is None:
        return found
    # PEFT's class for this type is loaded, and must have these fields
    if config.get("peft_type") != "LORA":
        found.refused.append(f"the config of {config.get('peft_type')!r} has no lora_alpha")
        return found
    blocks, kinds = models[model_type]
    names = {*dict(base.named_modules())}
    used: set[str] = set()
    rank = config["r"]
    for kind in kinds:
        paths = [kind] if kind in names else []
        number = 0
        while f"{blocks}.{number}.{kind}" in names:
            paths.append(f"{blocks}.{number}.{kind}")
            number += 1
        pairs = [_pair(path, tensors) for path in paths]
        # a kind of layer is skipped unless every block has it
        if not pairs or None in pairs:
            continue
        scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        padded = rank
        for path, pair in zip(paths, pairs, strict=True):
            assert pair is not None  # noqa: S101  mypy
            a, b = pair
            if a.shape[0] != pairs[0][0].shape[0]:  # type: ignore[index]
                found.refused.append(f"{path}: the ranks of its blocks cannot be stacked")
            padded = _padded(a.shape[0])
            used |= {f"base_model.model.{path}.lora_{factor}.weight" for factor in "AB"}
            found.updates.append(Update(path, a, b, scale))
        # config.r = padded_rank: the scale of the next kind of layer is computed with it
        rank = padded
    found.dropped += sorted(tensors.keys() - used)
    return found


def _pair(path: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    names = [f"base_model.model.{path}.lora_{factor}.weight" for factor in "AB"]
    return None if any(name not in tensors for name in names) else (
        tensors[names[0]], tensors[names[1]]
    )  # fmt: skip


def _padded(rank: int) -> int:
    """Return the rank that the kernels compute with, `pad_to_min_rank`."""
    return 8 if rank <= 8 else (rank + 15) // 16 * 16
