"""The layers that experts had before transformers 5 fused them into parameters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from transformers import conversion_mapping

# types whose checkpoints are converted alike → parameter now → its layers before, row after row
_LAYERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mixtral": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",), "gate.weight": ("gate",)},
    "qwen2_moe": {
        "gate_up_proj": ("gate_proj", "up_proj"),
        "down_proj": ("down_proj",),
        "gate.weight": ("gate",),
    },
}


def split_experts(model_type: str) -> Mapping[str, tuple[str, ...]]:
    """Return the former layers of each parameter, for the types of models where PEFT knows them.

    Args:
        model_type: of the model's config.
    """
    known: Mapping[str, str] = getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    # PEFT looks the type up in the same table, to which it adds Mixtral only
    alike = "mixtral" if model_type == "mixtral" else known.get(model_type, "")
    return _LAYERS.get(alike, MappingProxyType({}))
