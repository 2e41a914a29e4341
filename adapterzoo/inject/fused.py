"""Torch's encoder, whose fused computation reads the weights of its layers and calls none of them.

It asks attributes of the modules before it takes that way.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# what must be true of each module
_ASKED = {
    nn.TransformerEncoder: "use_nested_tensor",
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
}


def asked(plain: type[nn.Module]) -> dict[str, Any]:
    """Return the attribute that torch asks of an encoder, which is false while adapters are active.

    Args:
        plain: the own class of a module; nothing is asked of classes other than an encoder's.
    """

    def attribute(name: str) -> property:
        def answer(module: Any) -> Any:
            own = vars(module)[name]
            return own if module._link.active.plan.setup is None else type(own)(0)

        return property(answer)

    return {name: attribute(name) for kind, name in _ASKED.items() if issubclass(plain, kind)}
