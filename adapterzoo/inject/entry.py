"""What stands in front of the first block while adapters act there.

The block gets a child that passes on what it is given, and adapters hang below that child as they
do below any layer. It has no parameters, and goes with the last adapter.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from adapterzoo.anatomy import ENTRY
from adapterzoo.runtime import ActiveState

from .adapted import Adapted, restore, swap
from .building import layer_at


class Entry(nn.Module):
    """The identity; adapters at it change what the first block is given."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` `[rows, tokens, d_model]`."""
        return x


class AdaptedBlock(Adapted):
    """Mixed into the class of the first block."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, of what the adapters in front of it make of its input."""
        entry = cast("nn.Module", self._modules[ENTRY])
        if args:
            return super().forward(entry(args[0]), *args[1:], **kwargs)
        first = next(iter(kwargs))
        return super().forward(**{**kwargs, first: entry(kwargs[first])})


def place_at(model: nn.Module, path: str, active: ActiveState) -> nn.Module:
    """Return the module at a path; an entry that is not there yet is put in front of its block.

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
    layer._modules[ENTRY] = entry = Entry()
    return entry


def close_entry(model: nn.Module, path: str) -> None:
    """Take away the entry at a path if nothing is there any more; other paths stay as they are.

    Args:
        model: the base model.
        path: from which an adapter has been taken.
    """
    owner, _, name = path.rpartition(".")
    if name != ENTRY:
        return
    block = layer_at(model, owner)
    if isinstance(block, AdaptedBlock) and type(block._modules[ENTRY]) is Entry:
        del block._modules[ENTRY]
        block._link.helps.discard((path, ""))
        restore(block)
