"""Names of a static head's layers in the config of a new adapter.

The head has no adapters. Each adapter has a copy of it instead, see `copies`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import nn

from adapterzoo.anatomy import Site
from adapterzoo.configs import AdapterConfig, ConfigUnion
from adapterzoo.errors import ConfigError, SiteError, listing
from adapterzoo.formats.peft.config import exactly
from adapterzoo.inject.building import layer_at, plain_modules
from adapterzoo.model.state import AdaptedModel, base_prefix
from adapterzoo.patterns import matches, short_names

from .copies import output_path, outside

_FIELDS = ("modules_to_save", "target_modules", "target_parameters", "exclude_modules")


def without_head(model: AdaptedModel, config: AdapterConfig) -> tuple[AdapterConfig, bool]:
    """Return a config without names of the head, and whether the adapter has its output layer.

    Args:
        model: with adapters.
        config: of a new adapter.

    Raises:
        ConfigError: the adapter has rows of the output layer as well.
        SiteError: the config names layers of the head that PEFT would adapt.
    """
    if all(member.get(name) is None for member in config.members for name in _FIELDS):
        return config, False
    head = {path: bool(module._parameters) for path, module in outside(model) if path}
    if not head:
        return config, False
    base = [f"{base_prefix(model)}{path}" for path, _ in plain_modules(model._backbone)]
    output, has_output, members = output_path(model), False, []
    for member in config.members:
        names = member.get("modules_to_save")
        listed = names if isinstance(names, tuple) else ()
        mine = [n for n in listed if any(matches(path, (n,)) for path in head)]
        has_output |= output is not None and matches(output, mine)
        if has_output and member.get("trainable_token_indices") is not None:
            raise ConfigError(
                f"modules_to_save={[*listed]!r} and trainable_token_indices both change the output "
                f"layer {output!r}. Leave one of them out."
            )
        saved = tuple(f"{path}." for path in head if matches(path, mine))
        _refuse_parameters(model, member, head)
        own = _of_base(model, member, base, head, saved)
        kept = tuple(n for n in listed if n not in mine or any(matches(p, (n,)) for p in base))
        members.append(own.replace(modules_to_save=kept or None) if mine else own)
    if all(one is other for one, other in zip(members, config.members, strict=True)):
        return config, False
    return members[0] if len(members) == 1 else ConfigUnion(*members), has_output


def names_of(model: AdaptedModel, sites: Iterable[Site]) -> str | list[str]:
    """Return the value of `target_modules` that names these layers and no others of the model."""
    chosen = list(dict.fromkeys(site.path for site in sites))
    layers = (site.path for site in (*model.anatomy, *model.anatomy.others))
    every = dict.fromkeys((*layers, *(path for path, _ in outside(model) if path)))
    names = short_names(chosen, every)
    return exactly(chosen) if names is None else list(names)


def _of_base(
    model: AdaptedModel,
    config: AdapterConfig,
    base: Iterable[str],
    head: Mapping[str, bool],
    saved: tuple[str, ...],
) -> AdapterConfig:
    """Return a config whose names of layers are those of the base model alone, in PEFT too.

    Args:
        model: with adapters.
        config: of a new adapter.
        base: paths of the modules of the base model in the whole model.
        head: path of a module of the head → whether it has parameters of its own.
        saved: paths in `modules_to_save`, each with a dot: PEFT does not adapt what is in them.

    Raises:
        SiteError: PEFT would adapt a layer of the head.
    """
    wanted: Any = config.get("target_modules")
    excluded: Any = config.get("exclude_modules")
    left_out = [path for path in head if excluded and matches(path, excluded)]
    if left_out:
        config = config.replace(exclude_modules=_without(excluded, base, head))
    named = [path for path in head if head[path] and matches(path, wanted or ())]
    if config.get("layers_to_transform") is not None:
        # for a layer outside of blocks PEFT needs its whole path then
        named = [path for path in named if path in wanted]
    mine = _without(wanted, base, head) if named else None
    if not mine:
        return config
    found = config.replace(target_modules=mine).below(base_prefix(model), model.anatomy)
    sites = (placement.site for placement in found.placements(model.anatomy))
    names = names_of(model, (site for site in sites if site.parameter is None))
    if theirs := [p for p in named if p not in left_out and not f"{p}.".startswith(saved)]:
        raise SiteError(_adapted_in_peft(config, "target_modules", theirs, names))
    return config.replace(target_modules=names)


def _without(
    wanted: str | tuple[str, ...], base: Iterable[str], head: Iterable[str]
) -> str | tuple[str, ...] | None:
    """Return names, or an expression, without those that only match the head; None if all do."""
    parts: Sequence[Any] = (wanted,) if isinstance(wanted, str) else [(name,) for name in wanted]
    kept = [
        part
        for part in parts
        if any(matches(path, part) for path in base) or not any(matches(p, part) for p in head)
    ]
    return next(iter(kept), None) if isinstance(wanted, str) else tuple(n for (n,) in kept) or None


def _refuse_parameters(model: AdaptedModel, config: AdapterConfig, head: Iterable[str]) -> None:
    """Refuse names of parameters of the head, which PEFT would adapt."""
    wanted = config.get("target_parameters") or ()
    layers = [(path, layer_at(cast("nn.Module", model), path)) for path in head if wanted]
    names = [f"{path}.{name}" for path, layer in layers for name in layer._parameters]
    theirs = [name for name in names if matches(name, wanted)]
    mine = [f"{base_prefix(model)}{n}" for n in model.anatomy.weights() if matches(n, wanted)]
    if theirs and mine:
        raise SiteError(_adapted_in_peft(config, "target_parameters", theirs, mine))


def _adapted_in_peft(config: AdapterConfig, field: str, theirs: list[str], mine: object) -> str:
    """Return the message for a field that names a part of the head."""
    wanted = config.get(field)
    shown = [*wanted] if isinstance(wanted, tuple) else wanted
    return (
        f"{type(config).__name__}({field}={shown!r}): in PEFT it adapts {listing(theirs)} of the "
        f"head too, which has no adapters here. Write {field}={mine!r} for the base model alone."
    )
