"""Fields that many of PEFT's config classes have."""

from __future__ import annotations

from collections.abc import Mapping

from adapterzoo.fields import Check
from adapterzoo.peft_arguments import PeftArgument

# each method file adds those of its class
TARGETS: Mapping[str, PeftArgument] = {
    "target_modules": PeftArgument(ours="target_modules"),
    "layers_to_transform": PeftArgument(ours="layers_to_transform"),
    "layers_pattern": PeftArgument(
        hint="layers of one stack are named by an expression for whole paths in target_modules. "
        "Leave it out."
    ),
    "modules_to_save": PeftArgument(ours="modules_to_save"),
}
EXCLUDED: Mapping[str, PeftArgument] = {"exclude_modules": PeftArgument(ours="exclude_modules")}
# PEFT sets it by the class of each layer, whatever is given
STORED: Mapping[str, PeftArgument] = {
    "fan_in_fan_out": PeftArgument(default=False, values={True: None, False: None})
}
TOKENS: Mapping[str, PeftArgument] = {
    "trainable_token_indices": PeftArgument(ours="trainable_token_indices")
}
PROMPT: Mapping[str, PeftArgument] = {
    name: PeftArgument(hint="the model has this number. Leave it out.")
    for name in ("token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers")
} | {"modules_to_save": PeftArgument(ours="modules_to_save")}


def bias(adapted: str | None = None) -> Mapping[str, PeftArgument]:
    """Return the field `bias`.

    Args:
        adapted: the value for the biases of the adapted layers, which PEFT names by the method;
            None: that of LoRA, as here.
    """
    values = {} if adapted is None else {adapted: "lora_only"}
    return {"bias": PeftArgument("none", "bias", values=values, passes=True)}


def ours(default: object, name: str, check: Check | None = None) -> PeftArgument:
    """Return a field of PEFT with a counterpart here.

    Args:
        default: PEFT's.
        name: of our field.
        check: the legal values in a file; None: files are read without the field.
    """
    return PeftArgument(default, name, check=check)
