"""An adapter of this library as AdapterHub's config and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adapterzoo.anatomy import Block, Site
from adapterzoo.configs import AdapterConfig, ConfigUnion
from adapterzoo.errors import CheckpointError
from adapterzoo.methods._low_rank_config import LowRankConfig

from .adapterhub_config import write_config
from .adapterhub_keys import BOTTLENECK, LOCATIONS, LORA, PART_ORDER, check_fused
from .adapterhub_names import Layout, layout_of, name_of_layer, name_of_sublayer
from .adapterhub_quirks import refuse_quirks
from .formats import Facts
from .places import Place, places_of


def write_adapter(
    facts: Facts, config: AdapterConfig, name: str, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of the config, and the tensors by AdapterHub's keys.

    Raises:
        CheckpointError: `adapters` does not know the family, the method or the places.
    """
    layout = layout_of(facts)
    plain = _as_flags(facts, config)
    written = write_config(facts.call, _swapped(plain) if layout.swapped else plain)
    by_name: dict[str, list[Place]] = {}
    places = places_of(plain, facts.anatomy)
    refuse_quirks(facts, places)
    for place in places:
        by_name.setdefault(_name_of(facts, place, layout), []).append(place)
    found: dict[str, Tensor] = {}
    for path, here in by_name.items():
        start = f"{facts.prefix}.{path}" if facts.prefix else path
        found.update(_tensors(facts, f"{start}.{name}.", here, tensors))
    return written, found


def _as_flags(facts: Facts, config: AdapterConfig) -> AdapterConfig:
    """The same adapters, with their places and their scaling said in AdapterHub's fields."""
    if isinstance(config, ConfigUnion):
        return ConfigUnion(*(_as_flags(facts, member) for member in config.configs))
    if not isinstance(config, LowRankConfig):
        return config
    if config.use_rslora:
        config = config.replace(alpha=config.scaling_at("") * config.r, use_rslora=False)
    given = (config.target_modules, config.exclude_modules, config.layers_to_transform)
    if given == (None, None, None):
        return config
    sites = [placement.site for placement in config.placements(facts.anatomy)]
    roles = {site.role for site in sites}
    matrices = tuple(str(role)[0] for role in PART_ORDER if role in roles)
    layers = {site.layer for site in sites}
    flagged = {
        "selfattn_lora": bool(matrices),
        "attn_matrices": matrices or ("q", "v"),
        "intermediate_lora": "mlp_in" in roles,
        "output_lora": "mlp_out" in roles,
        "leave_out": tuple(b.layer for b in facts.anatomy.blocks if b.layer not in layers),
    }
    if roles & {*PART_ORDER, "mlp_in", "mlp_out"}:
        nowhere = dict.fromkeys(("target_modules", "exclude_modules", "layers_to_transform"))
        candidate = config.replace(**flagged, **nowhere)
        mine = [placement.site for placement in candidate.placements(facts.anatomy)]
        if {_spot(site) for site in mine} == {_spot(site) for site in sites}:
            return candidate
    raise CheckpointError(
        f"{facts.call}: AdapterHub's format cannot say where {config!r} has its adapters: it knows "
        f"queries, keys and values, and the first and last feed-forward layer, of whole blocks. "
        f"Nothing has been written. Write format='native' or format='peft'."
    )


def _spot(site: Site) -> tuple[str, str]:
    return site.path, str(site.role)


def _swapped(config: AdapterConfig) -> AdapterConfig:
    """The config with the names that `adapters` has for the feed-forward layers of this family."""
    if isinstance(config, ConfigUnion):
        return ConfigUnion(*map(_swapped, config.configs))
    if not isinstance(config, LowRankConfig):
        return config
    return config.replace(
        intermediate_lora=config.output_lora, output_lora=config.intermediate_lora
    )


def _name_of(facts: Facts, place: Place, layout: Layout) -> str:
    site = place.placement.site
    block = next((b for b in facts.anatomy.blocks if b.layer == site.layer), None)
    found = None if block is None else _name_in(block, place, layout)
    if found is None:
        raise CheckpointError(
            f"{facts.call}: AdapterHub's format has no name for an adapter at {place.path!r} of a "
            f"{facts.model_type}. Nothing has been written. Write format='native'."
        )
    return found


def _name_in(block: Block, place: Place, layout: Layout) -> str | None:
    location = place.placement.location
    if location:
        sub = next(s for s in block.sublayers if LOCATIONS[s.kind] == location)
        name = name_of_sublayer(block, sub, layout)
        return None if name is None else f"{name}.{BOTTLENECK}"
    return f"{name_of_layer(block, place.placement.site, layout)}.{LORA}"


def _tensors(
    facts: Facts, start: str, places: list[Place], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of one module of AdapterHub; those of a fused layer one under the other."""
    if places[0].placement.site.output_slice is not None:
        check_fused(facts, places)
        places = sorted(places, key=lambda place: PART_ORDER.index(place.placement.site.role))
        if places[0].placement.config.architecture == "dora":
            raise CheckpointError(
                f"{facts.call}: adapters cannot run DoRA in the fused layer {places[0].path!r}. "
                f"Nothing has been written. Write format='native' or format='peft'."
            )
    elif len(places) > 1:
        raise CheckpointError(
            f"{facts.call}: {len(places)} adapters sit at {places[0].path!r}, and AdapterHub has "
            f"one name for them. Nothing has been written. Write format='native'."
        )
    own = places[0].key("")
    found: dict[str, Tensor] = {}
    for key in tensors:
        parameter = key.removeprefix(own)
        if parameter == key:
            continue
        tensor = torch.cat([tensors[place.key(parameter)] for place in places])
        found.update({start + theirs: tensor for theirs in _parameters(places[0], parameter)})
        if parameter == "m":
            found[f"{start}m.weight"] = tensor.unsqueeze(1)  # [d_out, 1]
    return found


def _parameters(place: Place, parameter: str) -> tuple[str, ...]:
    """AdapterHub's names of a parameter; it saves the norm before a bottleneck under two."""
    first, _, end = parameter.rpartition(".")
    if place.placement.location:
        norm = first == "adapter_down.0" and place.placement.config.to_dict()["ln_before"]
        return (f"adapter_norm_before.{end}", parameter) if norm else (parameter,)
    return () if parameter == "m" else (parameter,)
