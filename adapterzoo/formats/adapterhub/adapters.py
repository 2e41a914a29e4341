"""Adapters in AdapterHub's files: configs and tensors in our terms, and back.

Configs follow the spellings of the methods. Keys of tensors are
`<path>.<container>.<adapter>.<parameter>`; the spelling says what the path leads to. In fused
layers AdapterHub keeps the parts one under the other in one tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy
from adapterzoo.config import AdapterConfig, ConfigUnion
from adapterzoo.errors import AdapterZooError, CheckpointError, argument, listing
from adapterzoo.formats.checkpoint import (
    Place,
    SavedModel,
    inexpressible,
    method_of,
    places_of,
    shared_key,
    shared_tensors,
)
from adapterzoo.formats.files import AGAIN
from adapterzoo.spelling import (
    AdapterHubFile,
    AdapterHubSpelling,
    Container,
    Tensors,
    adapterhub_spellings,
)

from .names import (
    PART_ORDER,
    BlockLocation,
    below_model,
    find_layer_site,
    find_location,
    from_location,
    layout_of,
    location_of,
    name_of,
    prefix_of,
    to_location,
)

# the release whose format is written
VERSION = "adapters.1.3.0"


def joined(members: Sequence[AdapterConfig]) -> AdapterConfig:
    """Return a union of the configs, or the only one."""
    return members[0] if len(members) == 1 else ConfigUnion(*members)


def read_config(metadata: Mapping[str, Any], file: AdapterHubFile) -> AdapterConfig:
    """Return the config in an `adapter_config.json`.

    Raises:
        CheckpointError: there is no such method here, or a value is not legal.
    """
    values = metadata.get("config")
    try:
        if isinstance(values, str):
            config = AdapterConfig.load(values)
            for member in config.members:
                spelling_of(member)
            return config
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"adapter_config.json has config={values!r}, which is not an object of fields. "
                f"{AGAIN}."
            )
        if values.get("architecture") != ConfigUnion.architecture:
            return _read_member(values, file)
        members = values.get("configs")
        members = members if isinstance(members, list) else [members]
        return ConfigUnion(*(_read_member(member, file) for member in members))
    except CheckpointError:
        raise
    except AdapterZooError as error:
        raise CheckpointError(
            f"the config of the checkpoint is not legal; nothing has been loaded. {error}"
        ) from error


def spelling_of(config: AdapterConfig) -> AdapterHubSpelling:
    """Return how AdapterHub spells the method of a config.

    Raises:
        CheckpointError: it does not have the method.
    """
    if config.architecture not in adapterhub_spellings:
        raise unsayable(config, f"{type(config).__name__} is not a method of adapters")
    return adapterhub_spellings[config.architecture]


def added(members: Sequence[AdapterConfig], anatomy: Anatomy) -> list[AdapterConfig]:
    """Return the configs that `adapters` adds to an adapter of these; no file names them."""
    found = (s.added(members, anatomy) for s in adapterhub_spellings.values() if s.added)
    return [config for config in found if config is not None]


def _read_member(values: object, file: AdapterHubFile) -> AdapterConfig:
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"the union in adapter_config.json has the member {values!r}, which is not an object. "
            f"{AGAIN}."
        )
    name = values.get("architecture")
    spelling = method_of(
        values,
        "architecture",
        [s for s in adapterhub_spellings.values() if name in s.architecture],
        f"AdapterHub that exist here: {listing(adapterhub_spellings, limit=40)}. Nothing has been "
        f"loaded.",
    )
    dropped = {*spelling.fixed, *spelling.constants, "architecture"}
    fields = {spelling.fields.get(k, str(k)): v for k, v in values.items() if k not in dropped}
    fields = {**spelling.read_fields(fields, file), **spelling.implied}
    return AdapterConfig.from_dict({**fields, "architecture": spelling.config.architecture})


def write_config(config: AdapterConfig) -> dict[str, Any]:
    """Return the config as `adapters` writes it.

    Raises:
        CheckpointError: `adapters` has no such adapter.
    """
    if isinstance(config, ConfigUnion):
        members = [write_config(member) for member in config.configs]
        for (one, written), (other, also) in itertools.combinations(
            zip(config.configs, members, strict=True), 2
        ):
            alike = written.get("architecture") == also.get("architecture")
            everywhere = not (written.get("leave_out") or also.get("leave_out"))
            if alike and everywhere and not spelling_of(one).joins(one, other):
                raise unsayable(
                    config,
                    f"adapters refuses unions of {one!r} and {other!r}, which are one method there",
                )
        return {"architecture": config.architecture, "configs": members}
    spelling = spelling_of(config)
    if (reason := spelling.unsayable(config)) is not None:
        raise unsayable(config, reason)
    values = config.to_dict()
    legal = {**{f.name: _default(f) for f in dataclasses.fields(config)}, **spelling.implied}
    sayable = {*spelling.fields.values(), *spelling.omitted}
    # `to_dict` leaves out fields that only this library has
    wrong = [k for k, v in legal.items() if k not in sayable and values.get(k, v) != v]
    if wrong:
        shown = ", ".join(f"{name}={values[name]!r}" for name in sorted(wrong))
        raise unsayable(config, f"adapters has no {shown}")
    written = {theirs: values[ours] for theirs, ours in spelling.fields.items()}
    written |= {**spelling.fixed, **spelling.constants}
    name = spelling.architecture[0]
    return written if name is None else {"architecture": name, **written}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def unsayable(config: AdapterConfig, why: str) -> CheckpointError:
    """Return the error for a config that AdapterHub's format cannot express."""
    return inexpressible(f"AdapterHub's format cannot express {config!r}: {why}")


# fields that are left out at these values, since old hashes did not know them
_NEW_FIELDS: Mapping[str, object] = {
    "phm_layer": True,
    "phm_dim": 4,
    "factorized_phm_W": True,
    "shared_W_phm": False,
    "shared_phm_rule": True,
    "factorized_phm_rule": False,
    "phm_c_init": "normal",
    "phm_init_range": 0.0001,
    "learn_phm": True,
    "hypercomplex_nonlinearity": "glorot-uniform",
    "phm_rank": 1,
    "phm_bias": True,
    "init_weights": "bert",
    "scaling": 1.0,
}


def get_adapter_config_hash(
    config: Mapping[str, Any], length: int = 16, ignore_params: Collection[str] = ()
) -> str:
    """Return the hash that `adapters` gives a config.

    Different configs can have one hash: fields that are false are left out, and so are
    those of Compacter at their defaults.

    Args:
        config: a config, or the dict in a file of AdapterHub.
        length: number of hexadecimal digits.
        ignore_params: fields that do not count.

    Raises:
        CheckpointError: `adapters` has no such config.
    """
    values: Any = write_config(config) if isinstance(config, AdapterConfig) else dict(config)
    if values.get("architecture") == "union" and isinstance(config, AdapterConfig):
        members = enumerate(values["configs"])
        values = {f"{i}.{key}": value for i, member in members for key, value in member.items()}
    kept = _without_false({k: v for k, v in values.items() if k not in ignore_params})
    for name, default in _NEW_FIELDS.items():
        if kept.get(name) == default:
            del kept[name]
    text = json.dumps(kept, sort_keys=True)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:length]


def _without_false(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_false(inner) for key, inner in value.items() if inner}


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
    info: SavedModel, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Return the config, completed from the keys, and the tensors under our keys.

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
    keys = [
        key
        for key in found.values()
        if key is not None
        and not any(f".{key.path}".endswith(f".{end}") for end in key.container.duplicates)
    ]
    paths = [key.path for key in keys if key.container.at == "layer"]
    sites = [site for path in paths if (site := find_layer_site(info, path)) is not None]
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


def _read_group(
    info: SavedModel,
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
            for parameter, tensor in _from_container(_of(config, container), own, config).items()
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
        mine = _from_container(_of(config, container), part, config)
        found |= {place.key(parameter): tensor for parameter, tensor in mine.items()}
    return found


def _containers(config: AdapterConfig) -> dict[str, Container]:
    return {c.name: c for c in adapterhub_spellings[config.architecture].containers}


def _holds(config: AdapterConfig, container: Container) -> bool:
    return container.name in _containers(config) and _of(config, container).held_by(config)


def _of(config: AdapterConfig, container: Container) -> Container:
    """Return the container as the method of the config declares it."""
    return _containers(config)[container.name]


def _from_container(container: Container, tensors: Tensors, config: AdapterConfig) -> Tensors:
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


def write_adapter(
    info: SavedModel, config: AdapterConfig, name: str, tensors: Mapping[str, Tensor]
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
        for parameter, tensor in _to_container(container, here, tensors).items():
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


def check_convention(info: SavedModel, config: AdapterConfig) -> None:
    """Check that `adapters` computes a config in such a model as its fields say.

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


def _without_added(info: SavedModel, config: AdapterConfig) -> dict[int, AdapterConfig]:
    """Return the members by number, without those that `adapters` adds in such a model.

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


def _as_flags(info: SavedModel, config: AdapterConfig) -> AdapterConfig:
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


def _to_container(
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
