"""Slots: adapters stacked in tensors of a fixed size, from which each row of a batch takes one.

A shelf has slots for adapters of one kind: one method with the same options, and any layers, ranks
or widths that fit. At each of its layers, the values that `forward_rows` needs are stacked,
`[slots, …]`, and padded with zeros. A new adapter in a slot changes values, and a new batch
changes an index, so compiled code is not compiled again for either.

Sources: Chen et al. 2023 (Punica), arXiv:2310.18547, §4; Sheng et al. 2023 (S-LoRA),
arXiv:2311.03285, §4, which keeps adapters in pages instead of slots.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from adapterzoo import inject
from adapterzoo.anatomy import HEAD
from adapterzoo.averaging import STRATEGIES
from adapterzoo.composition import Stack, merged_act
from adapterzoo.composition.compile import SiteStep, Slots
from adapterzoo.config import AdapterConfig
from adapterzoo.contracts import Adapter, BaseLayer, row_options
from adapterzoo.errors import ConfigError, StateError
from adapterzoo.inject.adapted import Adapted, base_of
from adapterzoo.inject.building import at_hand
from adapterzoo.inject.tokens import AdaptedStack
from adapterzoo.kernels.grouped import RowGroups
from adapterzoo.kernels.ops import exactly
from adapterzoo.runtime import Plan

from . import adapters, sharding
from .hf import guards
from .state import AdaptedModel, AdapterRecord, dtype_of, layer_in, stacks_of

Values: TypeAlias = "Mapping[str, Tensor | float]"
"""The `row_tensors` of an adapter at one layer."""

Stored: TypeAlias = "Mapping[str, Values]"
"""Path of a layer → the values of an adapter there."""


NAME = "slots"
"""The name in plans of the adapter, and of its helpers at layers."""


def nbytes(values: Values) -> int:
    """Return the bytes that a layer's values take; a number counts as eight."""
    return sum(v.nbytes if isinstance(v, Tensor) else 8 for v in values.values())


class SlotStack:
    """The adapters in the slots of a shelf at one layer.

    Attributes:
        one: an adapter of the largest size, whose options all share.
        stacks: its values by name, `[slots, …]`; numbers as float64 on the CPU.
        nothing: values of an adapter that changes nothing.
    """

    def __init__(self, one: Adapter, values: Values, nothing: Values, slots: int) -> None:
        """Make empty slots.

        Args:
            one: see the class; its parameters are no longer needed.
            values: values of the largest adapter, on the device of the layer.
            nothing: see the class.
            slots: number of slots.
        """
        self.one, self.nothing = one.to("meta"), nothing
        self.stacks = {
            name: value.new_zeros(slots, *value.shape)
            if isinstance(value, Tensor)
            else torch.zeros(slots, dtype=torch.float64, device="cpu")
            for name, value in values.items()
        }

    def __call__(self, groups: RowGroups, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output, with the adapter of its slot in each row."""
        return self.one.forward_rows(self.stacks, groups, x, base)

    def write(self, slot: int, values: Values | None) -> None:
        """Put an adapter into a slot.

        Args:
            slot: number of the slot.
            values: values of the adapter at this layer; None: it does not change this layer.
        """
        for name, value in (self.nothing if values is None else values).items():
            place = self.stacks[name][slot]
            if not isinstance(value, Tensor):
                place.fill_(value)
                continue
            if place.shape != value.shape:
                place.zero_()
            place[tuple(slice(size) for size in value.shape)].copy_(value, non_blocking=True)

    def lacks(self, values: Values) -> str:
        """Return why an adapter's values do not fit at this layer; empty if they do."""
        for name, stack in self.stacks.items():
            value = values.get(name)
            shape = value.shape if isinstance(value, Tensor) else ()
            room = stack.shape[1:]
            if len(room) != len(shape) or any(a < b for a, b in zip(room, shape, strict=True)):
                return f"{name} {list(shape)}, a slot has room for {list(room)}"
        return ""


@dataclass(eq=False)
class Shelf:
    """Slots for adapters of one kind.

    Attributes:
        kind: method and options that the adapters share, as `kind_of` returns them.
        sites: path of a layer → the slots there.
        sources: (path of a captured module, path of the layer that reads it).
        overwritten: paths of the layers into whose output the model writes in place.
        reads_calls: whether the adapters read facts about the call.
    """

    kind: Hashable
    sites: dict[str, SlotStack]
    sources: tuple[tuple[str, str], ...]
    overwritten: frozenset[str]
    reads_calls: bool

    @property
    def nbytes(self) -> int:
        """The bytes of the slots."""
        return sum(stack.nbytes for site in self.sites.values() for stack in site.stacks.values())

    def write(self, slot: int, stored: Stored) -> None:
        """Put an adapter into a slot, which nothing may be reading."""
        for path, site in self.sites.items():
            site.write(slot, stored.get(path))

    def check(self, name: str, stored: Stored) -> None:
        """Check that an adapter fits.

        Args:
            name: the adapter's name.
            stored: its values.

        Raises:
            ConfigError: it does not fit.
        """
        why = [f"{path}   no slot" for path in stored if path not in self.sites]
        for path, values in stored.items():
            if path in self.sites and (lack := self.sites[path].lacks(values)):
                why.append(f"{path}   {lack}")
        if why:
            shown = "\n  ".join(sorted(why)[:5])
            raise ConfigError(
                f"the adapter {name!r} is larger than the slots of its kind:\n  {shown}\n"
                f"Write AdapterPool(model, configs=[…]) with this adapter's config."
            )


def kind_of(config: AdapterConfig) -> Hashable:
    """Return what adapters of one shelf share: the methods, and options outside its values.

    Layers, sizes and scalings may differ.
    """
    kinds = []
    for member in config.members:
        free = member.training_fields | member.slot_fields
        options = {key: repr(v) for key, v in member.to_dict().items() if key not in free}
        kinds.append((member.architecture, tuple(sorted(options.items()))))
    return tuple(kinds)


def values_of(model: AdaptedModel, record: AdapterRecord) -> dict[str, dict[str, Any]]:
    """Return the values of an adapter that is not in the model, on the device of its modules.

    Args:
        model: the model with the layers.
        record: a record with modules.
    """
    dtype, found = dtype_of(model), {}
    with torch.no_grad():
        for path, module in record.coming.items():
            layer = layer_in(model, path)
            with at_hand(layer):
                values = module.eval().row_tensors(base_of(layer), dtype)
            found[path] = {
                name: v.detach() if isinstance(v, Tensor) else float(v)
                for name, v in values.items()
            }
    return found


def check_batched(name: str, record: AdapterRecord) -> None:
    """Check that the adapters of a record can act in slots.

    Args:
        name: the adapter's name, for messages.
        record: a record with modules.

    Raises:
        ConfigError: one of them cannot.
    """
    for path, module in record.coming.items():
        sites = [placement.site for placement in record.places[path]]
        is_read = any(site.is_only_read or site.read or site.is_routed for site in sites)
        if not path or is_read or not isinstance(module, Adapter) or row_options(module) is None:
            where = f"at {path!r}" if path else "in what its layers share"
            raise ConfigError(
                f"{name}: a {type(module).__name__} with these options {where} cannot act in a "
                f"slot. Write load_adapter(…) instead, which accepts every adapter."
            )


def make_shelves(
    model: AdaptedModel,
    configs: Iterable[AdapterConfig],
    slots: int,
    dtype: torch.dtype | None = None,
) -> list[Shelf]:
    """Return empty shelves with room for adapters of all these configs; the model does not change.

    Args:
        model: the model with the layers.
        configs: configs of adapters.
        slots: number of slots of each shelf.
        dtype: dtype of the adapters; None: the dtype that the model gives them.

    Raises:
        ConfigError: an adapter cannot act in a slot.
    """
    sharding.refuse_if_sharded(model, "Create the pool before fully_shard(model).")
    kinds: dict[Hashable, list[AdapterConfig]] = {}
    for config in dict.fromkeys(configs):
        kinds.setdefault(kind_of(config), []).append(config)
    # threads write to them with and without inference mode
    with torch.inference_mode(False), exactly(model.device):
        return [_shelf(model, kind, own, slots, dtype) for kind, own in kinds.items()]


def _shelf(
    model: AdaptedModel,
    kind: Hashable,
    configs: Sequence[AdapterConfig],
    slots: int,
    dtype: torch.dtype | None,
) -> Shelf:
    meta = torch.device("meta")
    skeletons = []
    for config in configs:
        skeletons.append(adapters.make(model, config, meta))
        check_batched(repr(config), skeletons[-1])
    largest: dict[str, int] = {}
    for number, record in enumerate(skeletons):
        for path, module in record.coming.items():
            before = largest.setdefault(path, number)
            if _size(module) > _size(skeletons[before].coming[path]):
                largest[path] = number
    with torch.random.fork_rng(devices=()):
        made = {n: adapters.make(model, configs[n]) for n in sorted({*largest.values()})}
    chosen = {path: made[number].coming[path].to(dtype=dtype) for path, number in largest.items()}
    places = {path: made[number].places[path] for path, number in largest.items()}
    record = AdapterRecord(configs[0], places, coming=chosen)
    values = values_of(model, record)
    empty = {path: without_effect(model, path, module) for path, module in chosen.items()}
    nothing = to_host(values_of(model, AdapterRecord(configs[0], places, coming=empty)))
    parts = [part for module in chosen.values() for part in module.modules()]
    overwritten = {path for path, own in places.items() if any(p.site.overwritten for p in own)}
    return Shelf(
        kind,
        {p: SlotStack(module, values[p], nothing[p], slots) for p, module in chosen.items()},
        tuple(dict.fromkeys(record.sources())),
        frozenset(overwritten),
        any(part.reads_call for part in parts if isinstance(part, Adapter)),
    )


def _size(module: Adapter) -> int:
    return sum(t.numel() for t in module.state_dict(keep_vars=True).values())


def without_effect(model: AdaptedModel, path: str, like: Adapter) -> Adapter:
    """Return an adapter that changes nothing: 0 times another one at the path."""
    layer, made = layer_in(model, path), deepcopy(like)
    originals = model._adapter_state.originals.get(path, {})
    with torch.no_grad(), at_hand(layer):
        inject.combine(layer, made, [like], [0.0], STRATEGIES["linear"], originals)
    return made


def to_host(stored: Stored, pin: bool = False) -> dict[str, dict[str, Any]]:
    """Return values on the CPU.

    Args:
        stored: values of an adapter.
        pin: whether to pin the memory, so that a GPU can copy it asynchronously.
    """

    def moved(value: Tensor | float) -> Tensor | float:
        if not isinstance(value, Tensor):
            return value
        # a copy: values mapped from a file would change with it
        own = value.to("cpu", copy=True)
        return own.pin_memory() if pin else own

    return {path: {n: moved(v) for n, v in own.items()} for path, own in stored.items()}


def put(model: AdaptedModel, pool: object, shelves: Sequence[Shelf]) -> Plan:
    """Let the layers of a model read the slots, and return the plan that does so.

    Args:
        model: the model with the layers.
        pool: the `AdapterPool` that fills the slots.
        shelves: the shelves with the slots.

    Raises:
        StateError: the model already has slots.
    """
    state, active = model._adapter_state, model._active
    if state.pool is not None:
        raise StateError("the model already has a pool. Write close() of that one first.")
    paths = dict.fromkeys(path for shelf in shelves for path in shelf.sites)
    captures: dict[str, tuple[str, ...]] = {}
    for path in paths:
        layer = inject.place_at(layer_in(model, path), path, active)
        inject.capture_input(layer, path, NAME, active, path)
        cast("Adapted", layer)._link.overwritten |= any(path in s.overwritten for s in shelves)
    for source, reader in dict.fromkeys(pair for shelf in shelves for pair in shelf.sources):
        inject.capture_input(layer_in(model, source), reader, NAME, active, source)
        captures[source] = (*captures.get(source, ()), reader)
    for path in model.anatomy.fused:
        inject.capture_input(layer_in(model, path), path, NAME, active, path)
    reads_calls = any(shelf.reads_calls for shelf in shelves)
    for path, stack in stacks_of(model):
        guards.put_guard(stack, active)
        if reads_calls:
            inject.capture_input(stack, path, NAME, active, path, AdaptedStack)
    state.pool = pool
    sites = {}
    for path in paths:
        own = {n: shelf.sites[path] for n, shelf in enumerate(shelves) if path in shelf.sites}
        step = Slots(tuple(own), path.startswith(HEAD))
        sites[path] = SiteStep(step, (NAME,), tuple(own.values()))
    stacks = frozenset(("", *(path for path, _ in stacks_of(model)))) if reads_calls else ()
    return Plan(Stack(NAME), sites=sites, captures=captures, stacks=frozenset(stacks))


def take(model: AdaptedModel, shelves: Sequence[Shelf]) -> None:
    """Undo `put`."""
    state = model._adapter_state
    helped = [(path, path) for shelf in shelves for path in shelf.sites]
    helped += [pair for shelf in shelves for pair in shelf.sources]
    helped += [(path, path) for path in model.anatomy.fused]
    for source, reader in dict.fromkeys(helped):
        inject.release_input(layer_in(model, source), reader, NAME)
    for shelf in shelves:
        for path in shelf.sites:
            inject.close_entry(model._backbone, path)
    state.pool = None
    for path, stack in stacks_of(model):
        inject.release_input(stack, path, NAME)
        if not state.records:
            guards.take_guard(stack)


def refuse_merged(model: AdaptedModel) -> None:
    """Refuse to act together with merged adapters.

    Raises:
        StateError: an adapter is merged.
    """
    if merged := model._adapter_state.merged:
        raise StateError(f"{merged_act(merged)} on every row. Write reset_adapter() first.")
