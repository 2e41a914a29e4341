"""Places of linear layers in AdapterHub's fields: attention matrices and feed-forward layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from adapterzoo.anatomy import Anatomy, Role, Site
from adapterzoo.configs import AdapterConfig
from adapterzoo.spelling import same

from ._targets import TargetedConfig

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
