"""The tensors of an AdapterHub checkpoint under the keys of this library.

`<path>.adapters.<name>.<parameter>` is a bottleneck, `<path>.loras.<name>.<parameter>` LoRA or
DoRA. In fused layers AdapterHub keeps the parts one under the other in one tensor; the magnitudes
of DoRA are the weight `[d_out, 1]` of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from adapterzoo.anatomy import Role, Site
from adapterzoo.configs import AdapterConfig, ConfigUnion
from adapterzoo.errors import CheckpointError
from adapterzoo.methods._low_rank_config import LowRankConfig

from .adapterhub_names import find_block, find_layer, find_sublayer
from .adapterhub_quirks import refuse_quirks
from .formats import Facts
from .places import Place, places_of

BOTTLENECK, LORA = "adapters", "loras"
PART_ORDER: tuple[Role, ...] = ("query", "key", "value")
LOCATIONS = {"attention": "mh_adapter", "cross": "cross_adapter", "mlp": "output_adapter"}

_OLD_CONTAINERS = re.compile(r"(?<=\.)(?:attention|layer)_text_(?:task|lang)_adapters(?=\.)")
_OLD_INVERTIBLE = "invertible_lang_adapters"
_FEATURES: Mapping[str, str] = {
    "invertible_adapters": "invertible adapters",
    "prefix_tunings": "prefix tuning",
    "prefix_gates": "prefix tuning",
    "prompt_tunings": "prompt tuning",
    "prompt_tuning": "prompt tuning",
    "refts": "ReFT",
    "shared_parameters": "parameters that layers share (Compacter, VeRA)",
}


@dataclass(frozen=True, slots=True)
class Key:
    """A key of AdapterHub, taken apart.

    Attributes:
        text: the key.
        container: "adapters" or "loras"; empty for a key that is neither.
        path: of the module that has the container.
        parameter: of the adapter.
    """

    text: str
    container: str
    path: str
    parameter: str


@dataclass(frozen=True, slots=True)
class _Found:
    """Where a key leads; None where nothing is there.

    Attributes:
        key: the key.
        spot: number of the block and location of a bottleneck, or -1 and path of a layer.
        site: of the layer.
    """

    key: Key
    spot: tuple[int, str] | None = None
    site: Site | None = None


def take_apart(key: str, name: str) -> Key:
    """A key in its parts; `name` is that of the adapter in the checkpoint."""
    renamed = _OLD_CONTAINERS.sub(BOTTLENECK, key).replace(_OLD_INVERTIBLE, "invertible_adapters")
    for container in (BOTTLENECK, LORA):
        path, marker, parameter = renamed.partition(f".{container}.{name}.")
        if marker:
            return Key(key, container, path, parameter)
    return Key(key, "", renamed, "")


def foreign_feature(keys: list[Key]) -> tuple[str, str] | None:
    """The first method that this library does not have, with a key that needs it."""
    for key in keys:
        words = key.path.split(".") if not key.container else ()
        for word in words:
            if word in _FEATURES:
                return _FEATURES[word], key.text
    return None


def is_invertible(key: Key) -> bool:
    """Whether the key belongs to an invertible adapter."""
    return not key.container and "invertible_adapters" in key.path.split(".")


def read_adapter(
    facts: Facts, config: AdapterConfig, keys: list[Key], tensors: Mapping[str, Tensor]
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """The config, with what only the keys tell, and the tensors by the keys of this library.

    What has no place in the model keeps its key of AdapterHub, so that the comparison with the
    model names it.

    Raises:
        CheckpointError: a tensor has a value that nothing here could use.
        SiteError: the model has no place that the config asks for.
    """
    found = [_find(facts, key) for key in keys]
    config = _with_layers_of(facts, config, [f.site for f in found if f.site is not None])
    every = places_of(config, facts.anatomy)
    refuse_quirks(facts, every)
    places: dict[tuple[int, str] | None, list[Place]] = {}
    for place in every:
        places.setdefault(_spot(place), []).append(place)
    named: dict[str, Tensor] = {}
    for item in found:
        here = places.get(item.spot, [])
        tensor = tensors[item.key.text]
        entries = _entries(facts, here, item.key, tensor)
        named.update(entries if here else {item.key.text: tensor})
    return config, _without_twins(facts, named)


def _find(facts: Facts, key: Key) -> _Found:
    located = find_block(facts, key.path) if key.container else None
    if located is None:
        return _Found(key)
    block, rest = located
    if key.container == LORA:
        site = find_layer(block, rest)
        return _Found(key) if site is None else _Found(key, (-1, site.path), site)
    sub = find_sublayer(block, rest)
    return _Found(key, None if sub is None else (block.layer, LOCATIONS[sub.kind]))


def _spot(place: Place) -> tuple[int, str]:
    location = place.placement.location
    return (place.placement.site.layer, location) if location else (-1, place.path)


def _with_layers_of(facts: Facts, config: AdapterConfig, sites: list[Site]) -> AdapterConfig:
    """The config with the feed-forward layers that the checkpoint has.

    In some families `adapters` calls the first layer the output and the last one intermediate,
    and some releases adapt the gate: the keys decide.
    """
    if isinstance(config, ConfigUnion):
        return ConfigUnion(*(_with_layers_of(facts, member, sites) for member in config.configs))
    if not isinstance(config, LowRankConfig):
        return config
    roles = {site.role for site in sites}
    first, last = config.intermediate_lora, config.output_lora
    if first != last and roles & {"mlp_in", "mlp_out"} == {"mlp_out" if first else "mlp_in"}:
        return config.replace(intermediate_lora=last, output_lora=first)
    if (first or last) and "mlp_gate" in roles:
        paths = {block.layer: f"{block.path}." for block in facts.anatomy.blocks}
        below = sorted({site.path.removeprefix(paths[site.layer]) for site in sites})
        return config.replace(target_modules=tuple(below))
    return config


def _entries(facts: Facts, here: list[Place], key: Key, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor of AdapterHub as those of the places that it holds."""
    parameter = key.parameter
    if key.container == LORA:
        parameter = "m" if parameter == "m.weight" else parameter
        if parameter == "m" and tensor.dim() == 2 and tensor.shape[1] == 1:
            tensor = tensor.squeeze(1)  # [d_out]
    fused = [place for place in here if place.placement.site.output_slice is not None]
    if not fused:
        return {place.key(parameter): tensor for place in here}
    check_fused(facts, fused)
    ordered = sorted(fused, key=lambda place: PART_ORDER.index(place.placement.site.role))
    if tensor.dim() == 0 or tensor.shape[0] % len(ordered):
        return {key.text: tensor}
    chunks = tensor.chunk(len(ordered))
    return {p.key(parameter): part for p, part in zip(ordered, chunks, strict=True)}


def check_fused(facts: Facts, places: list[Place]) -> None:
    """Raise where AdapterHub's parts of a fused layer are not those of the model.

    Raises:
        CheckpointError: the layer does not hold queries, keys and values one under the other.
    """
    for place in places:
        site = place.placement.site
        if (
            site.output_slice is None
            or site.output_slice.groups != 1
            or site.role not in PART_ORDER
        ):
            raise CheckpointError(
                f"{facts.call}: in the fused layer {site.path!r} adapters takes other rows for its "
                f"parts than those of the model: it knows queries, keys and values one under the "
                f"other, and no parts of a feed-forward layer. Nothing has been done. Train it "
                f"anew at other layers, or write format='native' to save one of this library."
            )


def _without_twins(facts: Facts, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the second names under which AdapterHub saves the norm before a bottleneck."""
    twin = "adapter_norm_before."
    kept = {key: tensor for key, tensor in named.items() if twin not in key}
    for key, tensor in named.items():
        first = kept.get(key.replace(twin, "adapter_down.0."))
        if twin not in key:
            continue
        if first is None or first.shape != tensor.shape or not bool((first == tensor).all()):
            raise CheckpointError(
                f"{facts.call}: {key!r} is another tensor than 'adapter_down.0', and both are the "
                f"norm before one bottleneck. Copy the checkpoint again from where it was saved."
            )
    return kept
