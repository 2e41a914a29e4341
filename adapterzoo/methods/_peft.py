"""What PEFT's config classes and files have in common."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.config import AdapterConfig, Check, Placement, checks
from adapterzoo.errors import CheckpointError, argument, listing
from adapterzoo.peft_arguments import PeftArgument

# --- fields that many of PEFT's config classes have; each method adds those of its class ---

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


def bias(*adapted: str) -> Mapping[str, PeftArgument]:
    """Return the field `bias`.

    Args:
        *adapted: values for the biases of the adapted layers, which PEFT names by the method;
            none: only that of LoRA, as here.
    """
    values = dict.fromkeys(adapted, "lora_only")
    return {"bias": PeftArgument("none", "bias", values=values, passes=True)}


def ours(default: object, name: str, check: Check | None = None) -> PeftArgument:
    """Return a field of PEFT with a counterpart here.

    Args:
        default: PEFT's.
        name: of our field.
        check: the legal values in a file; None: files are read without the field.
    """
    return PeftArgument(default, name, check=check)


def same_as(config: type[AdapterConfig], *names: str) -> Mapping[str, PeftArgument]:
    """Return fields of PEFT with the names, defaults and legal values of ours.

    Args:
        config: our class.
        *names: of the fields.
    """
    found = checks(config)
    return {name: ours(found[name][1], name, found[name][0]) for name in names}


# --- the sites of adapters that change a weight ---


def unsayable(placement: Placement, config: str, why: str) -> str | None:
    """Return why PEFT's format cannot express an adapter; None: it can.

    Args:
        placement: of the adapter.
        config: its config with an article, such as "a BOFTConfig".
        why: what PEFT lacks at a Conv1D, such as "PEFT has no BOFT".
    """
    site = placement.site
    if not site.is_called:
        return f"an adapter at {site.path!r}, and PEFT's would not act: no module there is called"
    if site.parameter is not None:
        return f"an adapter at the parameter {site.parameter!r} of {site.path!r}"
    if site.transposed:
        return f"{config} at {site.path!r}, a Conv1D, where {why}"
    return None


def not_plain_2d(site: Site, config: str) -> str | None:
    """Return why PEFT lacks a grouped convolution, or one that is not 2-D; None: it is neither.

    Args:
        site: of the adapter.
        config: its config with an article, such as "a BOFTConfig".
    """
    if site.kernel and (len(site.kernel) != 2 or site.groups > 1):
        return f"{config} at {site.path!r}, where PEFT has plain 2-D convolutions only"
    return None


def ignored(site: Site, *options: str) -> str | None:
    """Return what PEFT ignores at a convolution, as a reason of `unsayable`; None: nothing.

    Args:
        site: of the adapter.
        *options: the arguments of a convolution that PEFT's method does not read.
    """
    found = [name for name in options if name in site.special]
    return f"a convolution at {site.path!r}, whose {listing(found)} PEFT ignores" if found else None


def refuse_ignored(site: Site, *options: str) -> None:
    """Refuse a file that PEFT has trained with a convolution other than that of the layer.

    Args:
        site: of the adapter.
        *options: the arguments of a convolution that PEFT's method does not read.

    Raises:
        CheckpointError: the layer has one of them.
    """
    if (why := ignored(site, *options)) is not None:
        raise CheckpointError(
            f"it has {why}, so that it would compute something else here. Train it here: "
            f"add_adapter(…)."
        )


def only_native(why: str) -> CheckpointError:
    """Return the error of what PEFT's format cannot express."""
    return CheckpointError(
        f"{why}, which PEFT's format cannot express. Write {argument('format', 'native')}."
    )


def whole_width(site: Site) -> int:
    """Return the output width of the layer to which a part belongs, or of the layer itself."""
    rows = site.output_slice
    return site.d_out if rows is None else rows.groups * rows.width


def rows_of(site: Site) -> Tensor:
    """Return the indices of a part's output features in its layer, or all of a layer."""
    every, rows = torch.arange(whole_width(site)), site.output_slice
    if rows is None:
        return every
    return every.view(rows.groups, rows.width)[:, rows.start : rows.stop].reshape(-1)  # [size]
