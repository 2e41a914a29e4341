"""Common parts of PEFT's config classes and files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.config import AdapterConfig, Check, Placement, checks
from adapterzoo.errors import CheckpointError, argument, listing
from adapterzoo.peft_arguments import PeftArgument

# --- fields that many of PEFT's config classes have; each method adds its own ---

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
            none: only LoRA's, as here.
    """
    values = dict.fromkeys(adapted, "lora_only")
    return {"bias": PeftArgument("none", "bias", values=values, passes=True)}


def ours(default: object, name: str, check: Check | None = None) -> PeftArgument:
    """Return a field of PEFT with a counterpart here.

    Args:
        default: PEFT's.
        name: name of our field.
        check: valid values in a file; None: files are read without the field.
    """
    return PeftArgument(default, name, check=check)


def same_as(config: type[AdapterConfig], *names: str) -> Mapping[str, PeftArgument]:
    """Return fields of PEFT with the names, defaults and valid values of ours.

    Args:
        config: our class.
        *names: names of the fields.
    """
    found = checks(config)
    return {name: ours(found[name][1], name, found[name][0]) for name in names}


# --- the sites of adapters that change a weight ---


def unsayable(placement: Placement, config: str, why: str) -> str | None:
    """Return why PEFT's format cannot express an adapter; None if it can.

    Args:
        placement: the adapter's placement.
        config: its config with an article, such as "a BOFTConfig".
        why: what PEFT lacks at a Conv1D, such as "PEFT has no BOFT".
    """
    site = placement.site
    if not site.is_called:
        return f"an adapter at {site.path!r}, where PEFT's would not act: no module there is called"
    if site.parameter is not None:
        return f"an adapter at the parameter {site.parameter!r} of {site.path!r}"
    if site.transposed:
        return f"{config} at {site.path!r}, a Conv1D, where {why}"
    return None


def not_plain_2d(site: Site, config: str) -> str | None:
    """Return why PEFT lacks a grouped or non-2-D convolution; None if it is neither.

    Args:
        site: the adapter's site.
        config: its config with an article, such as "a BOFTConfig".
    """
    if site.kernel and (len(site.kernel) != 2 or site.groups > 1):
        return f"{config} at {site.path!r}, where PEFT has only plain 2-D convolutions"
    return None


def ignored(site: Site, *options: str) -> str | None:
    """Return what PEFT ignores at a convolution, as a reason for `unsayable`; None if nothing.

    Args:
        site: the adapter's site.
        *options: the arguments of a convolution that PEFT's method does not read.
    """
    found = [name for name in options if name in site.special]
    return f"a convolution at {site.path!r}, whose {listing(found)} PEFT ignores" if found else None


def refuse_ignored(site: Site, *options: str) -> None:
    """Refuse a file that PEFT has trained with another convolution than the layer's.

    Args:
        site: the adapter's site.
        *options: the arguments of a convolution that PEFT's method does not read.

    Raises:
        CheckpointError: the layer has one of them.
    """
    if (why := ignored(site, *options)) is not None:
        raise CheckpointError(
            f"it has {why}, so it would compute something else here. Train it here: add_adapter(…)."
        )


def only_native(why: str) -> CheckpointError:
    """Return the error for something that PEFT's format cannot express."""
    return CheckpointError(
        f"{why}, which PEFT's format cannot express. Write {argument('format', 'native')}."
    )


def whole_width(site: Site) -> int:
    """Return the output width of a part's layer, or of the layer itself."""
    rows = site.output_slice
    return site.d_out if rows is None else rows.groups * rows.width


def rows_of(site: Site) -> Tensor:
    """Return the indices of a part's output features in its layer, or all of a layer."""
    every, rows = torch.arange(whole_width(site)), site.output_slice
    if rows is None:
        return every
    return every.view(rows.groups, rows.width)[:, rows.start : rows.stop].reshape(-1)  # [size]
