"""What files of several families share: fields and sites of PEFT, and places of AdapterHub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy, OutputSlice, Role, Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError, argument
from adapterzoo.peft_arguments import PeftArgument
from adapterzoo.spelling import same

from ._targets import TargetedConfig

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
    return {"bias": PeftArgument("none", "bias", values, passes=True)}


def ours(default: object, name: str) -> PeftArgument:
    """Return a field of PEFT with a counterpart here.

    Args:
        default: PEFT's.
        name: of our field.
    """
    return PeftArgument(default, name)


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


def only_native(why: str) -> CheckpointError:
    """Return the error of what PEFT's one adapter for a layer cannot express."""
    return CheckpointError(
        f"{why}, and PEFT has one adapter for a layer. Write {argument('format', 'native')}."
    )


def whole_width(site: Site) -> int:
    """Return the output width of the layer to which a part belongs, or of the layer itself."""
    rows = site.output_slice
    return site.d_out if rows is None else rows.groups * rows.width


def row_numbers(rows: OutputSlice) -> Tensor:
    """Return the indices of a part's output features."""
    every = torch.arange(rows.groups * rows.width)
    return every.view(rows.groups, rows.width)[:, rows.start : rows.stop].reshape(-1)  # [size]


# the attention matrices and feed-forward layers of AdapterHub
FLAGS = same("selfattn_lora", "intermediate_lora", "output_lora", "attn_matrices", "leave_out")
FEED_FORWARD = ("intermediate_lora", "output_lora")
MATRICES: dict[Role, str] = {"query": "q", "key": "k", "value": "v"}
"""The attention matrices that AdapterHub has."""


def place(config: AdapterConfig, sites: Sequence[Site], anatomy: Anatomy) -> AdapterConfig:
    """Return the config with the layers that a file has tensors for.

    In some families `adapters` calls the first layer the output and the last one intermediate, or
    leaves out cross-attention, and some releases adapt the gate, so the keys decide.
    """
    config = cast("TargetedConfig", config)
    roles = {site.role for site in sites}
    crossing = {p.site.path for p in config.placements(anatomy) if p.site.cross}
    if crossing and sites and not any(site.cross for site in sites):
        config = config.replace(exclude_modules=tuple(sorted(crossing)))
    first, last = config.intermediate_lora, config.output_lora
    if first != last and roles & {"mlp_in", "mlp_out"} == {"mlp_out" if first else "mlp_in"}:
        return config.replace(intermediate_lora=last, output_lora=first)
    if (first or last) and "mlp_gate" in roles:
        blocks = {block.layer: f"{block.path}." for block in anatomy.blocks}
        below = sorted({site.path.removeprefix(blocks[site.layer]) for site in sites})
        return config.replace(target_modules=tuple(below))
    return config


def as_flags(config: AdapterConfig, anatomy: Anatomy) -> AdapterConfig | None:
    """Return the config with its places in AdapterHub's fields; None if impossible."""
    config = cast("TargetedConfig", config)
    given = (config.target_modules, config.exclude_modules, config.layers_to_transform)
    if given == (None, None, None):
        return config
    sites = [placement.site for placement in config.placements(anatomy)]
    roles = {site.role for site in sites}
    if not roles & {*MATRICES, "mlp_in", "mlp_out"}:
        return None
    matrices = tuple(letter for role, letter in MATRICES.items() if role in roles)
    layers = {site.layer for site in sites}
    candidate = config.replace(
        selfattn_lora=bool(matrices),
        attn_matrices=matrices or ("q", "v"),
        intermediate_lora="mlp_in" in roles,
        output_lora="mlp_out" in roles,
        leave_out=tuple(b.layer for b in anatomy.blocks if b.layer not in layers),
        target_modules=None,
        exclude_modules=None,
        layers_to_transform=None,
    )
    found = {(p.site.path, p.site.role) for p in candidate.placements(anatomy)}
    return candidate if found == {(site.path, site.role) for site in sites} else None
