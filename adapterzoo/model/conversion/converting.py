"""Convert an adapter to a method whose adapters can make any change of a weight.

The change ΔW of each weight is written as B A: with the factors of the method where it has them,
else with those of a truncated SVD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from adapterzoo import inject
from adapterzoo.anatomy import OutputSlice, Site
from adapterzoo.averaging import Truncated, truncated
from adapterzoo.configs import AdapterConfig, change_forms
from adapterzoo.contracts import Adapter, FactoredAdapter, WeightAdapter, compute_dtype
from adapterzoo.errors import ConfigError, StateError
from adapterzoo.fields import MAX_WIDTH
from adapterzoo.inject.building import at_hand, inject_path, layer_at
from adapterzoo.inject.layers import take_slice
from adapterzoo.methods import undrawn
from adapterzoo.model.activation import refuse_merged, refuse_taken, replan
from adapterzoo.model.adapters import bring_in, make
from adapterzoo.model.heads import copies
from adapterzoo.model.heads.copies import tables_of
from adapterzoo.model.sharding import refuse_if_sharded
from adapterzoo.model.state import AdaptedModel, AdapterRecord, modules_of
from adapterzoo.names import check_name

from .certificate import Certificate, LayerReport
from .outputs import check_inputs, difference, outputs, random_inputs


class Change(NamedTuple):
    """The change of one weight.

    Attributes:
        path: of the module that holds it.
        parameter: its name there; None for the weight of a layer.
        value: `[*experts, d_out, d_in]`, in the widest dtype.
        factors: A and B with B A = value; None: not known.
    """

    path: str
    parameter: str | None
    value: Tensor
    factors: tuple[Tensor, Tensor] | None = None


class Size(NamedTuple):
    """How much of a change to keep.

    Attributes:
        rank: the largest rank; None: not limited.
        energy: the share of the squared singular values; None: all.
    """

    rank: int | None
    energy: float | None

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigError: both are given, or one is not legal.
        """
        rank, energy = self
        if rank is not None and energy is not None:
            raise ConfigError(
                f"rank={rank!r} and energy={energy!r} both limit the ranks. Write one of them."
            )
        if rank is not None and (type(rank) is not int or not 1 <= rank <= MAX_WIDTH):
            raise ConfigError(
                f"rank={rank!r} is not a whole number from 1 to {MAX_WIDTH:,}. Write rank=8."
            )
        if energy is not None and (
            isinstance(energy, bool) or not isinstance(energy, (int, float)) or not 0 < energy <= 1
        ):
            raise ConfigError(
                f"energy={energy!r} is not a share of the squared singular values, above 0 and at "
                f"most 1. Write energy=0.99."
            )


class Foreign(NamedTuple):
    """An adapter of another library on the same base model.

    Attributes:
        method: its name there.
        changes: key of each changed parameter → its change as the layer stores it, in the widest
            dtype.
        inputs: arguments of a call.
        outputs: those of the call.
        are_given: whether the user gave the inputs.
    """

    method: str
    changes: Mapping[str, Tensor]
    inputs: Mapping[str, Any]
    outputs: list[Tensor]
    are_given: bool


Changes = Callable[[], Iterable[Change]]
_Leaf = tuple[str, str | None, OutputSlice | None]


@torch.no_grad()
def convert(
    model: AdaptedModel,
    name: str,
    to: str,
    size: Size,
    new_name: str | None = None,
    overwrite_ok: bool = False,
    active: bool = False,
    inputs: Mapping[str, Any] | None = None,
) -> Certificate:
    """Add the conversion of an adapter; the adapter does not change, unless it is replaced.

    Args:
        model: with adapters.
        name: of the adapter.
        to: the method.
        size: how much of the changes to keep.
        new_name: of the result; None: that of the adapter and of the method.
        overwrite_ok: whether an adapter of this name may be replaced.
        active: whether to activate the result as the only adapter.
        inputs: arguments of a call, to compare outputs; None: random ones.

    Raises:
        ConfigError: a value is not legal, or no random inputs can be made.
        StateError: the adapter is more than a change of weights.
    """
    form, target = change_forms.find(to), f"{name}_{to}" if new_name is None else new_name
    size.check()
    check_name(target)
    record = model._adapter_state.find(name)
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    refuse_merged(model, name)
    refuse_taken(model, target, overwrite_ok)
    _refuse_other(model, name)
    head = name if name in model.known_heads() else None
    given = random_inputs(model) if inputs is None else check_inputs(inputs)
    config = form.at_sites_of(record.config, model.anatomy)
    made, layers = _made(model, config, lambda: _changes_of(model, name), size)
    before, plain = (outputs(model, each, head, given) for each in (name, None))
    own_head = copies.combined(model, [name], [1.0])
    bring_in(model, target, made, active)
    if own_head:
        copies.put(model, target, own_head)
        replan(model)
    after = outputs(model, target, head, given)
    return Certificate(
        target, record.config.architecture, to, tuple(layers),
        "random" if inputs is None else "given", difference(before, after),
        difference(before, plain),
    )  # fmt: skip


@torch.no_grad()
def add_changes(
    model: AdaptedModel, name: str, foreign: Foreign, to: str, size: Size
) -> Certificate:
    """Add an adapter that makes the changes of an adapter of another library.

    Args:
        model: with adapters.
        name: of the new adapter.
        foreign: the changes.
        to: the method.
        size: how much of them to keep.

    Raises:
        ConfigError: a value is not legal.
        StateError: a change is not that of the weight of a layer that can have adapters.
    """
    form, backbone = change_forms.find(to), model._backbone
    size.check()
    check_name(name)
    refuse_taken(model, name, overwrite_ok=False)
    prefix = next(n for n, module in cast("Any", model).named_modules() if module is backbone)
    start = f"{prefix}." if prefix else ""
    sites = {site.path for site in model.anatomy if site.parameter is None}
    changes = []
    for key, value in foreign.changes.items():
        path, _, parameter = key.removeprefix(start).rpartition(".")
        if not key.startswith(start) or parameter != "weight" or path not in sites:
            raise StateError(
                f"the adapter changes {key!r}, which is not the weight of a layer that can have "
                f"adapters. Merge it with PEFT instead: "
                f"peft_model.merge_and_unload().save_pretrained(…)."
            )
        transposed = inject.stores_transposed(layer_at(backbone, path))
        changes.append(Change(path, None, value.mT if transposed else value))
    made, layers = _made(
        model, form.at_layers([change.path for change in changes]), lambda: changes, size
    )
    plain = outputs(model, None, None, foreign.inputs)
    bring_in(model, name, made, active=False)
    after = outputs(model, name, None, foreign.inputs)
    return Certificate(
        name, foreign.method, to, tuple(layers), "given" if foreign.are_given else "random",
        difference(foreign.outputs, after), difference(foreign.outputs, plain),
    )  # fmt: skip


def _refuse_other(model: AdaptedModel, name: str) -> None:
    """Refuse an adapter that does more than change weights of layers."""
    if tables_of(model, name):
        raise StateError(
            f"{name!r} has trained embeddings, which are not a change of a weight. Keep it as it "
            f"is."
        )
    for path, adapter in modules_of(model, name):
        parts = (part for part in adapter.modules() if isinstance(part, Adapter))
        for part in parts if path else ():
            kind = type(part).__name__
            if not isinstance(part, WeightAdapter | inject.ExpertAdapters):
                raise StateError(
                    f"{name!r} has a {kind} adapter at {path!r}, which is not a change of a "
                    f"weight. Keep it as it is."
                )
            if part.stands_alone or (isinstance(part, WeightAdapter) and part.keeps_weight):
                raise StateError(
                    f"{name!r} has a {kind} adapter at {path!r}, whose parameters replace those of "
                    f"the layer (modules_to_save, trainable_token_indices, bias, norms), and a "
                    f"conversion would lose it. Keep it as it is."
                )


def _changes_of(model: AdaptedModel, name: str) -> Iterator[Change]:
    """Yield the changes of an adapter, in model order."""
    for path, adapter in modules_of(model, name):
        # shared modules do not change a weight themselves
        if path:
            yield from _changes_at(model, path, adapter)


def _changes_at(model: AdaptedModel, path: str, adapter: Adapter) -> Iterator[Change]:
    layer = layer_at(model._backbone, path)
    originals = model._adapter_state.originals.get(path, {})
    with at_hand(layer):
        try:
            for parameter, value, factors in inject.changes(layer, adapter, originals):
                if not bool(value.isfinite().all()):
                    raise StateError(
                        "the change of the weight is not finite. Look for NaN in the adapter, and "
                        "load another checkpoint."
                    )
                yield Change(path, parameter, value, factors)
        except StateError as error:
            raise StateError(f"at {path!r}: {error}") from error


def _made(
    model: AdaptedModel, config: Any, changes: Changes, size: Size
) -> tuple[AdapterRecord, list[LayerReport]]:
    """Return the new adapter, which is not yet in the model, and the report of each weight.

    Args:
        model: with adapters.
        config: of the new adapter, with any ranks.
        changes: returns the changes of the weights at its sites; called twice.
        size: how much of them to keep.
    """
    sites: dict[tuple[str, str | None], list[Site]] = {}
    kept: dict[_Leaf, Truncated] = {}
    for placement in config.placements(model.anatomy):
        site = placement.site
        sites.setdefault(_key(site), []).append(site)
        kept[*_key(site), site.output_slice] = _nothing(site)
    for key, beside in sites.items():
        # an adapter of the whole weight takes the change, not those of its parts beside it
        sites[key] = [site for site in beside if site.output_slice is None] or beside
    dtype = compute_dtype(config.dtype_at(model.dtype))
    ranks: dict[str, int] = {}
    for change in changes():
        for site in sites[change.path, change.parameter]:
            value, factors = _part(change, site.output_slice)
            # noise of a float64 SVD, and what the new factors cannot resolve
            precision = max(torch.finfo(dtype).eps, max(value.shape) * torch.finfo(value.dtype).eps)
            found = truncated(value, factors, *size, precision)
            kept[change.path, change.parameter, site.output_slice] = found
            ranks[site.name] = max(ranks.get(site.name, 1), found.a.shape[-2])
    with undrawn(), torch.random.fork_rng(devices=()):
        record = make(model, cast("AdapterConfig", config.of_ranks(ranks)))
    for path, adapter in record.coming.items():
        for parameter, features, leaf in _leaves(adapter):
            own = kept[path, parameter, features]
            leaf.set_factors(own.a, own.b)
    reports = []
    for change in changes():
        adapter = record.coming[change.path]
        new = next(
            c for c in _changes_at(model, change.path, adapter) if c.parameter == change.parameter
        )
        for site in sites[change.path, change.parameter]:
            features = site.output_slice
            old, now = _part(change, features)[0], _part(new, features)[0]
            norm, error = (float(torch.linalg.vector_norm(t)) for t in (old, old - now))
            names = site.path, site.parameter, site.role if features else None
            own = kept[change.path, change.parameter, features]
            shown = ".".join(filter(None, names))
            reports.append(LayerReport(shown, own.a.shape[-2], norm, error, own.is_exact))
    return record, reports


def _key(site: Site) -> tuple[str, str | None]:
    """Return the module that holds the weight of a site, and the weight's name if it has one."""
    parameter = site.parameter.rpartition(".")[2] if site.parameter else None
    return inject_path(site), parameter


def _nothing(site: Site) -> Truncated:
    """Return the factors of no change."""
    lead = (site.experts,) if site.experts else ()
    a, b = torch.zeros(*lead, 0, site.d_in), torch.zeros(*lead, site.d_out, 0)
    return Truncated(a, b, is_exact=True)


def _part(
    change: Change, features: OutputSlice | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Return the change of some output features, and its factors."""
    if features is None:
        return change.value, change.factors
    value = take_slice(change.value, features, -2)  # [*experts, size, d_in]
    if change.factors is None:
        return value, None
    a, b = change.factors
    return value, (a, take_slice(b, features, -2))


def _leaves(
    adapter: Adapter,
) -> Iterator[tuple[str | None, OutputSlice | None, FactoredAdapter]]:
    """Yield the adapters of one place: the parameter, the part of its features, the adapter."""
    if isinstance(adapter, inject.ExpertAdapters):
        for parameter, parts in adapter._modules.items():
            for _, features, leaf in _leaves(cast("Adapter", parts)):
                yield parameter, features, leaf
    elif isinstance(adapter, inject.FusedAdapters):
        for label, features in adapter.slices.items():
            yield None, features, cast("FactoredAdapter", adapter._modules[label])
    else:
        yield None, None, cast("FactoredAdapter", adapter)
