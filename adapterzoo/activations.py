"""Activation functions by the names that configs use.

The names and values are those of `transformers.activations.ACT2FN`, which the peers' configs refer
to, and `leakyrelu`. Functions with parameters (`prelu`, `xielu`) are left out: configs cannot hold
the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import Check
from .errors import ConfigError, unknown_name

Activation: TypeAlias = Callable[[Tensor], Tensor]

_ROOT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def identity(x: Tensor) -> Tensor:
    """Return `x` itself."""
    return x


def gelu_new(x: Tensor) -> Tensor:
    """GELU by tanh: x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), arXiv:1606.08415, §2."""
    # not F.gelu(approximate="tanh"): its rounding differs, and checkpoints were made with this
    return 0.5 * x * (1.0 + torch.tanh(_ROOT_2_OVER_PI * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: Tensor) -> Tensor:
    """The formula of `gelu_new`, expanded, with a rounded constant."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def gelu_tanh(x: Tensor) -> Tensor:
    """The formula of `gelu_new` in one fused operation."""
    return F.gelu(x, approximate="tanh")


def gelu_python(x: Tensor) -> Tensor:
    """GELU: x/2 · (1 + erf(x/√2)), operation by operation."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu_10(x: Tensor) -> Tensor:
    """GELU clipped to [−10, 10], arXiv:2004.09602."""
    return torch.clip(F.gelu(x), -10, 10)


def quick_gelu(x: Tensor) -> Tensor:
    """Return x · σ(1.702 x), a cheap approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


def laplace(x: Tensor) -> Tensor:
    """(1 + erf((x − μ) / (σ√2))) / 2 with μ = √½ and σ = √(1/4π), arXiv:2209.10655."""
    return 0.5 * (1.0 + torch.erf((x - 0.707107).div(0.282095 * math.sqrt(2.0))))


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU, max(x, 0)², So et al. 2021, arXiv:2109.08668."""
    return torch.square(F.relu(x))


def sqrtsoftplus(x: Tensor) -> Tensor:
    """√(ln(1 + eˣ))."""
    return F.softplus(x).sqrt()


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_10": gelu_10,
        "gelu_accurate": gelu_new,
        "gelu_fast": gelu_fast,
        "gelu_new": gelu_new,
        "gelu_python": gelu_python,
        "gelu_python_tanh": gelu_new,
        "gelu_pytorch_tanh": gelu_tanh,
        "hardswish": F.hardswish,
        "laplace": laplace,
        "leaky_relu": F.leaky_relu,
        "leakyrelu": F.leaky_relu,
        "linear": identity,
        "mish": F.mish,
        "quick_gelu": quick_gelu,
        "relu": F.relu,
        "relu2": relu2,
        "relu6": F.relu6,
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "sqrtsoftplus": sqrtsoftplus,
        "swish": F.silu,
        "tanh": torch.tanh,
    }
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
