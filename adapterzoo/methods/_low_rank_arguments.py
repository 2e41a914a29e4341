"""The fields of PEFT's `LoraConfig` as users write them."""

from __future__ import annotations

from adapterzoo.peft_arguments import PeftArgument, PeftArguments

from ._peft_arguments import BIAS, EXCLUDED, STORED, TARGETS, TOKENS, ours

REFUSED = {
    "use_qalora": "it pools the input of each group before A",
    "alora_invocation_tokens": "it acts only after certain tokens",
    "layer_replication": "it has more layers than the model",
    "target_parameters": "it adapts parameters of fused experts one by one",
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
        **BIAS,
        **TOKENS,
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
            name: PeftArgument(
                hint="write its fields as init_options={…}, and the batches as "
                "add_adapter(…, init_data=batches)."
            )
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
            if name not in ("enable_lora", *TOKENS)
        },
    },
)
