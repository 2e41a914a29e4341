"""Parameters that several adapters share, and output layers that are tied anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from adapterzoo.composition import Composition
from adapterzoo.config import MultiTaskConfig, architectures
from adapterzoo.errors import ConfigError, FieldError, StateError, listing
from adapterzoo.model.activation import refuse_merged, refuse_overridden, replan
from adapterzoo.model.sharding import refuse_if_sharded
from adapterzoo.model.state import AdaptedModel, modules_of, shareable_of

from .copies import leave_groups, list_ties, renumber, update_rows


def update_outputs(model: AdaptedModel) -> None:
    """Let the output layers that are tied to a table now have the rows of adapters."""
    if update_rows(model):
        replan(model)
        list_ties(model)


def after_loading(model: AdaptedModel) -> None:
    """Complete the rows of adapters, of a model whose parameters are there and tied now."""
    renumber(model)
    update_outputs(model)


def share(
    model: AdaptedModel,
    adapter_names: Composition | Sequence[str] | str,
    name: str | None = None,
    reference: str | None = None,
) -> None:
    """Let adapters have the same parameters, with the values of one of them.

    Raises:
        FieldError: their method shares nothing.
        ConfigError: their configs or the reference do not fit.
    """
    names = _names(adapter_names)
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    configs = [model._adapter_state.find(each).config for each in names]
    wrong = [n for n, c in zip(names, configs, strict=True) if not isinstance(c, MultiTaskConfig)]
    if wrong:
        sharing = [name for name, c in architectures.items() if issubclass(c, MultiTaskConfig)]
        raise FieldError(
            f"{wrong[0]!r} is of {type(configs[names.index(wrong[0])]).__name__}, whose adapters "
            f"share no parameters. Add adapters of a method whose tasks do: {listing(sharing)}."
        )
    first = names[0] if reference is None else reference
    if first not in names:
        raise ConfigError(
            f"reference_adapter_name={reference!r}: it is not one of {listing(names)}. Write "
            f"reference_adapter_name={names[0]!r}."
        )
    shapes = [{k: p.shape for k, p in shareable_of(model, each).items()} for each in names]
    other = next((n for n, own in zip(names, shapes, strict=True) if own != shapes[0]), None)
    if other is not None or len({type(config) for config in configs}) > 1:
        raise ConfigError(
            f"{names[0]!r} and {other or names[-1]!r} adapt other layers or have parameters of "
            f"other shapes. Add adapters of equal configs."
        )
    for each in names:
        refuse_overridden(model, each)
        refuse_merged(model, each)
    leave_groups(model, names)
    _replace(model, first, lambda _, p: nn.Parameter(p.detach().clone(), p.requires_grad))
    _join(model, names, first, name)


def _join(model: AdaptedModel, names: Sequence[str], first: str, group: str | None = None) -> None:
    """Give adapters the parameters of the first."""
    own = shareable_of(model, first)
    for each in names:
        _replace(model, each, lambda place, _: own[place])
    model._adapter_state.sharing[group or _group_name(names)] = tuple(names)
    for each in names:
        list_ties(model, each)


def unshare(
    model: AdaptedModel,
    adapter_names: Composition | Sequence[str] | str,
    name: str | None = None,
) -> None:
    """Give each of several adapters its own parameters again, with the values of now.

    Raises:
        StateError: they share nothing.
    """
    names, sharing = _names(adapter_names), model._adapter_state.sharing
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    for each in names:
        model._adapter_state.find(each)
    inside = sharing.get(name, ()) if name is not None else ()
    if name is not None and not {*names} <= {*inside}:
        raise StateError(
            f"name={name!r}: there are {listing(sharing) or 'no shared parameters'}, and they are "
            f"of {listing(inside) or 'other adapters'}. Leave name out."
        )
    if alone := [n for n in names if not any(n in group for group in sharing.values())]:
        raise StateError(
            f"{alone[0]!r} shares no parameters. Shared are {listing(sharing) or 'none'}. Write "
            f"share_parameters(['a', 'b'])."
        )
    for each in names:
        refuse_overridden(model, each)
        refuse_merged(model, each)
        _replace(model, each, lambda _, p: nn.Parameter(p.detach().clone(), p.requires_grad))
    leave_groups(model, names)
    for each in names:
        list_ties(model, each)


def share_equal(model: AdaptedModel, names: Sequence[str]) -> None:
    """Let adapters that come from files share parameters that have the same bits as others'.

    Fresh adapters that were drawn from one seed have equal bits too, and B is zero.
    """
    state = model._adapter_state
    for name in names:
        config, own = state.find(name).config, shareable_of(model, name)
        seed = config.get("init_weights_seed")
        if not own or (seed is not None and any(not bool(p.any()) for p in own.values())):
            continue
        for other, record in state.records.items():
            # most other adapters differ in the first parameter: compare no more of these
            if other == name or type(record.config) is not type(config):
                continue
            theirs = shareable_of(model, other)
            first = next(iter(theirs.items()), None)
            if first is None or first[0] not in own or not _is_equal(own[first[0]], first[1]):
                continue
            if record.config != config or own.keys() != theirs.keys():
                continue
            if all(_is_equal(p, t) for p, t in _pairs(own, theirs)):
                group = next((g for g, n in state.sharing.items() if other in n), None)
                members = state.sharing.pop(group) if group is not None else (other,)
                same = (*members, *(n for n in (name,) if n not in members))
                _join(model, same, other, None if group == _group_name(members) else group)
                break


def _is_equal(parameter: nn.Parameter, other: nn.Parameter) -> bool:
    alike = parameter.device == other.device and parameter.dtype == other.dtype
    return alike and torch.equal(parameter, other)


def _group_name(names: Sequence[str]) -> str:
    """Return the name of a group that was given none; different groups have different ones."""
    return repr([*names]) if any("," in name for name in names) else ",".join(names)


def _pairs(
    own: Mapping[tuple[str, str], nn.Parameter], theirs: Mapping[tuple[str, str], nn.Parameter]
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return [(parameter, theirs[place]) for place, parameter in own.items()]


def _names(given: Composition | Sequence[str] | str) -> tuple[str, ...]:
    """Return the adapters that are named: a composition, a list, or names with commas between."""
    names = given.split(",") if isinstance(given, str) else given
    listed = names.flatten() if isinstance(names, Composition) else tuple(names)
    if not listed:
        raise ConfigError("adapter_names=[]: it names no adapter. Write adapter_names=['a', 'b'].")
    return listed


def _replace(
    model: AdaptedModel,
    name: str,
    made: Callable[[tuple[str, str], nn.Parameter], nn.Parameter],
) -> None:
    """Put other parameters in the place of those that an adapter can share."""
    modules = dict(modules_of(model, name))
    for (path, key), parameter in shareable_of(model, name).items():
        owner, _, own = key.rpartition(".")
        modules[path].get_submodule(owner).register_parameter(own, made((path, key), parameter))
