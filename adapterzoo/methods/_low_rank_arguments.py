"""The fields of PEFT's `LoraConfig` as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapterzoo.peft_arguments import PeftArgument, PeftArguments

from ._input_plans import OPTIONS
from ._peft_arguments import EXCLUDED, STORED, TARGETS, TOKENS, bias, ours

INVOCATION = "alora_invocation_tokens"
"""The field of aLoRA, which LoRA alone has."""

REFUSED = {
    "use_qalora": "it pools the input of each group before A",
    INVOCATION: "it acts only after certain tokens",
    "layer_replication": "it has more layers than the model",
    "use_bdlora": "its factors are block-diagonal and packed",
    "arrow_config": "it routes each token among several adapters",
    "kasa_config": "it removes singular values from the base weights",
    "monteclora_config": "it draws its factors at random in each forward",
    "megatron_config": "it belongs to layers that Megatron has split",
    "enable_lora": "it was written by PEFT before 0.3, for parts of fused layers",
}
"""Fields without a counterpart here, and what they do."""

ARGUMENTS = PeftArguments(
    class_name="LoraConfig",
    fields={
        **TARGETS,
        **EXCLUDED,
        **STORED,
        **bias(),
        **TOKENS,
        "target_parameters": ours(None, "target_parameters"),
        "r": ours(8, "r"),
        "lora_alpha": ours(8, "alpha"),
        "lora_dropout": ours(0.0, "dropout"),
        "use_rslora": ours(False, "use_rslora"),
        "rank_pattern": ours({}, "rank_pattern"),
        "alpha_pattern": ours({}, "alpha_pattern"),
        "init_lora_weights": PeftArgument(
            True,
            "init_weights",
            {True: "lora"},
            "with False A and B start at random, and the model changes. Write "
            "init_lora_weights=True, or init_weights='bert' for normal values of both.",
            passes=True,
        ),
        "megatron_core": PeftArgument("megatron.core"),
        "qalora_group_size": PeftArgument(16),
        **{
            name: PeftArgument(hint="this method has no initial values from data. Leave it out.")
            for name in ("corda_config", "eva_config")
        },
        **{
            name: PeftArgument(hint="it belongs to initial values that are not here. Leave it out.")
            for name in ("loftq_config", "lora_ga_config")
        },
        "ensure_weight_tying": PeftArgument(False),
        "velora_config": PeftArgument(hint="it compresses activations. Leave it out."),
        **{
            name: PeftArgument(hint=f"{reason}, which is not supported here. Leave it out.")
            for name, reason in REFUSED.items()
            if name != "enable_lora"
        },
    },
)

FROM_DATA: Mapping[str, PeftArgument] = {
    "eva_config": PeftArgument(
        ours="init_options",
        part_class="EvaConfig",
        parts={
            **{name: ours(default, name) for name, (default, _) in OPTIONS["eva"].items()},
            "label_mask_value": PeftArgument(
                -100, hint="labels of tokens that are left out are -100. Leave it out."
            ),
        },
    ),
    "corda_config": PeftArgument(
        ours="init_options",
        part_class="CordaConfig",
        parts={
            **{name: ours(default, name) for name, (default, _) in OPTIONS["corda"].items()},
            "cache_file": PeftArgument(hint="nothing is kept in files. Leave it out."),
            "covariance_file": PeftArgument(hint="nothing is kept in files. Leave it out."),
            "verbose": PeftArgument(False, hint="there is no progress to print. Leave it out."),
            "use_float16_for_covariance": PeftArgument(
                False, hint="covariances are never in half precision. Leave it out."
            ),
            "prune_temporary_fields": PeftArgument(
                True, hint="there are no temporary fields. Leave it out."
            ),
        },
    ),
    "loftq_config": PeftArgument(
        part_class="LoftQConfig",
        parts={
            "loftq_bits": PeftArgument(
                4, hint="the base model is quantized already, in its own bits. Leave it out."
            ),
            "loftq_iter": PeftArgument(
                1,
                hint="further iterations quantize the base weights again, and here these stay as "
                "they are. Write loftq_iter=1.",
            ),
        },
    ),
}
"""The fields of methods whose initial values may come from `init_data`."""


def unused_options(fields: Mapping[str, Any]) -> str | None:
    """Return what is wrong with options of initial values that are not asked for."""
    asked = fields.get("init_lora_weights", fields.get("init_weights"))
    for start in OPTIONS:
        name = f"{start}_config"
        if fields.get(name) and asked != start:
            return (
                f"{name}={fields[name]!r} with init_lora_weights={asked!r}: it has an effect only "
                f"with init_lora_weights={start!r}. Write that, and its data as init_data=… beside "
                f"the config; or leave it out."
            )
    return None
