"""Adapters by name: make, install and remove them.

`install` and `remove` put an adapter into the model and take it out. `bring_in` replaces one; if it
fails, nothing has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from adapterzoo import inject
from adapterzoo.composition import fusion_key, fusions_of, parse
from adapterzoo.config import AdapterConfig, Placement, refuse_missing_layers, union_of
from adapterzoo.contracts import Adapter, Ejectable, LayerData, SharedKey
from adapterzoo.errors import ConfigError, SiteError, StateError
from adapterzoo.inject.adapted import SHARED, container_of
from adapterzoo.inject.building import at_hand, build, build_shared, device_of, inject_path
from adapterzoo.inject.layers import ExpertAdapters, FusedAdapters
from adapterzoo.inject.parallel import check_split, keep_part
from adapterzoo.inject.tokens import AdaptedStack
from adapterzoo.methods._copies import WITH_OUTPUTS, all_placements
from adapterzoo.names import check_name
from adapterzoo.runtime import Plan, shared_by

from .activation import check_setup, refuse_taken, refuse_used, replan, set_active, share_trunk
from .heads import copies
from .heads.copies import refuse_both, refuse_own_size
from .heads.named import release, share_table
from .hf import guards
from .hf.init_data import Collected, InitData, embedded_text, fitted
from .sharding import equalize, refuse_if_fixed
from .state import (
    AdaptedModel,
    AdapterRecord,
    base_prefix,
    dtype_of,
    layer_in,
    modules_of,
    own_parameters_of,
    stacks_of,
)

# --- add and delete ---


def add(
    model: AdaptedModel,
    name: str,
    config: AdapterConfig | str | Mapping[str, Any] | None = None,
    overwrite_ok: bool = False,
    active: bool = False,
    init_data: InitData = None,
    in_file: bool = False,
    autocast_adapter_dtype: bool = False,
    check: Callable[[AdapterRecord], None] | None = None,
) -> None:
    """Add an adapter with fresh parameters, on each layer's device and in its dtype.

    With `in_file` its values come later, from the file of the whole model. `check` is called with
    the adapter before it is in the model.
    """
    check_name(name)
    refuse_if_fixed(model, "Add it before fully_shard(model).")
    loaded = AdapterConfig.load(config)
    if autocast_adapter_dtype:
        loaded = in_float32(model, loaded)
    refuse_taken(model, name, overwrite_ok)
    loaded, with_output = for_model(model, loaded, in_file)
    data: Collected = {}
    if not in_file:
        plans = (member.init_plan(model.anatomy) for member in loaded.members)
        plan = next((p for p in plans if p is not None), None)
        if plan is not None or init_data is not None:
            loaded, data = fitted(model, loaded, plan, init_data)
    record = make(model, loaded)
    for path, adapter in record.coming.items():
        if record.places[path]:
            init_values(model, path, adapter, data.get(path))
        else:
            init_shared(model, loaded, adapter)
    if check is not None:
        check(record)
    head = copies.made(model, with_output=True) if with_output else None
    bring_in(model, name, record, active, head)


def for_model(
    model: AdaptedModel, config: AdapterConfig, in_file: bool = False
) -> tuple[AdapterConfig, bool]:
    """Return a config as it applies to a model, and whether the head's output layer gets a copy.

    Raises:
        ConfigError: its values do not fit the model.
        SiteError: the model is a layer itself.
    """
    if model._backbone._parameters and not model._backbone._modules:
        raise _is_layer(model)
    if (interface := model._adapter_state.interface) is not None:
        interface.check_method(config)
    for member in config.members:
        refuse_missing_layers(member, len(model.anatomy.blocks))
    config, with_output = copies.without_head(model, config)
    return config if in_file else config.below(base_prefix(model), model.anatomy), with_output


def _is_layer(model: AdaptedModel) -> SiteError:
    """Return the error for an adapter at the model itself, whose path stands for shared modules."""
    return SiteError(
        f"this {type(model).__name__} is a layer itself, and adapters act on layers in a model. "
        "Write nn.Sequential(layer) in its place."
    )


def init_values(
    model: AdaptedModel, path: str, adapter: Adapter, data: LayerData | None = None
) -> None:
    """Initialize a fresh adapter from its layer, if the layer has values.

    Raises:
        ConfigError: the adapter cannot be initialized from this layer, or from its inputs.
    """
    layer = layer_in(model, path)
    with at_hand(layer), torch.no_grad():
        # a model that is being loaded has no values yet; the adapter's come from the file
        if not any(p is not None and p.is_meta for p in layer._parameters.values()):
            originals = model._adapter_state.originals.get(path, {})
            try:
                inject.init_from_layer(layer, adapter, originals, data)
            except ConfigError as error:
                raise ConfigError(f"at {path!r}: {error}") from error


def init_shared(model: AdaptedModel, config: AdapterConfig, shared: nn.Module) -> None:
    """Initialize the shared modules of a fresh adapter from the embeddings of a text.

    Raises:
        ConfigError: the model reads no tokens, or the text has none.
    """
    tokens = model.anatomy.tokens
    path = None if tokens is None else tokens.table

    def embedded(text: str | int) -> torch.Tensor:
        if path is None:
            raise ConfigError("no text can be embedded: this model reads no tokens. Leave it out.")
        layer: Any = layer_in(model, path)
        with at_hand(layer), torch.no_grad():
            if isinstance(text, str):
                return embedded_text(model, layer, text)
            drawn: torch.Tensor = layer(
                torch.randint(len(layer.weight), (text,)).to(layer.weight.device)
            )
            return drawn

    for member, own in _shared_parts(config, shared):
        if own is not None and not any(p.is_meta for p in own.parameters()):
            member.init_from_text(own, embedded)


def _shared_parts(
    config: AdapterConfig, shared: nn.Module | None
) -> list[tuple[AdapterConfig, nn.Module | None]]:
    """Return each member of a config with its part of the shared modules; None: it has none."""
    if shared is None or len(config.members) == 1:
        return [(member, shared) for member in config.members]
    return [(member, shared._modules.get(str(n))) for n, member in enumerate(config.members)]


def delete(model: AdaptedModel, *names: str) -> None:
    """Delete adapters of the model, all or none; other active adapters stay active.

    Requests of continuous batching that use them are finished first.
    """
    for name in names:
        refuse_used(model, name)
    refuse_if_fixed(model, "Write set_active_adapters(None).")
    with guards.unused(model, names):
        for name in names:
            remove(model, name)
        replan(model)


def bring_in(
    model: AdaptedModel,
    name: str,
    record: AdapterRecord,
    active: bool,
    head: Mapping[str, nn.Module] | None = None,
) -> None:
    """Install an adapter, replacing one of its name; on failure nothing changes.

    An adapter that is not active is frozen while active ones are trained.

    Args:
        model: the model to install it in.
        name: the adapter's name.
        record: its record, with modules and their values.
        active: whether to activate it as the only adapter.
        head: its copies of layers of a static head, by path.

    Raises:
        AdapterZooError: it cannot be active, or conflicts with merged adapters.
    """
    refuse_both(model, record.places, head or ())
    state, plan = model._adapter_state, model._active.default.plan
    setup, skipped = plan.setup, plan.skip_layers
    if active:
        setup, skipped = parse(name), ()
    is_active = setup is not None and name in setup.flatten()
    if is_active:
        check_setup(model, setup, skipped, records={name: record})
    elif setup is not None and state.trains:
        fusions = [fuse.name for fuse in fusions_of(setup)]
        if any(p.requires_grad for p in own_parameters_of(model, setup.flatten(), fusions)):
            for module in record.coming.values():
                module.requires_grad_(False)
    with guards.unused(model, [name] if name in state.records else []):
        if name in state.records:
            remove(model, name)
        install(model, name, record)
        if active:
            set_active(model, name)
        elif is_active:
            replan(model)
        if head:
            copies.put(model, name, head)
            replan(model)


def eject(model: AdaptedModel, name: str) -> None:
    """Replace the network that computes an adapter's shared values by the values.

    Raises:
        StateError: the model is sharded, or another name uses the adapter.
    """
    config = model._adapter_state.find(name).config
    refuse_if_fixed(model, "Write it before fully_shard(model).")
    refuse_used(model, name)
    guards.refuse_in_flight(model, name)
    shared = dict(modules_of(model, name)).get("")
    members = [
        member.replace(**own.eject()) if isinstance(own, Ejectable) else member
        for member, own in _shared_parts(config, shared)
    ]
    if members == list(config.members):
        raise StateError(f"{name!r} has no network to eject, as a prefix with flat=False has.")
    set_config(model, name, make(model, union_of(members), torch.device("meta")))


def set_config(model: AdaptedModel, name: str, made: AdapterRecord) -> None:
    """Give an adapter the config and the placements of a record with the same modules."""
    record = model._adapter_state.records[name]
    places = {**record.places, **made.places}
    model._adapter_state.records[name] = dataclasses.replace(
        record, config=made.config, places=places
    )
    replan(model)


def check_splits(model: AdaptedModel) -> None:
    """Check that the adapters of a model can act on layers that are split over processes.

    Raises:
        ConfigError: one of them cannot.
    """
    for name, record in model._adapter_state.records.items():
        for path, module in modules_of(model, name):
            parts = [m for m in module.modules() if isinstance(m, Adapter)] if path else []
            own = [m for m in parts if not isinstance(m, (FusedAdapters, ExpertAdapters))]
            for placement, adapter in zip(record.places[path], own, strict=False):
                check_split(layer_in(model, path), placement.site, placement.config, adapter)


# --- make, install, remove ---


def make(
    model: AdaptedModel, config: AdapterConfig, device: torch.device | None = None
) -> AdapterRecord:
    """Make all modules of a config; the model does not change.

    Args:
        model: the model that the adapter is for.
        config: the adapter's config.
        device: the device of the modules; None: each layer's own.

    Raises:
        SiteError: the config places no adapter, or one at the model itself.
        StateError: a model inside this one has its own adapters.
    """
    for _, stack in stacks_of(model):
        guard = guards.guard_of(stack)
        if "_adapter_state" in vars(stack) or (guard and guard.active is not model._active):
            raise StateError(
                f"the {type(stack).__name__} in this {type(model).__name__} has adapters of its "
                "own or of another model. Write add_adapter(…) there."
            )
    by_path: dict[str, list[Placement]] = {}
    for placement in all_placements(config, model.anatomy):
        by_path.setdefault(inject_path(placement.site), []).append(placement)
    if not by_path:
        raise SiteError(
            f"the placements of {type(config).__name__} in this {type(model).__name__} are empty. "
            "Return one for each layer to adapt."
        )
    if "" in by_path:
        raise _is_layer(model)
    refuse_own_size(model, "it", by_path)
    refuse_both(model, by_path)
    layers = {path: layer_in(model, path) for path in by_path}
    listed = [placement for placements in by_path.values() for placement in placements]
    at, dtype = device or device_of(next(iter(layers.values()))), dtype_of(model)
    shared, sharing = build_shared(config, listed, at, dtype)
    modules: dict[str, Any] = {
        path: build(layers[path], path, placements, dtype, device, sharing)
        for path, placements in by_path.items()
    }
    for path, module in modules.items():
        inject.check_put(layers[path], path, container_of(module))
    # the paths that share a table share one module
    at_tables: dict[int, Adapter] = {}
    for path, own in by_path.items():
        if own and own[0].location in WITH_OUTPUTS:
            modules[path] = at_tables.setdefault(id(own[0].config), modules[path])
    if shared is not None:
        inject.check_put(model._backbone, "", container_of(shared, SHARED))
        modules[""], by_path[""] = shared, []
    places = {path: tuple(placements) for path, placements in by_path.items()}
    return AdapterRecord(config, places, coming=modules)


def install(model: AdaptedModel, name: str, record: AdapterRecord) -> None:
    """Put an adapter into the model, inactive.

    Args:
        model: the model to put it into.
        name: the adapter's name.
        record: its record, with modules.
    """
    backbone, active, modules = model._backbone, model._active, record.coming
    parts = (part for adapter in modules.values() for part in adapter.modules())
    keys: dict[int | None, SharedKey] = {}
    reads_calls = False
    for part in parts:
        if isinstance(part, Adapter):
            reads_calls |= part.reads_call or part.shared_key is not None
            if (key := part.shared_key) is not None:
                part.shared_key = keys.setdefault(key.number, SharedKey(name, key.number))
    record = dataclasses.replace(record, reads_calls=reads_calls, coming={})
    equalize(model, modules.values())
    for path, adapter in modules.items():
        if path:
            layer = inject.place_at(layer_in(model, path), path, active)
            keep_part(layer, adapter)
            sites = [placement.site for placement in record.places[path]]
            overwritten = any(site.overwritten for site in sites)
            read = next((site.read for site in sites if site.read), ())
            is_called = all(site.is_called for site in sites)
            inject.put(layer, name, adapter, active, path, overwritten, read, is_called)
        else:
            inject.put_shared(backbone, name, adapter, active)
    for key in keys.values():
        key.module = shared_by(active.default.shared, key)
    for source, reader in record.helpers():
        inject.capture_input(layer_in(model, source), reader, name, active, source)
    for path in model.anatomy.fused:
        # it then calls its layers, instead of reading their weights
        inject.capture_input(layer_in(model, path), path, name, active, path)
    for path, stack in stacks_of(model):
        guards.put_guard(stack, active)
        if record.reads_calls:
            inject.capture_input(stack, path, name, active, path, AdaptedStack)
    model._adapter_state.records[name] = record
    share_table(model, name)
    # other adapters change no ties
    if copies.tables_of(model, name) or copies.rows_of(model, name):
        copies.update_rows(model)
    copies.list_ties(model, name)


def remove(model: AdaptedModel, name: str) -> None:
    """Remove an adapter and its copy of a static head; it leaves the group that it shares with."""
    release(model, name)
    copies.leave_groups(model, [name])
    uninstall(model, name)
    copies.list_ties(model, name)


def uninstall(model: AdaptedModel, name: str) -> None:
    """Undo `install`; without adapters the model is as it was before the first one."""
    backbone, state = model._backbone, model._adapter_state
    record = state.records.pop(name)
    if not record.located.keys().isdisjoint(WITH_OUTPUTS):
        copies.update_rows(model)
    model._active.forget(name)
    state.plans.clear()
    fused = ((path, path) for path in model.anatomy.fused)
    for source, reader in (*record.helpers(), *fused):
        inject.release_input(layer_in(model, source), reader, name)
    for path in record.places:
        if path:
            inject.take(layer_in(model, path), name)
            inject.close_entry(backbone, path)
    inject.take_shared(backbone, name, model._active)
    for path, stack in stacks_of(model):
        inject.release_input(stack, path, name)
        if not state.records and state.pool is None:
            guards.take_guard(stack)


def remove_all(model: AdaptedModel) -> None:
    """Remove every adapter and fusion; merged weights stay merged."""
    state = model._adapter_state
    model._active.default.plan = Plan(None, model._active.default.plan.heads)
    if state.shares_trunk:
        share_trunk(model, False)
    for name, fusion in state.fusions.items():
        copies.take(model, fusion_key(name))
        for path in fusion.paths:
            inject.take(layer_in(model, path), fusion_key(name))
    state.fusions.clear()
    for name in tuple(state.records):
        remove(model, name)
    state.merged = ()
    state.originals.clear()
    state.head.clear()


# --- inspect and move ---


def in_float32(model: AdaptedModel, config: AdapterConfig) -> AdapterConfig:
    """Return the config with float32 parameters over layers in half precision.

    As in PEFT, copies of layers (`modules_to_save`, norms, heads) and biases keep the dtype of the
    originals. A `dtype` that the config names is kept.
    """
    if not any(p.dtype in (torch.float16, torch.bfloat16) for p in model._backbone.parameters()):
        return config
    members = [
        c.replace(dtype="float32") if "dtype" in c.field_names() and c["dtype"] is None else c
        for c in config.members
    ]
    return union_of(members)


def move(
    model: AdaptedModel, name: str, device: torch.device | str | None, dtype: torch.dtype | None
) -> None:
    """Move or cast one adapter, with its head."""
    for _, module in modules_of(model, name):
        module.to(device=device, dtype=dtype)
    for layer in copies.modules_with(model, name):
        layer.to(device=device, dtype=dtype)
    # which adapters can be active together depends on their dtypes
    replan(model)
