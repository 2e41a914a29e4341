"""Reading the quantized weights of each library.

The libraries are optional and imported only for their own weights: the class of a weight shows that
its library is installed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn


class Packing:
    """How to read one kind of packed weight; by default torchao's, which look like plain tensors.

    These functions do not keep what they return.
    """

    def is_packed(self, weight: Any) -> bool:
        """Return whether the weight is already quantized; some classes hold plain numbers first."""
        return True

    def read(self, layer: nn.Module, weight: Any) -> Tensor:
        """Return the weight in floating point, in the shape that the layer stores.

        Args:
            layer: the owner of the weight, which may keep the scales.
            weight: packed.
        """
        return cast("Tensor", weight.dequantize())

    def count(self, weight: Any) -> int:
        """Return how many numbers the weight has when unpacked."""
        return cast("Tensor", weight).numel()

    def unpack(self, layer: nn.Module, weight: Any) -> None:
        """Let gradients pass through the layer, even after inference."""


class FourBit(Packing):
    """bitsandbytes' `Params4bit`: two numbers per byte, `[d_out · d_in / 2, 1]`, and block scales.

    On a CPU with bfloat16 instructions, the first forward without gradients reorders the weight
    permanently: `dequantize_4bit` misreads that order, and gradients do not pass.
    """

    def is_packed(self, weight: Any) -> bool:
        """Return whether scales exist; the dtype can be bfloat16 for packed bytes too."""
        return weight.quant_state is not None

    def read(self, layer: nn.Module, weight: Any) -> Tensor:
        """Return the weight `[d_out, d_in]`, in the dtype that it had before."""
        from bitsandbytes import functional

        data, state = _in_first_order(weight)
        plain: Tensor = functional.dequantize_4bit(data, state)
        return plain

    def count(self, weight: Any) -> int:
        """Return d_out · d_in."""
        return math.prod(weight.quant_state.shape)

    def unpack(self, layer: nn.Module, weight: Any) -> None:
        """Restore the weight's first order, permanently."""
        weight.data, weight.quant_state = _in_first_order(weight)
        if "support_avx512bf16_for_cpu" in vars(layer):
            cast("Any", layer).support_avx512bf16_for_cpu = False


class EightBit(Packing):
    """bitsandbytes' `Int8Params`: `[d_out, d_in]` in int8, with one scale per row."""

    def is_packed(self, weight: Any) -> bool:
        """Return whether the numbers are integers."""
        return not cast("Tensor", weight).is_floating_point()

    def read(self, layer: nn.Module, weight: Any) -> Tensor:
        """Return the weight `[d_out, d_in]`, in float32."""
        from bitsandbytes import functional

        # the first forward moves the scales from the weight to the layer
        scales = cast("Any", layer).state.SCB if weight.SCB is None else weight.SCB  # [d_out]
        plain: Tensor = functional.int8_vectorwise_dequant(weight.data, scales)
        return plain


# by package and class of a weight, or a base of its class
PACKINGS: Mapping[str, Packing] = {
    "bitsandbytes.Int8Params": EightBit(),
    "bitsandbytes.Params4bit": FourBit(),
    "torchao.TorchAOBaseTensor": Packing(),
}


def packing_of(weight: Tensor | None) -> Packing | None:
    """Return how to read a packed weight; None for one that is not packed.

    Args:
        weight: of a layer, None if it has none.
    """
    # torch.compile sees only the others
    if weight is None or type(weight) in (Tensor, nn.Parameter):
        return None
    for cls in type(weight).__mro__:
        found = PACKINGS.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if found is not None:
            return found if found.is_packed(weight) else None
    return None


def is_quantized(layer: nn.Module) -> bool:
    """Return whether any parameter of the layer itself is packed.

    Args:
        layer: any module.
    """
    return any(packing_of(p) is not None for p in layer._parameters.values())


def was_transposed(layer: nn.Module) -> bool:
    """Return whether a layer stored its weight `[d_in, d_out]` before it was quantized.

    Args:
        layer: quantized; for GPT-2's Conv1D, a linear layer that knows its former class.
    """
    return getattr(getattr(layer, "source_cls", None), "__name__", "") == "Conv1D"


def count(weight: Tensor) -> int:
    """Return how many numbers a weight has, when unpacked.

    Args:
        weight: any tensor.
    """
    packing = packing_of(weight)
    return weight.numel() if packing is None else packing.count(weight)


def unpack(model: nn.Module) -> None:
    """Let gradients pass through all quantized layers of a model.

    Args:
        model: the values of its weights do not change.
    """
    for layer in model.modules():
        for weight in layer._parameters.values():
            if (packing := packing_of(weight)) is not None:
                packing.unpack(layer, weight)


def _in_first_order(weight: Any) -> tuple[Tensor, Any]:
    """Return (bytes, state) of a `Params4bit` in its first order; it is not changed."""
    data, state = weight.data, weight.quant_state
    if not getattr(state, "packing_format_for_cpu", False):
        return data, state
    from bitsandbytes import functional

    # the code below writes into the state
    state = copy.copy(state)
    # do not quantize the scales again: that would cost precision
    state.original_nested = False
    reordered, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
    if state.absmax.dim() == 2:
        # bitsandbytes 0.50 leaves them in the other order, [d_in / block, d_out]
        state.absmax = state.absmax.T.reshape(-1).float()  # [d_in / block · d_out]
    return reordered, state
