"""Torch's encoder, whose fused computation reads the weights of its layers and calls none of them.

It asks attributes of the modules before it takes that way.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from adapterzoo.runtime import ActiveState

from .adapted import Adapted, swap

# what must be true of each module
_ASKED = {
    nn.TransformerEncoder: "use_nested_tensor",
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
}


class AdaptedEncoder(Adapted):
    """Mixed into the class of an encoder or its layer: while adapters are active, it calls all."""

    @classmethod
    def members(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """Return the attribute that torch asks, which is false while adapters are active."""
        asked = next(name for kind, name in _ASKED.items() if issubclass(plain, kind))

        def answer(module: AdaptedEncoder) -> Any:
            own = vars(module)[asked]
            return own if module._link.active.plan.setup is None else type(own)(0)

        return {asked: property(answer)}


def call_layers(module: nn.Module, name: str, active: ActiveState, path: str) -> None:
    """Make torch's encoder or its layer call what it holds while adapters are active.

    Args:
        module: an `nn.TransformerEncoder` or `nn.TransformerEncoderLayer`.
        name: of an adapter of the model.
        active: the model's.
        path: of the module, as plans name it.
    """
    swap(module, active, path, kind=AdaptedEncoder)
    if isinstance(module, Adapted):
        module._link.helps.add((path, name))
