"""The sites that the names in a config select: layers, and parameters of other modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.errors import SiteError, listing

from ._patterns import ALL_LINEAR, matches


def layers_named(config: str, wanted: str | tuple[str, ...], anatomy: Anatomy) -> list[Site]:
    """Return the layers that `target_modules` names.

    Args:
        config: name of the config's class.
        wanted: the names.
        anatomy: of the model.

    Raises:
        SiteError: a name matches no layer.
    """
    if wanted == ALL_LINEAR:
        return [site for site in anatomy.linears() if site.layer >= 0 and site.is_called]
    sites = [site for site in anatomy if site.parameter is None and site.is_used]
    matching = [site for site in sites if matches(site.path, wanted)]
    missing = unmatched(wanted, sites)
    if missing or not matching:
        idle = [site.path for site in anatomy if not site.is_used and matches(site.path, wanted)]
        why = f" ({listing(idle)} only holds the table of others)" if idle else ""
        raise SiteError(
            f"{config}(target_modules={wanted!r}): no layer matches "
            f"{listing(missing) if matching else repr(wanted)}{why}. Write target_modules="
            f"'all-linear', or some of these names: {names_of(sites)}."
        )
    return matching


def parameters_named(
    config: str, wanted: tuple[str, ...], anatomy: Anatomy, layers: Sequence[Site]
) -> list[Site]:
    """Return the sites of the parameters that `target_parameters` names.

    Args:
        config: name of the config's class.
        wanted: the names.
        anatomy: of the model.
        layers: that `target_modules` names.

    Raises:
        SiteError: a name matches no parameter, or the weight of one of the layers.
    """
    weights = {name: site for name, site in anatomy.weights().items() if site.is_used}
    call = f"{config}(target_parameters={[*wanted]!r})"
    missing = [n for n in wanted if not any(matches(name, (n,)) for name in weights)]
    if missing:
        known = {".".join(n.split(".")[-2:]) for n, site in weights.items() if site.parameter}
        raise SiteError(
            f"{call}: no parameter with two or three dimensions matches {listing(missing)}. Write "
            f"target_modules=[…] for layers, or some of these: {listing(sorted(known)) or 'none'}."
        )
    found = [site for name, site in weights.items() if matches(name, wanted)]
    if twice := [site.path for site in found if site in layers]:
        raise SiteError(
            f"{call}: target_modules has the layer at {twice[0]!r} too. Leave it out of one of "
            f"them."
        )
    return found


def fields_at(sites: Iterable[Site]) -> dict[str, Any]:
    """Return the fields that name whole layers and parameters, parts of layers by their layer."""
    listed = [*sites]
    layers = dict.fromkeys(site.path for site in listed if site.parameter is None)
    parameters = dict.fromkeys(site.name for site in listed if site.parameter is not None)
    return {"target_modules": tuple(layers), "target_parameters": tuple(parameters) or None}


def unmatched(wanted: str | tuple[str, ...], sites: Sequence[Site]) -> list[str]:
    """Return the parts of a field that match no layer."""
    # a string is one pattern, a list holds endings
    parts = {wanted: wanted} if isinstance(wanted, str) else {name: (name,) for name in wanted}
    paths = {path for site in sites for path in (site.path, site.name)}
    return [n for n, part in parts.items() if not any(matches(path, part) for path in paths)]


def names_of(sites: Iterable[Site]) -> str:
    """Return the last names of layers, as a text for messages."""
    return listing(sorted({site.path.rpartition(".")[2] for site in sites}), limit=30)
