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
    "modules_to_save": PeftArgument(
        hint="only the head of a model and its embeddings are trained beside an adapter. Leave it "
        "out: train_adapter(…) trains the head, with train_embeddings=True the embeddings too."
    ),
}
EXCLUDED: Mapping[str, PeftArgument] = {"exclude_modules": PeftArgument(ours="exclude_modules")}
# PEFT sets it by the class of each layer, whatever is given
STORED: Mapping[str, PeftArgument] = {
    "fan_in_fan_out": PeftArgument(default=False, values={True: None, False: None})
}
BIAS: Mapping[str, PeftArgument] = {
    "bias": PeftArgument(
        "none", hint="the biases of the base model stay frozen. Write bias='none'."
    )
}
PROMPT: Mapping[str, PeftArgument] = {
    name: PeftArgument(hint="the model has this number. Leave it out.")
    for name in ("token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers")
} | {"modules_to_save": TARGETS["modules_to_save"]}


def ours(default: object, name: str) -> PeftArgument:
    """Return a field of PEFT with a counterpart here.

    Args:
        default: PEFT's.
        name: of our field.
    """
    return PeftArgument(default, name)
