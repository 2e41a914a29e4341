"""An adapter of this library as AdapterHub's config and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import argument
from adapterzoo.formats.checkpoint import ModelInfo, inexpressible
from adapterzoo.formats.places import Place, places_of, shared_tensors
from adapterzoo.spelling import Container, Tensors

from .config import added, joined, spelling_of, unsayable, write_config
from .names import (
    PART_ORDER,
    below_model,
    from_location,
    layout_of,
    location_of,
    name_of,
    prefix_of,
)
from .read import check_fused


def write_adapter(
    info: ModelInfo, config: AdapterConfig, name: str, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the fields of the config, and the tensors by AdapterHub's keys.

    Raises:
        CheckpointError: `adapters` does not have the family, the method or the places.
    """
    for member in config.members:
        check_convention(info, member)
    layout = layout_of(info)
    own = _without_added(info, config)
    members = [_as_flags(info, member) for member in own.values()]
    # a config that cannot be said is refused before its fields are exchanged
    written = write_config(joined(members))
    if layout.swapped:
        written = write_config(joined([_swapped(m) for m in members]))
    places = places_of(joined(members), info.anatomy)
    by_path: dict[str, tuple[Container, list[Place]]] = {}
    for place in places:
        for container in spelling_of(place.placement.config).containers:
            if location_of(container, place) is not None:
                path = _joined_path(prefix_of(info), name_of(info, container, place, layout))
                by_path.setdefault(f"{path}.{container.name}", (container, []))[1].append(place)
    found: dict[str, Tensor] = {}
    for path, (container, here) in by_path.items():
        for parameter, tensor in _tensors(container, here, tensors).items():
            found[f"{path}.{name}.{parameter}"] = tensor
    for number, member in zip(own, members, strict=True):
        shared = shared_tensors(tensors, number if len(config.members) > 1 else None)
        for container in spelling_of(member).containers if shared else ():
            if container.at == "model":
                path = _joined_path(prefix_of(info), below_model(info, container), container.name)
                theirs = {
                    f"{path}.{name}.{from_location(layout, key)}": tensor
                    for key, tensor in container.write(shared, member).items()
                }
                before = {key: t for key, t in found.items() if key.startswith(f"{path}.{name}.")}
                if theirs and before and not _are_equal(theirs, before):
                    raise inexpressible(
                        f"two methods of the union have adapter-wide tensors, and AdapterHub has "
                        f"one {path!r} for both"
                    )
                found |= theirs
    return written, found


def check_convention(info: ModelInfo, config: AdapterConfig) -> None:
    """Check that `adapters` computes a config in such a model as it says.

    Raises:
        CheckpointError: it computes another one.
    """
    theirs = spelling_of(config).convention(info.model_type, config).to_dict()
    differing = [name for name, value in config.to_dict().items() if theirs[name] != value]
    if differing:
        mine, other = (
            ", ".join(f"{name}={values[name]!r}" for name in differing)
            for values in (config.to_dict(), theirs)
        )
        raise inexpressible(
            f"in {info.model_type} models adapters computes {other}, and this adapter has {mine}, "
            f"so that the same tensors would give other outputs there. Train it again with {other} "
            f"for adapters"
        )


def _without_added(info: ModelInfo, config: AdapterConfig) -> dict[int, AdapterConfig]:
    """Return the members by number, without what `adapters` does besides in such a model.

    Raises:
        CheckpointError: the adapter does not do it.
    """
    own = {n: m for n, m in enumerate(config.members) if not spelling_of(m).added}
    mine = [m for n, m in enumerate(config.members) if n not in own]
    theirs = added([*own.values()], info.anatomy)
    if mine != theirs:
        raise inexpressible(
            f"in {info.model_type} models adapters computes this adapter together with "
            f"{theirs or 'nothing else'}, and here it is together with {mine or 'nothing else'}, "
            f"so that the same tensors would give other outputs there. Train it again with "
            f"{joined([*own.values(), *theirs])!r} for adapters"
        )
    return own


def _are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[key]) for key, t in one.items())


def _joined_path(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _as_flags(info: ModelInfo, config: AdapterConfig) -> AdapterConfig:
    """Return the same adapter, with its places in AdapterHub's fields."""
    flagged = spelling_of(config).as_flags(config, info.anatomy)
    if flagged is None:
        raise unsayable(
            config,
            "AdapterHub knows queries, keys and values, and the first and last feed-forward layer, "
            "of whole blocks",
        )
    return flagged


def _swapped(config: AdapterConfig) -> AdapterConfig:
    """Return the config with `adapters`' names of the family's feed-forward layers."""
    names = spelling_of(config).feed_forward
    if names is None:
        return config
    first, last = names
    values = config.to_dict()
    return config.replace(**{first: values[last], last: values[first]})


def _tensors(
    container: Container, places: Sequence[Place], tensors: Mapping[str, Tensor]
) -> Tensors:
    """Return the tensors of one container at one path; a fused layer's are concatenated."""
    if places[0].placement.site.output_slice is not None:
        check_fused(places)
        places = sorted(places, key=lambda place: PART_ORDER.index(place.placement.site.role))
        reason = spelling_of(places[0].placement.config).fused
        if reason is not None:
            hints = argument("format", "native"), argument("format", "peft")
            raise inexpressible(f"{reason}, such as {places[0].path!r}", *hints)
    elif len(places) > 1:
        raise inexpressible(
            f"{len(places)} adapters sit at {places[0].path!r}, where AdapterHub has one name"
        )
    each = []
    for place in places:
        start = place.key("")
        own = {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}
        each.append(container.write(own, place.placement.config))
    return {name: torch.cat([part[name] for part in each]) for name in each[0]}
