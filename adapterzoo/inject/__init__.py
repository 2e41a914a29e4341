"""Injection: the only package that changes a model. `put` and `take` undo each other.

`put` gives a layer *object* a subclass of its own class and adds the adapters as submodules; `take`
removes them and restores the class. There is no wrapper, so state-dict keys and `isinstance` stay
the same; no hook and no closure, so copies, pickles and replicas are independent. PyTorch's own
`fully_shard` changes classes in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import ENTRY
from adapterzoo.averaging import Combination
from adapterzoo.call import RecordedCall
from adapterzoo.composition.compile import evaluate, inverse_of
from adapterzoo.composition.rows import RowMap
from adapterzoo.contracts import (
    Adapter,
    AttentionAdapter,
    BaseLayer,
    Contained,
    LanguageFreeAdapter,
    LayerData,
    PositionAdapter,
    PromptAdapter,
    widest,
)
from adapterzoo.errors import CompositionError, DuplicateNameError, StateError
from adapterzoo.runtime import ActiveState, Frame, Plan

from .adapted import (
    SHARED,
    Adapted,
    AdapterDict,
    SharedDict,
    Shown,
    acting,
    adapters_of,
    base_of,
    container_of,
    plain_class,
    restore,
    shared_of,
    swap,
)
from .attention import AdaptedAttention
from .building import layer_at
from .layers import ExpertAdapters, FusedAdapters, LayerCall, as_matrix, matrix, mergeable
from .parallel import whole
from .tokens import AdaptedEmbeddings, AdaptedPositions


def put(
    layer: nn.Module,
    name: str,
    adapter: nn.Module,
    active: ActiveState,
    path: str,
    overwritten: bool = False,
    read: tuple[str, ...] = (),
    is_called: bool = True,
) -> None:
    """Add an adapter to a layer; it stays inactive until activated.

    Args:
        layer: any module of the model; its class changes to a subclass of itself.
        name: its key in `adapters_of(layer)`.
        adapter: on its final device and in its final dtype; or a module that adapters there share.
        active: the model's `Active`.
        path: the layer's path, as plans name it.
        overwritten: whether the model writes into the layer's output in place.
        read: names of parameters that the model reads outside the layer's calls.
        is_called: whether the adapter acts in the layer's calls; if not, only in reads.

    Raises:
        DuplicateNameError: the layer has an adapter of this name.
        StateError: the layer already has an attribute with the container's name.
    """
    container = container_of(adapter)
    check_put(layer, path, container)
    if isinstance(layer, Adapted) and name in adapters_of(layer):
        raise DuplicateNameError(f"{path!r} already has an adapter {name!r}. Take it first.")
    parameters = tuple(adapter._modules) if isinstance(adapter, ExpertAdapters) else ()
    shown = Shown(read, is_called)
    swap(layer, active, path, parameters, kind=_kind_for(adapter), shown=shown)
    link, modules = cast("Adapted", layer)._link, layer._modules
    link.overwritten |= overwritten
    if container not in link.containers:
        modules[container] = new = AdapterDict().train(layer.training)
        if isinstance(adapter, Contained):
            new.name_prefix = adapter.prefix
        link.containers.append(container)
    held = cast("AdapterDict", modules[container])
    held[name.removeprefix(held.name_prefix)] = adapter.train(layer.training)


def _kind_for(adapter: nn.Module) -> type[Adapted] | None:
    if isinstance(adapter, AttentionAdapter):
        return AdaptedAttention
    if isinstance(adapter, PositionAdapter):
        return AdaptedPositions
    if isinstance(adapter, LanguageFreeAdapter):
        return AdaptedLanguages
    prompts = (m for m in adapter.modules() if isinstance(m, PromptAdapter))
    return AdaptedEmbeddings if any(m.joins == "embeddings" for m in prompts) else None


def check_put(layer: nn.Module, path: str, container: str) -> None:
    """Check that an adapter can be added to a layer.

    Args:
        layer: any module of the model.
        path: the layer's path.
        container: the adapter's container.

    Raises:
        StateError: the layer already has an attribute with the container's name.
    """
    # a model with adapters may have a property of this name, which also returns a container
    if isinstance(getattr(layer, container, None), AdapterDict):
        return
    places = (
        *map(vars, plain_class(layer).__mro__),
        vars(layer),
        layer._modules,
        layer._parameters,
    )
    if any(container in place for place in places):
        raise StateError(
            f"the {type(layer).__name__} at {path!r} has an attribute {container!r}, which "
            f"adapters need. Write exclude_modules=[{path!r}]."
        )


def take(layer: nn.Module, name: str) -> Adapter:
    """Remove an adapter; after the last one the layer is as it was before the first `put`.

    Raises:
        KeyError: the layer has no adapter of this name.
    """
    adapter: Adapter = adapters_of(layer)[name]
    container, link = container_of(adapter), cast("Adapted", layer)._link
    held = cast("AdapterDict", layer._modules[container])
    del held._modules[name.removeprefix(held.name_prefix)]
    if not held:
        del layer._modules[container]
        link.containers.remove(container)
    restore(cast("Adapted", layer))
    return adapter


def capture_input(
    module: nn.Module,
    reader: str,
    name: str,
    active: ActiveState,
    path: str,
    kind: type[Adapted] | None = None,
) -> None:
    """Make a module pass its first input to a site when a plan asks for it.

    It also lets layers of the module share results.

    Args:
        module: the model's module.
        reader: path of the site that reads the input, or the module's own path if its calls are
            recorded.
        name: the adapter's name.
        active: the model's `Active`.
        path: the module's path, as plans name it.
        kind: `AdaptedStack` for an encoder or decoder whose calls are recorded.
    """
    swap(module, active, path, kind=kind)
    cast("Adapted", module)._link.helps.add((reader, name))


def put_shared(model: nn.Module, name: str, shared: nn.Module, active: ActiveState) -> None:
    """Add the module that an adapter's layers share to the base model.

    Args:
        model: the base model.
        name: the adapter's name.
        shared: the modules, by number of their config in a union.
        active: the model's `Active`.

    Raises:
        StateError: the base model already has an attribute with the name of the container.
    """
    container = container_of(shared, SHARED)
    check_put(model, "", container)
    new = SharedDict().train(model.training)
    held = cast("SharedDict", model._modules.setdefault(container, new))
    held[name] = shared.train(model.training)
    active.default.shared[name] = shared


def take_shared(model: nn.Module, name: str, active: ActiveState) -> None:
    """Undo `put_shared`; do nothing if the adapter shares nothing.

    Args:
        model: the base model.
        name: the adapter's name.
        active: the model's `Active`.
    """
    shared = shared_of(model).get(name)
    if shared is not None:
        container = container_of(shared, SHARED)
        held = cast("SharedDict", model._modules[container])
        del held._modules[name], active.default.shared[name]
        if not held:
            del model._modules[container]


def release_input(module: nn.Module, reader: str, name: str) -> None:
    """Undo `capture_input`."""
    if isinstance(module, Adapted):
        module._link.helps.discard((reader, name))
        restore(module)


def init_from_layer(
    layer: nn.Module,
    adapter: Adapter,
    originals: Mapping[str, Tensor],
    data: LayerData | None = None,
) -> None:
    """Initialize a new adapter from the layer that will get it.

    Args:
        layer: the layer.
        adapter: an adapter that has not been added yet.
        originals: the layer's parameters from before adapters were merged into it.
        data: `init_data`'s results for the layer, from which initial values are computed.
    """
    for (part,), base in _parts_with_base(layer, (adapter,), originals):
        own = cast("Adapter", part)
        own.init_from_layer(base)
        if data is not None:
            own.init_from_data(data, base)


def combine(
    layer: nn.Module,
    adapter: Adapter,
    others: Sequence[Adapter],
    weights: Sequence[float],
    strategy: Combination,
    originals: Mapping[str, Tensor],
) -> None:
    """Set an uninitialized adapter to a combination of other adapters of the layer.

    Args:
        layer: the layer.
        adapter: an adapter that has not been added yet.
        others: the adapters to combine, at least one.
        weights: a weight for each.
        strategy: how to combine them, with options.
        originals: the layer's parameters from before adapters were merged into it.

    Raises:
        CompositionError: the strategy is not defined for the method.
    """
    others = [whole(other) for other in others]
    if any(type(other) is not type(adapter) for other in others):
        kinds = ", ".join(sorted({type(other).__name__ for other in others}))
        raise CompositionError(
            f"{kinds} at one layer have no parameters in common. Add the adapters with the same "
            f"targets, or write set_active_adapters(Stack('a', 'b'))."
        )
    for (part, *parts), base in _parts_with_base(layer, (adapter, *others), originals):
        # some may have no adapter of a parameter
        there = [i for i, other in enumerate(parts) if other is not None]
        own = [cast("Adapter", parts[i]) for i in there]
        cast("Adapter", part).combine(own, [weights[i] for i in there], strategy, base)


def changes(
    layer: nn.Module, adapter: Adapter, originals: Mapping[str, Tensor]
) -> Iterator[tuple[str | None, Tensor, tuple[Tensor, Tensor] | None]]:
    """Yield the changes that an adapter makes to a layer's weights, in the widest dtype.

    Args:
        layer: the layer.
        adapter: the layer's adapter.
        originals: the layer's parameters from before adapters were merged into it.

    Yields:
        The parameter, or None for the layer's weight; the change `[*experts, d_out, d_in]`; and its
        factors, if the method has them.

    Raises:
        StateError: the adapter is not a change of the weight alone.
    """
    parameters = [*adapter._modules] if isinstance(adapter, ExpertAdapters) else [None]
    parts = _parts_with_base(layer, (adapter,), originals)
    for parameter, ((part,), base) in zip(parameters, parts, strict=True):
        own = mergeable(part)
        w = base.weight.detach().to(widest(base.weight.device))
        if parameter is None and w.dim() == 2:
            b = w.new_zeros(w.shape[0]) if base.bias is None else base.bias.detach().to(w)
            merged = own.merged_bias(b, base)
            # without values, a bias that is returned as it is does not change
            is_same = merged is b or base.bias is None if b.is_meta else torch.equal(merged, b)
            if not is_same:
                raise StateError(f"the {type(part).__name__} adapter also changes the bias")
        yield parameter, own.merged_weight(w, base) - w, own.low_rank_factors(w, base)


def _parts_with_base(
    layer: nn.Module, adapters: Sequence[Adapter], originals: Mapping[str, Tensor]
) -> Iterator[tuple[tuple[Adapter | None, ...], BaseLayer]]:
    """Yield the parts of adapters that belong together, each with the layer as they see it.

    The parts are those of the first adapter; None for an adapter that does not have it.
    """

    def shown(parameter: str) -> Tensor | None:
        kept = originals.get(parameter)
        return None if kept is None else as_matrix(layer, parameter, kept)

    adapters = [whole(adapter) for adapter in adapters]
    first = adapters[0]
    if not isinstance(first, ExpertAdapters):
        base = base_of(layer, shown("weight"), originals.get("bias"), kept=originals)
        yield tuple(adapters), base
        return
    for parameter in first._modules:
        weight = shown(parameter)
        own_weight = matrix(layer, parameter) if weight is None else weight
        parts = tuple(cast("FusedAdapters", each._modules.get(parameter)) for each in adapters)
        yield parts, base_of(layer, own_weight)


class Entry(nn.Identity):
    """The identity; its adapters change the input of the first block."""


class AdaptedBlock(Adapted):
    """Mixed into the class of the first block, and of those that may share a trunk."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on its input after the entry's adapters."""
        link = self._link
        trunk = link.active.plan.trunk
        if trunk is not None and trunk.takes(link.path):
            return trunk.run(link.path, super().forward, args, kwargs)
        entry = self._modules.get(ENTRY)
        if entry is None:
            return super().forward(*args, **kwargs)
        if args:
            return super().forward(entry(args[0]), *args[1:], **kwargs)
        first = next(iter(kwargs))
        return super().forward(**{**kwargs, first: entry(kwargs[first])})


def place_at(layer: nn.Module, path: str, active: ActiveState) -> nn.Module:
    """Return the module for an adapter; create an entry that does not exist yet.

    Args:
        layer: the module that `layer_at` found at the path.
        path: the site's path.
        active: the model's `Active`.
    """
    owner, _, name = path.rpartition(".")
    if name != ENTRY or plain_class(layer) is Entry:
        return layer
    swap(layer, active, owner, kind=AdaptedBlock)
    cast("Adapted", layer)._link.helps.add((path, ""))
    # adapters take their mode from it
    layer._modules[ENTRY] = entry = Entry().train(layer.training)
    return entry


def close_entry(model: nn.Module, path: str) -> None:
    """Remove the entry at a path if it has no adapters left; other paths do not change.

    Args:
        model: the base model.
        path: the path from which an adapter was removed.
    """
    owner, _, name = path.rpartition(".")
    if name != ENTRY:
        return
    block = layer_at(model, owner)
    if isinstance(block, AdaptedBlock) and type(block._modules[ENTRY]) is Entry:
        del block._modules[ENTRY]
        block._link.helps.discard((path, ""))
        restore(block)


_SHARES = "trunk", ""


def share_blocks(blocks: Mapping[str, nn.Module], active: ActiveState) -> None:
    """Make blocks compute equal rows once, in calls whose plan has a trunk.

    Args:
        blocks: the model's blocks, by their paths in plans.
        active: the model's `Active`.

    Raises:
        StateError: a block is an attention or embedding with adapters; nothing has changed.
    """
    for path, block in blocks.items():
        if isinstance(block, Adapted) and block._kind not in (None, AdaptedBlock):
            raise StateError(
                f"the block {path!r} is a layer with adapters. Write delete_adapter(…) first."
            )
    for path, block in blocks.items():
        swap(block, active, path, kind=AdaptedBlock)
        cast("Adapted", block)._link.helps.add(_SHARES)


def unshare_blocks(blocks: Iterable[nn.Module]) -> None:
    """Undo `share_blocks`."""
    for block in blocks:
        if isinstance(block, Adapted):
            block._link.helps.discard(_SHARES)
            restore(block)


def leave(model: nn.Module, plan: Plan, y: Tensor, rows: RowMap | None) -> Tensor:
    """Apply the inverse of the adapters at a model's entry.

    Args:
        model: the base model.
        plan: the active plan; it has an exit.
        y: the input of the last layer of a head, `[rows, tokens, d_model]`.
        rows: the batch's rows, those of `y`.
    """
    path = cast("str", plan.exit)
    layer = cast("Adapted", layer_at(model, path))
    call = layer._link.active.call
    # the model's calls are over: use the shared modules that it holds, those of this replica
    call.stacks.append(
        Frame(RecordedCall("", {}, None), functools.partial(shared_of, model), model)
    )
    try:
        base = LayerCall(model, model.forward, context=call)
        return inverse_of(*acting(layer, plan.sites[path]), y, base, rows)
    finally:
        call.stacks.pop()


class AdaptedLanguages(Adapted):
    """Mixed into the class of a module whose language adapters are replaced by other adapters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; the adapters act in its last step."""
        return super(Adapted, self).forward(*args, **kwargs)

    def lang_adapter(self, lang_ids: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the stream after the active adapters; rows without one use their language adapter.

        Args:
            lang_ids: number of each row's language.
            hidden_states: the stream, `[rows, tokens, d_model]`.
        """
        active, plan, site = self._planned()
        plain = functools.partial(super().lang_adapter, lang_ids)  # type: ignore[misc]
        if site is None:
            return cast("Tensor", plain(hidden_states))
        residual = active.call.captures.pop(self._link.path, None)
        base = LayerCall(self, plain, (hidden_states,), {}, residual, active.call)
        return evaluate(*acting(self, site), hidden_states, base, plan.rows)
