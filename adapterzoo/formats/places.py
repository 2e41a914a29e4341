"""The keys of the tensors of each placement of a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from adapterzoo.anatomy import Anatomy, part_names
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.inject.building import inject_path


def shared_key(parameter: str, number: int | None = None) -> str:
    """Return the key of an adapter-wide tensor: the path is that of the base model.

    Args:
        parameter: of the module that `AdapterConfig.shared` made.
        number: of the config in a union; None outside a union.
    """
    return f"/{parameter}" if number is None else f"/{number}.{parameter}"


def shared_tensors(tensors: Mapping[str, Tensor], number: int | None = None) -> dict[str, Tensor]:
    """Return the adapter-wide tensors of a config, by parameter; `number` as in `shared_key`."""
    start = shared_key("", number)
    return {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}


@dataclass(frozen=True, slots=True)
class Place:
    """One adapter in a checkpoint.

    Attributes:
        placement: its site, and the config that makes it.
        path: of the module that holds it.
        part: prefix of its parameters' names if several adapters share the module, as "query.", or
            a parameter of the module is adapted, as "down_proj.mlp_out.".
    """

    placement: Placement
    path: str
    part: str

    def key(self, parameter: str) -> str:
        """Return the key of one of its parameters in `Checkpoint.adapter`."""
        return f"{self.path}/{self.part}{parameter}"


def places_of(config: AdapterConfig, anatomy: Anatomy) -> list[Place]:
    """Return the places of a config at linear layers and in the residual stream, in model order.

    Args:
        config: of an adapter.
        anatomy: of the model.

    Raises:
        SiteError: the model has no place that the config asks for.
    """
    by_path: dict[str, list[Placement]] = {}
    for placement in config.all_placements(anatomy):
        by_path.setdefault(inject_path(placement.site), []).append(placement)
    found: list[Place] = []
    for path, placements in by_path.items():
        sites = [p.site for p in placements]
        if len(sites) == 1 and sites[0].output_slice is None and sites[0].parameter is None:
            found.append(Place(placements[0], path, ""))
            continue
        for placement, name in zip(placements, part_names(sites), strict=True):
            parameter = placement.site.parameter
            owner = f"{parameter.rpartition('.')[2]}." if parameter else ""
            found.append(Place(placement, path, f"{owner}{name}."))
    return found


def plain(
    config: AdapterConfig, tensors: Mapping[str, Tensor], anatomy: Anatomy
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Return an adapter as files of the peers hold it, see `AdapterConfig.plain`.

    Args:
        config: of the adapter.
        tensors: of all its places.
        anatomy: of the model.
    """
    exported = config.plain
    if exported is config or exported == config:
        return config, dict(tensors)
    return exported, _changed(
        config, tensors, anatomy, lambda placed, tensors: placed.plain_tensors(tensors)
    )


def own(
    config: AdapterConfig, tensors: Mapping[str, Tensor], anatomy: Anatomy
) -> dict[str, Tensor]:
    """Return the tensors of an adapter from those that `plain` returned.

    Args:
        config: of the adapter.
        tensors: of all places, as files of the peers hold them.
        anatomy: of the model.
    """
    return _changed(config, tensors, anatomy, lambda placed, tensors: placed.own_tensors(tensors))


def _changed(
    config: AdapterConfig,
    tensors: Mapping[str, Tensor],
    anatomy: Anatomy,
    change: Callable[[AdapterConfig, Mapping[str, Tensor]], Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Return the tensors, with those of each place changed."""
    found = dict(tensors)
    for place in places_of(config, anatomy):
        start = place.key("")
        here = {k.removeprefix(start): found.pop(k) for k in [*found] if k.startswith(start)}
        if not here:
            continue
        changed = change(place.placement.config, here)
        found |= {place.key(name): tensor for name, tensor in changed.items()}
    return found
