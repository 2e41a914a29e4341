"""The site at the input of the first block.

The block gets a child that returns its input, and adapters are added to that child as to any layer.
It has no parameters, and is removed with the last adapter.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from adapterzoo.anatomy import ENTRY
from adapterzoo.composition import RowMap, inverse_of
from adapterzoo.contracts import Adapter
from adapterzoo.runtime import ActiveState, Plan, shared_by

from .adapted import Adapted, acting, restore, swap, without_kind
from .building import layer_at
from .containers import shared_of
from .views import LayerCall


class Entry(nn.Module):
    """The identity; its adapters change the input of the first block."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` `[rows, tokens, d_model]`."""
        return x


class AdaptedBlock(Adapted):
    """Mixed into the class of the first block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on its input as changed by the adapters of the entry."""
        entry = cast("nn.Module", self._modules[ENTRY])
        if args:
            return super().forward(entry(args[0]), *args[1:], **kwargs)
        first = next(iter(kwargs))
        return super().forward(**{**kwargs, first: entry(kwargs[first])})


def place_at(model: nn.Module, path: str, active: ActiveState) -> nn.Module:
    """Return the module at a path; create an entry that does not exist yet.

    Args:
        model: the base model.
        path: of the module.
        active: the model's.
    """
    layer = layer_at(model, path)
    owner, _, name = path.rpartition(".")
    if name != ENTRY or ENTRY in layer_at(model, owner)._modules:
        return layer
    swap(layer, active, owner, kind=AdaptedBlock)
    cast("Adapted", layer)._link.helps.add((path, ""))
    # adapters take over its mode
    layer._modules[ENTRY] = entry = Entry().train(layer.training)
    return entry


def close_entry(model: nn.Module, path: str) -> None:
    """Remove the entry at a path if it has no adapters left; other paths do not change.

    Args:
        model: the base model.
        path: from which an adapter was removed.
    """
    owner, _, name = path.rpartition(".")
    if name != ENTRY:
        return
    block = layer_at(model, owner)
    if isinstance(block, AdaptedBlock) and type(block._modules[ENTRY]) is Entry:
        del block._modules[ENTRY]
        block._link.helps.discard((path, ""))
        without_kind(block)
        restore(block)


class _ExitCall(LayerCall):
    """The layer as passed to adapters after the last block: shared modules, on this replica."""

    __slots__ = ("_shared",)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, model.forward)
        self._shared = shared_of(model)

    def shared(self, adapter: Adapter) -> nn.Module:
        """Return the module that the adapter's layers share."""
        key = adapter.shared_key
        if key is None or not adapter.is_replica:
            return super().shared(adapter)
        return shared_by(self._shared, key)


def leave(model: nn.Module, plan: Plan, y: Tensor, rows: RowMap | None) -> Tensor:
    """Return the inverse of what the adapters at the entry of a model compute.

    Args:
        model: the base model.
        plan: the active plan; it has an exit.
        y: the input of the last layer of a head, `[rows, tokens, d_model]`.
        rows: of the batch, those of `y`.
    """
    path = cast("str", plan.exit)
    return inverse_of(*acting(layer_at(model, path), plan.sites[path]), y, _ExitCall(model), rows)
