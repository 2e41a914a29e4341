"""Activation functions by the names that configs use.

The names and values are those of `transformers.activations.ACT2FN`, which the peers' configs refer
to, and `leakyrelu`; older releases of transformers have fewer. Functions with parameters (`prelu`,
`xielu`) are left out: configs cannot hold the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor
from transformers.activations import ACT2FN

from .config import Check
from .errors import ConfigError, unknown_name

Activation: TypeAlias = Callable[[Tensor], Tensor]

_NAMES = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
    "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu",
    "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh",
)  # fmt: skip


def identity(x: Tensor) -> Tensor:
    """Return `x` itself."""
    return x


# functions, as modules would be parts of the adapters that call them
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {name: ACT2FN[name].forward for name in _NAMES if name in ACT2FN}
    | {"leakyrelu": ACT2FN["leaky_relu"].forward}
)
"""Name to function; names are compared in lower case."""


def activation(name: str | None) -> Activation:
    """Return the function of this name, elementwise on any shape; the identity for None.

    Raises:
        ConfigError: there is no such function.
    """
    if name is None:
        return identity
    if (found := ACTIVATIONS.get(str(name).lower())) is not None:
        return found
    error = unknown_name(f"activation {name!r}", "activation", name, ACTIVATIONS)
    raise ConfigError(f"{error} Write 'relu', or None for no activation.")


class ActivationName(Check):
    """The name of an activation function, or None."""

    legal = "the name of an activation function"

    def fits(self, value: object) -> bool:
        """Return True: `activation` raises for a name that it does not know."""
        activation(value)  # type: ignore[arg-type]
        return True
