"""The heads of transformers' language models as fields of a head config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ._static_activations import activation_after
from .task_classes import InexpressibleError, Static

# config fields that change logits in ways that no head type here has
_STRANGE = (
    "dim_model_base", "embedding_rank", "logits_mup_width_multiplier", "output_multiplier",
    "softcap", "unpadded_vocab_size", "use_predict_layer",
)  # fmt: skip
# names of the bound of logits
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def lm_fields(static: Static) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a head config, and the names of the tensors in a named head.

    Raises:
        InexpressibleError: the head has layers or factors that no head type here has.
    """
    config = static.config
    if strange := [name for name in _STRANGE if config.get(name) not in (None, False, 1)]:
        raise InexpressibleError(f"its config has {strange[0]}={config[strange[0]]!r}")
    out, dense, norm = (static.module(role) for role in ("output", "dense", "norm"))
    modules = [path for path in (dense, norm, out) if path is not None]
    if norm is not None and dense is None:
        raise InexpressibleError(f"it has the norm {norm} without a layer in front of it")
    keys = {}
    # dense 0, activation 1, norm 2, then the output
    places = {dense: 0, norm: 2, out: 0 if dense is None else 2 if norm is None else 3}
    for path in modules:
        for end in ("weight", "bias"):
            if f"{path}.{end}" in static.tensors:
                keys[f"{path}.{end}"] = f"{places[path]}.{end}"
    # BERT and RoBERTa store the bias of the output layer beside it
    lone = [k for k in static.tensors if k not in keys and re.search(r"(^|\.)bias$", k)]
    keys.update(dict.fromkeys(lone, f"{places[out]}.bias"))
    added = "final_logits_bias" in static.tensors
    if added:
        keys["final_logits_bias"] = "final_logits_bias"
    static.refuse_unused(keys)
    rows = static.backbone.vocab_size if out is None else static.shape(out)[0]
    width = static.backbone.embedding_size or static.backbone.hidden_size
    if out is not None and static.shape(out)[1] != width:
        raise InexpressibleError(f"{out} takes {static.shape(out)[1]} features, not {width}")
    fields: dict[str, Any] = {
        "vocab_size": None if rows == static.backbone.vocab_size else rows,
        "layers": 1 if dense is None else 2,
        "activation_function": None,
        "layer_norm": norm is not None,
        "bias": f"{places[out]}.bias" in keys.values(),
        "added_bias": added,
        **_logit_fields(config),
    }
    if out is None and not config.get("tie_word_embeddings"):
        # the config of the whole model ties it, that of its text part does not
        fields["tie_word_embeddings"] = True
    if dense is not None:
        fields["activation_function"] = activation_after(dense, config)
        fields["dense_bias"] = static.has_bias(dense)
    if norm is not None:
        fields["norm_bias"] = static.has_bias(norm)
        if "layer_norm_eps" not in config:
            fields["layer_norm_eps"] = config.get("norm_eps")
            # DistilBERT's is the default of all heads
            if "norm_eps" not in config and dense != "vocab_transform":
                raise InexpressibleError(f"its config has no eps of {norm}")
    return fields, keys


def _logit_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a head config for the factors of the logits."""
    cohere = str(config.get("model_type")).startswith("cohere")
    return {
        "logit_scale": config.get("logit_scale" if cohere else "lm_head_multiplier"),
        "logit_divisor": config.get("logits_scaling"),
        "logit_softcap": next((config[name] for name in _SOFTCAPS if config.get(name)), None),
    }
