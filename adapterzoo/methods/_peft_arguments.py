"""Fields that many of PEFT's config classes have."""

from __future__ import annotations

from collections.abc import Mapping

from adapterzoo.peft_arguments import PeftArgument

# each method file adds those of its class
TARGETS: Mapping[str, PeftArgument] = {
    "target_modules": PeftArgument(ours="target_modules"),
    "layers_to_transform": PeftArgument(ours="layers_to_transform"),
    "layers_pattern": PeftArgument(
        hint="the blocks of the model are found without it. Leave it out."
    ),
    "modules_to_save": PeftArgument(ours="modules_to_save"),
}
EXCLUDED: Mapping[str, PeftArgument] = {"exclude_modules": PeftArgument(ours="exclude_modules")}
# PEFT sets it by the class of each layer, whatever is given
STORED: Mapping[str, PeftArgument] = {
    "fan_in_fan_out": PeftArgument(default=False, values={True: None, False: None})
}
BIAS: Mapping[str, PeftArgument] = {
    # PEFT names the adapted layers by the method
    "bias": PeftArgument(
        "none", "bias", {"boft_only": "lora_only", "vera_only": "lora_only"}, passes=True
    )
}
TOKENS: Mapping[str, PeftArgument] = {
    "trainable_token_indices": PeftArgument(ours="trainable_token_indices")
}
PROMPT: Mapping[str, PeftArgument] = {
    name: PeftArgument(hint="the model has this number. Leave it out.")
    for name in ("token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers")
} | {
    "modules_to_save": PeftArgument(
        hint="only the head of the model is trained beside it. Leave it out."
    )
}


def ours(default: object, name: str) -> PeftArgument:
    """Return a field of PEFT with a counterpart here.

    Args:
        default: PEFT's.
        name: of our field.
    """
    return PeftArgument(default, name)
