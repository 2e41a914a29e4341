"""Combine adapters into one: averages, task arithmetic, and PEFT's ways of merging."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo import inject
from adapterzoo.averaging import STRATEGIES, Combination, weighted, weighted_sum
from adapterzoo.composition import Node
from adapterzoo.config import FLAG, MAX_WIDTH, SEED, AdapterConfig, Check, Choice, Density, Range
from adapterzoo.contracts import upcast
from adapterzoo.errors import CompositionError, ConfigError, listing, unknown_name
from adapterzoo.inject.building import at_hand
from adapterzoo.methods import generator, undrawn
from adapterzoo.names import check_name

from .activation import refuse_taken
from .adapters import bring_in, make
from .heads import copies, named, store
from .sharding import refuse_if_fixed
from .state import AdaptedModel, AdapterRecord, layer_in, modules_of

# option → its legal values, one of them, and the default; a strategy with `needs_rank` or `prunes`
# needs another rank or density
_OPTIONS: Mapping[str, tuple[Check, object, object]] = {
    "density": (Density(), 0.5, None),
    "majority_sign_method": (Choice("total", "frequency"), "total", "total"),
    "svd_rank": (Range(1, MAX_WIDTH), 8, None),
    "svd_clamp": (Range(0.0, 1.0), 0.99, None),
    "svd_full_matrices": (FLAG, False, False),
    "svd_driver": (Choice("gesvd", "gesvdj", "gesvda"), "gesvd", None),
    "seed": (SEED, 0, None),
}


def combination(name: str, **options: Any) -> Combination:
    """Check a user's strategy and options, and return them as a `Combination`.

    Args:
        name: of the strategy.
        **options: `density`, `majority_sign_method`, `svd_rank`, `svd_clamp`, `svd_full_matrices`,
            `svd_driver` and `seed`, as `average_adapter` takes them.

    Raises:
        ConfigError: an option is missing, not legal, or has no effect.
        UnknownNameError: there is no strategy of this name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise unknown_name("", "combination strategy", name, STRATEGIES)
    strategy = STRATEGIES[name]
    required = {"density": strategy.prunes, "svd_rank": strategy.needs_rank}
    used = {
        "density": strategy.prunes,
        "majority_sign_method": strategy.elects,
        "seed": strategy.prunes == "random",
    }
    for field, (check, example, unset) in _OPTIONS.items():
        value = options.setdefault(field, unset)
        if isinstance(value, float):
            # float64 of numpy is a float
            options[field] = value = float(value)
        # those of the SVD
        is_used = used.get(field, strategy.target == "change")
        if value != unset and not is_used:
            raise ConfigError(f"{field}={value!r} is unused by {name!r}. Write {field}={unset!r}.")
        if value != unset or required.get(field):
            check(name, field, value, example)
    # the caller makes generators from it
    del options["seed"]
    values = {field.removeprefix("svd_"): value for field, value in options.items()}
    return dataclasses.replace(strategy, name=name, **values)


@torch.no_grad()
def average(
    model: AdaptedModel,
    name: str,
    adapters: Sequence[str] | Mapping[str, float],
    weights: Sequence[float] | None,
    strategy_name: str,
    normalize: bool = False,
    overwrite_ok: bool = False,
    active: bool = False,
    **options: Any,
) -> None:
    """Add a combination of several adapters, which do not change.

    Args:
        model: with adapters.
        name: of the result.
        adapters: names, or a dict from names to weights.
        weights: one for each; None: equal weights, or those of the dict.
        strategy_name: how to combine them.
        normalize: whether to divide the weights by their sum.
        overwrite_ok: whether an adapter of this name may be replaced.
        active: whether to activate the result as the only adapter.
        **options: of the strategy.

    Raises:
        CompositionError: the adapters have nothing in common.
    """
    check_name(name)
    example = _example(adapters, model._adapter_state.records)
    names, own = weighted(adapters, weights, normalize, example)
    strategy = dataclasses.replace(combination(strategy_name, **options), adapters=names)
    refuse_if_fixed(model, "Write it before fully_shard(model).")
    configs = [model._adapter_state.find(each).config for each in names]
    refuse_taken(model, name, overwrite_ok)
    if with_tables := [each for each in names if copies.tables_of(model, each)]:
        has = "has" if len(with_tables) == 1 else "have"
        raise CompositionError(
            f"{listing(with_tables)} {has} trained embeddings, and tables of tokens are not "
            f"averaged. Write {strategy.composed}."
        )
    kinds = dict.fromkeys(config.architecture for config in configs)
    if len(kinds) > 1:
        raise CompositionError(
            f"the methods {', '.join(kinds)} have no parameters in common. Write "
            f"{strategy.composed}."
        )
    config = type(configs[0]).combined(configs, strategy, model.anatomy)
    record = _combined(model, config, names, own, strategy, options.get("seed"))
    head = copies.combined(model, names, own)
    bring_in(model, name, record, active, head)


def _example(given: object, known: Iterable[str]) -> Sequence[str]:
    """Return names for a message: those in a composition, or two known ones, a given one first."""
    if isinstance(given, Node):
        return given.flatten()
    return sorted(known, key=lambda name: [name] != [given])[:2] or ("a", "b")


def _combined(
    model: AdaptedModel,
    config: AdapterConfig,
    names: Sequence[str],
    weights: Sequence[float],
    strategy: Combination,
    seed: int | None,
) -> AdapterRecord:
    """Return the result; the model does not change."""
    # values come from other adapters: leave the caller's random state unchanged
    with undrawn(), torch.random.fork_rng(devices=()):
        record = make(model, config)
    sources: list[dict[str, Any]] = [dict(modules_of(model, each)) for each in names]
    for path, adapter in record.coming.items():
        if not record.places[path]:
            is_union = config.members != (config,)
            for number, own in adapter.named_children() if is_union else [("", adapter)]:
                member = config.members[int(number)] if is_union else config
                theirs = [modules[path].get_submodule(number) for modules in sources]
                if member.averages_shared:
                    states = [other.state_dict() for other in theirs]
                    _average(own.state_dict(), states, weights, strategy)
                else:
                    _share(own, theirs, strategy)
            continue
        there = [i for i, modules in enumerate(sources) if path in modules]
        layer = layer_in(model, path)
        with at_hand(layer):
            inject.combine(
                layer,
                adapter,
                [sources[i][path] for i in there],
                [weights[i] for i in there],
                dataclasses.replace(strategy, source=generator(seed, path)),
                model._adapter_state.originals.get(path, {}),
            )
    return record


def _average(
    made: Mapping[str, Tensor],
    others: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    strategy: Combination,
) -> None:
    """Set tensors of the result to the weighted sums of others; integers to the first of them."""
    for key, target in made.items():
        if target.is_floating_point():
            value = weighted_sum([upcast(each[key], target) for each in others], weights)
            strategy.fill(target.data, value, key)
        else:
            target.copy_(others[0][key])


def _share(made: nn.Module, others: Sequence[nn.Module], strategy: Combination) -> None:
    """Copy shared tensors to the result; they must be equal in all adapters."""
    first = others[0].state_dict()
    for other in others[1:]:
        state = other.state_dict()
        if any(not torch.equal(first[key], state[key].to(first[key].device)) for key in first):
            raise CompositionError(
                f"the tensors {listing(first)}, which layers share, differ between the adapters. "
                f"Write {strategy.composed}."
            )
    made.load_state_dict(first)


@torch.no_grad()
def average_head(
    model: Any,
    name: str,
    heads: Sequence[str] | Mapping[str, float],
    weights: Sequence[float] | None,
    normalize: bool,
    overwrite_ok: bool,
    set_active: bool,
) -> None:
    """Add a head with the parameters Σ wᵢ θᵢ of several others, which do not change.

    Raises:
        CompositionError: the heads differ in more than dropout, or the result is not finite.
    """
    names, own = weighted(heads, weights, normalize, _example(heads, model.known_heads()))
    strategy = combination("linear")
    found = [named.find(model, each) for each in names]
    checked = store.free_name(model, name, overwrite_ok)
    kinds = dict.fromkeys(str(head.config.head_type) for head in found)
    if len(kinds) > 1:
        raise CompositionError(
            f"the heads are of the types {listing(kinds)}. Write the names of heads of one type."
        )
    dicts = [head.config.to_dict() for head in found]
    strategy.refuse_differing(dicts, {"dropout_prob"}, "the names of heads of one config")
    made = named.built(model, found[0].config)
    theirs = [named.own_tensors(model, head) for head in found]
    mine = named.own_tensors(model, made)
    for each, tensors in zip(names, theirs, strict=True):
        if tensors.keys() != mine.keys():
            raise CompositionError(
                f"a new head has the tensors {listing(mine)}, and {each!r} has "
                f"{listing(tensors)}. Write the names of heads with their own output layer."
            )
    for key, target in mine.items():
        # a head may have been cast, or moved
        target.data = target.data.to(theirs[0][key].device, theirs[0][key].dtype)
    _average(mine, theirs, own, strategy)
    store.enter(model, checked, made, set_active)
