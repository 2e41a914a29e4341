"""Injection: the only module that changes a model. `put` and `take` undo each other.

`put` gives a layer *object* a subclass of its own class and hangs the adapters below it; `take`
removes them and gives the class back. No wrapper, so the base model's state-dict keys and
`isinstance` answers stay; no hook and no closure, so copies, pickles and replicas are independent.
PyTorch's own `fully_shard` changes classes in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from adapterzoo.averaging import Combination
from adapterzoo.contracts import (
    Adapter,
    AttentionAdapter,
    BaseLayer,
    PositionAdapter,
    PromptAdapter,
)
from adapterzoo.errors import CompositionError, DuplicateNameError, StateError, listing
from adapterzoo.runtime import ActiveState

from .adapted import (
    Adapted,
    AdaptedStack,
    AdapterDict,
    base_of,
    below_wrappers,
    discard,
    plain_class,
    positions_of,
    recorded,
    restore,
    set_class,
    swap,
)
from .attention import AdaptedAttention
from .embeddings import AdaptedEmbeddings
from .entry import close_entry, leave, place_at
from .parts import ExpertAdapters, FusedAdapters, is_additive, mergeable
from .positions import AdaptedPositions
from .views import matrix, put_slice, stores_transposed, take_slice

__all__ = [
    "Adapted",
    "AdapterDict",
    "ExpertAdapters",
    "FusedAdapters",
    "base_of",
    "below_wrappers",
    "capture_input",
    "check_put",
    "close_entry",
    "combine",
    "discard",
    "init_from_layer",
    "is_additive",
    "leave",
    "matrix",
    "mergeable",
    "place_at",
    "plain_class",
    "positions_of",
    "put",
    "put_shared",
    "put_slice",
    "record_calls",
    "recorded",
    "release_input",
    "set_class",
    "stores_transposed",
    "take",
    "take_shared",
    "take_slice",
]


def put(
    layer: nn.Module,
    name: str,
    adapter: nn.Module,
    selection: ActiveState,
    path: str,
    overwritten: bool = False,
) -> None:
    """Hang the adapter below the layer, inactive until the selection says otherwise.

    Args:
        layer: any module of the model; its class changes to a subclass of itself.
        name: under which the adapter is found, `layer.adapters[name]`.
        adapter: on the device and of the dtype that it shall have; or what adapters there share.
        selection: the model's.
        path: of the layer, as plans name it.
        overwritten: whether the model writes into the layer's output in place.

    Raises:
        DuplicateNameError: the layer has an adapter of this name.
        StateError: the layer has an attribute `adapters` of its own.
    """
    check_put(layer, path)
    there = layer._modules.get("adapters")
    if isinstance(there, AdapterDict) and name in there:
        raise DuplicateNameError(
            f"put({name!r}): there is one at {path!r} already. Write take(layer, {name!r}) "
            f"first, or another name."
        )
    parameters = tuple(adapter._modules) if isinstance(adapter, ExpertAdapters) else ()
    swap(layer, selection, path, parameters, kind=_kind_for(adapter))
    cast("Adapted", layer)._link.overwritten |= overwritten
    adapters = cast(
        "AdapterDict", layer._modules.setdefault("adapters", AdapterDict().train(layer.training))
    )
    adapters[name] = adapter.train(layer.training)


def _kind_for(adapter: nn.Module) -> type[Adapted] | None:
    if isinstance(adapter, AttentionAdapter):
        return AdaptedAttention
    if isinstance(adapter, PositionAdapter):
        return AdaptedPositions
    prompts = (m for m in adapter.modules() if isinstance(m, PromptAdapter))
    return AdaptedEmbeddings if any(m.joins == "embeddings" for m in prompts) else None


def check_put(layer: nn.Module, path: str) -> None:
    """Check that an adapter can hang below the layer.

    Raises:
        StateError: the layer has an attribute `adapters` of its own.
    """
    adapters = layer._modules.get("adapters")
    if isinstance(adapters, AdapterDict):
        return
    places = (
        *map(vars, plain_class(layer).__mro__),
        vars(layer),
        layer._modules,
        layer._parameters,
    )
    if any("adapters" in place for place in places):
        raise StateError(
            f"adapter at {path!r}: {type(layer).__name__} has an attribute 'adapters' of its own, "
            f"where adapters hang. Write exclude_modules=[{path!r}]."
        )


def take(layer: nn.Module, name: str) -> Adapter:
    """Remove the adapter; the last one leaves the layer as it was before the first `put`.

    Raises:
        StateError: the layer has no adapter of this name.
    """
    adapters = layer._modules.get("adapters")
    if (
        not isinstance(layer, Adapted)
        or not isinstance(adapters, AdapterDict)
        or name not in adapters
    ):
        there = sorted(adapters) if isinstance(adapters, AdapterDict) else []
        raise StateError(
            f"take({name!r}): {plain_class(layer).__name__} has no adapter of this name. Adapters "
            f"there: {listing(there)}. Write one of these."
        )
    adapter = cast("Adapter", adapters._modules.pop(name))
    if not adapters:
        del layer._modules["adapters"]
    restore(layer)
    return adapter


def capture_input(
    module: nn.Module, reader: str, name: str, selection: ActiveState, path: str
) -> None:
    """Let a module help the site `reader`, for the adapter `name`, in the way that plans say.

    It passes its first input on to the site, or lets it share what it computes with the layers
    beside it.

    Args:
        module: of the model.
        reader: path of the site.
        name: of the adapter.
        selection: the model's.
        path: of the module, as plans name it.
    """
    swap(module, selection, path)
    cast("Adapted", module)._link.helps.add((reader, name))


def record_calls(module: nn.Module, name: str, active: ActiveState, path: str) -> None:
    """Record the calls of an encoder or decoder, for the adapter `name`, in the way that plans say.

    Args:
        module: of the model.
        name: of the adapter.
        active: the model's.
        path: of the module, as plans name it.
    """
    swap(module, active, path, kind=AdaptedStack)
    cast("Adapted", module)._link.helps.add((path, name))


def put_shared(model: nn.Module, name: str, shared: nn.Module, active: ActiveState) -> None:
    """Hang what the layers of an adapter share below the base model.

    Args:
        model: the base model.
        name: of the adapter.
        shared: modules by number of the config in a union.
        active: the model's.

    Raises:
        StateError: the base model has an attribute `adapters` of its own.
    """
    check_put(model, "")
    new = AdapterDict().train(model.training)
    adapters = cast("AdapterDict", model._modules.setdefault("adapters", new))
    adapters[name] = shared.train(model.training)
    active.default.shared = adapters


def take_shared(model: nn.Module, name: str, active: ActiveState) -> None:
    """Undo `put_shared`; nothing happens where the adapter shares nothing.

    Args:
        model: the base model.
        name: of the adapter.
        active: the model's.
    """
    adapters = model._modules.get("adapters")
    if isinstance(adapters, AdapterDict) and name in adapters:
        del adapters._modules[name]
        if not adapters:
            del model._modules["adapters"]
            active.default.shared = None


def release_input(module: nn.Module, reader: str, name: str) -> None:
    """Undo `capture_input`."""
    if isinstance(module, Adapted):
        module._link.helps.discard((reader, name))
        restore(module)


def init_from_layer(layer: nn.Module, adapter: Adapter, originals: Mapping[str, Tensor]) -> None:
    """Let a fresh adapter take initial values from the layer that it will be put at.

    Args:
        layer: the layer.
        adapter: not yet put.
        originals: parameters of the layer as they were before adapters were merged into it.
    """
    for (part,), base in _beside(layer, (adapter,), originals):
        part.init_from_layer(base)


def combine(
    layer: nn.Module,
    adapter: Adapter,
    others: Sequence[Adapter],
    weights: Sequence[float],
    strategy: Combination,
    originals: Mapping[str, Tensor],
) -> None:
    """Let an adapter without values take what several others of the layer become.

    Args:
        layer: the layer.
        adapter: not yet put.
        others: at least one.
        weights: one for each.
        strategy: how they are combined, with its options.
        originals: parameters of the layer as they were before adapters were merged into it.

    Raises:
        CompositionError: the strategy makes no sense for the method.
    """
    if any(type(other) is not type(adapter) for other in others):
        kinds = sorted({type(other).__name__ for other in others})
        raise CompositionError(
            f"at one layer these are {', '.join(kinds)}, which have no parameters "
            f"in common. Add the adapters with the same targets, or write "
            f"set_active_adapters(Stack('a', 'b'))."
        )
    for (part, *parts), base in _beside(layer, (adapter, *others), originals):
        part.combine(parts, weights, strategy, base)


def _beside(
    layer: nn.Module, adapters: Sequence[Adapter], originals: Mapping[str, Tensor]
) -> Iterator[tuple[tuple[Adapter, ...], BaseLayer]]:
    """The parts of adapters that belong together, and what they see of the layer."""

    def shown(parameter: str) -> Tensor | None:
        kept = originals.get(parameter)
        return kept.mT if kept is not None and stores_transposed(layer, parameter) else kept

    first = adapters[0]
    if not isinstance(first, ExpertAdapters):
        yield tuple(adapters), base_of(layer, shown("weight"), originals.get("bias"))
        return
    for parameter in first._modules:
        weight = shown(parameter)
        own_weight = matrix(layer, parameter) if weight is None else weight
        parts = tuple(cast("FusedAdapters", adapter._modules[parameter]) for adapter in adapters)
        yield parts, base_of(layer, own_weight)
