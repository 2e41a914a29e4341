"""The tensors of an AdapterHub checkpoint under our keys.

Keys are `<path>.<container>.<adapter>.<parameter>`; the spelling of the method says what the path
leads to. In fused layers AdapterHub keeps the parts one under the other in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError, argument
from adapterzoo.formats.checkpoint import ModelInfo
from adapterzoo.formats.places import Place, places_of, shared_key
from adapterzoo.spelling import AdapterHubFile, Container, Tensors, adapterhub_spellings

from .config import added, joined, read_config, spelling_of
from .names import (
    PART_ORDER,
    BlockLocation,
    find_layer_site,
    find_location,
    location_of,
    to_location,
)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of AdapterHub, taken apart.

    Attributes:
        text: the key.
        container: what holds the tensor.
        path: what precedes the container.
        parameter: what follows the adapter's name.
    """

    text: str
    container: Container
    path: str
    parameter: str


def take_apart(text: str, name: str, containers: Sequence[Container]) -> Key | None:
    """Return a key in its parts; None where it is of none of the containers.

    Args:
        text: the key.
        name: of the adapter in the checkpoint.
        containers: of its method.
    """
    for container in containers:
        for word in (container.name, *container.aliases):
            path, marker, parameter = f".{text}".partition(f".{word}.{name}.")
            if marker:
                return Key(text, container, path.removeprefix("."), parameter)
    return None


def read_adapter(
    info: ModelInfo, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Return the config, with what only the keys tell, and the tensors under our keys.

    A tensor without a place in the model keeps its key of AdapterHub, so that the comparison with
    the model names it.

    Raises:
        CheckpointError: there is no such method here, or a tensor is not what it should be.
        SiteError: the model lacks a site that the config asks for.
    """
    words = frozenset(word for key in tensors for word in key.split("."))
    config = read_config(metadata, AdapterHubFile(metadata.get("version"), words))
    members: Sequence[AdapterConfig] = config.members
    containers = {c.name: c for m in members for c in spelling_of(m).containers}
    found = {text: take_apart(text, str(metadata.get("name")), [*containers.values()])
             for text in tensors}  # fmt: skip
    keys = [key for key in found.values() if key is not None and not _is_repeated(key)]
    sites = [site for key in keys if (site := _site(info, key)) is not None]
    members = [spelling_of(m).place(m, sites, info.anatomy) for m in members]
    members = [spelling_of(m).convention(info.model_type, m) for m in members]
    config = joined([*members, *added(members, info.anatomy)])
    members = config.members
    places = places_of(config, info.anatomy)
    here: dict[tuple[str, BlockLocation | None], list[Place]] = {}
    for place in places:
        for container in spelling_of(place.placement.config).containers:
            if (location := location_of(container, place)) is not None:
                here.setdefault((container.name, location), []).append(place)
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in keys:
        groups.setdefault((key.container.name, key.path), []).append(key)
    named = {text: tensors[text] for text, key in found.items() if key is None}
    for (container_name, path), own in groups.items():
        location = find_location(info, own[0].container, path)
        at = here.get((container_name, location), [])
        try:
            named |= _read_group(info, own, tensors, at, members, location)
        except CheckpointError as error:
            raise CheckpointError(f"at {path!r}: {error}") from error
    return config, named


def _is_repeated(key: Key) -> bool:
    return any(f".{key.path}".endswith(f".{end}") for end in key.container.duplicates)


def _site(info: ModelInfo, key: Key) -> Site | None:
    return find_layer_site(info, key.path) if key.container.at == "layer" else None


def _read_group(
    info: ModelInfo,
    keys: Sequence[Key],
    tensors: Mapping[str, Tensor],
    places: Sequence[Place],
    members: Sequence[AdapterConfig],
    location: BlockLocation | None,
) -> dict[str, Tensor]:
    """Return the tensors of one container at one path."""
    texts = {key.text: tensors[key.text] for key in keys}
    own = {key.parameter: tensors[key.text] for key in keys}
    container = keys[0].container
    if container.at == "model":
        holding = [(n, m) for n, m in enumerate(members) if _holds(m, container)]
        if location is None or not holding:
            return texts
        own = {to_location(info, parameter): tensor for parameter, tensor in own.items()}
        # the members of a union share them
        return {
            shared_key(parameter, number if len(members) > 1 else None): tensor
            for number, config in holding
            for parameter, tensor in _read(_of(config, container), own, config).items()
        }
    if not places:
        return texts
    fused = places[0].placement.site.output_slice is not None
    if fused:
        check_fused(places)
        places = sorted(places, key=lambda place: PART_ORDER.index(place.placement.site.role))
        if any(t.dim() == 0 or t.shape[0] % len(places) for t in own.values()):
            return texts
    found: dict[str, Tensor] = {}
    for number, place in enumerate(places):
        config = place.placement.config
        part = {k: t.chunk(len(places))[number] for k, t in own.items()} if fused else own
        mine = _read(_of(config, container), part, config)
        found |= {place.key(parameter): tensor for parameter, tensor in mine.items()}
    return found


def _containers(config: AdapterConfig) -> dict[str, Container]:
    return {c.name: c for c in adapterhub_spellings[config.architecture].containers}


def _holds(config: AdapterConfig, container: Container) -> bool:
    return container.name in _containers(config) and _of(config, container).held_by(config)


def _of(config: AdapterConfig, container: Container) -> Container:
    """Return the container as the method of the config declares it."""
    return _containers(config)[container.name]


def _read(container: Container, tensors: Tensors, config: AdapterConfig) -> Tensors:
    try:
        return container.read(tensors, config)
    except KeyError:
        # the comparison with the model shows what is missing
        return tensors


def check_fused(places: Sequence[Place]) -> None:
    """Refuse a fused layer whose parts AdapterHub takes for others.

    Raises:
        CheckpointError: the layer does not hold queries, keys and values one under the other.
    """
    for place in places:
        site = place.placement.site
        rows = site.output_slice
        if rows is None or rows.groups != 1 or site.role not in PART_ORDER:
            raise CheckpointError(
                f"in the fused layer {site.path!r} adapters takes other rows for its parts than "
                f"those of the model: it knows queries, keys and values one under the other, and "
                f"no parts of a feed-forward layer. Nothing has been done. Train the adapter at "
                f"other layers, or write {argument('format', 'native')} to save it."
            )
