"""Adapters of parameters in PEFT's files: its field `target_parameters`.

PEFT wraps a module once for each of its parameters, in the order in which the module has them. The
keys of the last parameter are those of the module, each earlier one has `base_layer` once more;
no key has the parameter's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from adapterzoo.anatomy import Site
from adapterzoo.errors import CheckpointError, argument
from adapterzoo.formats.checkpoint import ModelInfo
from adapterzoo.spelling import PeftSpelling, peft_spellings

_WRAPPED = "base_layer"


def unwrapped(named: str) -> tuple[str, int]:
    """Return the path of the module in a path with wrappers, and how many wrap it."""
    words = named.split(".")
    inner = [word for word in words if word != _WRAPPED]
    last = len(words) - next((i for i, w in enumerate(reversed(words)) if w != _WRAPPED), 0)
    return ".".join(inner), len(words) - last


def adapted(named: str, own: Iterable[Site], targets: Sequence[str]) -> list[Site]:
    """Return the sites at a module whose parameters a file adapts, by PEFT's rule for names.

    Args:
        named: path of the module in the file.
        own: the sites at the module, in its order.
        targets: PEFT's `target_parameters`.
    """
    ends = [f".{target}" for target in targets]
    return [s for s in own if any(f".{named}.{parameter_of(s)}".endswith(end) for end in ends)]


def parameter_of(site: Site) -> str:
    """Return the name of the parameter that is adapted at a site."""
    return site.parameter or "weight"


def at_depth(named: str, depth: int, sites: Sequence[Site]) -> Site:
    """Return the site to which the keys of a wrapper belong.

    Args:
        named: path of the module in the file.
        depth: how many wrappers are around this one.
        sites: the adapted ones of the module.

    Raises:
        CheckpointError: there are more wrappers than parameters.
    """
    if depth >= len(sites):
        listed = ", ".join(map(repr, map(parameter_of, sites)))
        raise CheckpointError(
            f"the file has adapters of {depth + 1} or more parameters at {named!r}, but "
            f"target_parameters names {len(sites)} of this model there ({listed}). Load it into "
            f"the model that it was trained on."
        )
    return sites[-1 - depth]


def check_all(found: Mapping[str, Iterable[Site]], layers: Iterable[str]) -> None:
    """Check that the file has an adapter of each parameter that it names at a module.

    Args:
        found: path of a module in the file → its adapted sites.
        layers: names of the sites that have adapters.

    Raises:
        CheckpointError: one is missing, so that it is unknown to which the others belong.
    """
    there = {*layers}
    for named, sites in found.items():
        if missing := [parameter_of(s) for s in sites if s.parameter and s.name not in there]:
            raise CheckpointError(
                f"target_parameters names {missing[0]!r} at {named!r} too, and the file has no "
                f"adapter of it. Copy both files again from where they were saved."
            )


def is_written(site: Site, spelling: PeftSpelling, info: ModelInfo) -> bool:
    """Return whether an adapter is written as that of a parameter.

    So is that of a layer whose name PEFT would take for a former layer of experts.

    Raises:
        CheckpointError: it must be, and PEFT has no such adapter of the method.
    """
    if site.parameter is not None:
        return True
    name = site.path.rpartition(".")[2]
    related = {s.peft_type for s in peft_spellings.values() if s.of_parameters}
    if name not in info.split_experts or spelling.peft_type not in related:
        return False
    if not spelling.of_parameters:
        raise CheckpointError(
            f"the adapter is at {site.path!r}, and in a {info.model_class} PEFT takes the name "
            f"{name!r} for a layer of experts. Write {argument('format', 'native')}."
        )
    return True


def depths(sites: Iterable[Site], order: Sequence[str]) -> dict[str, int]:
    """Return how many wrappers are around that of each adapted parameter, by `Site.name`.

    Args:
        sites: adapted ones.
        order: the parameters of the model, in its order.
    """
    place = {name: number for number, name in enumerate(order)}
    by_module: dict[str, list[str]] = {}
    own = {site.name: site.path for site in sites if site.parameter is not None}
    for name in sorted(own, key=place.__getitem__, reverse=True):
        by_module.setdefault(own[name], []).append(name)
    return {name: depth for names in by_module.values() for depth, name in enumerate(names)}


def wrapped(path: str, depth: int) -> str:
    """Return the path of a module below this many wrappers."""
    return ".".join((path, *(_WRAPPED,) * depth))
