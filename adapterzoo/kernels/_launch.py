"""Launching Triton kernels on the device of their operands.

Triton launches on the *current* device without checking where the operands are: reading a pointer
into another GPU's memory gives zeros, old values or an illegal access. So every launch of this
package goes through `launch`; a test finds those that do not.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from adapterzoo.errors import KernelError, listing

# read once, like Triton does when a kernel is declared
INSTALLED = find_spec("triton") is not None
INTERPRETED = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
# torch calls AMD's GPUs "cuda" too; no kernel has run there, and some do not compile
ROCM = torch.version.hip is not None

# the interpreter keeps the number of the running program in a global variable
_INTERPRETER = threading.Lock()


def obstacle(x: Tensor) -> str | None:
    """Return why Triton cannot run on the device of `x`; None if it can."""
    if not INSTALLED:
        return "triton is not installed"
    if INTERPRETED:
        return None
    if x.device.type != "cuda":
        return f"the operands are on {x.device}, and Triton needs a CUDA device"
    if ROCM:
        return f"{x.device} is an AMD GPU, on which the kernels have not been tested"
    if _capability(x.device) < (8, 0):
        return f"{x.device} is older than compute capability 8.0"
    return None


def is_captured() -> bool:
    """Return whether a CUDA graph records the calls of the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def launch(kernel: Any, grid: tuple[int, ...], *operands: object, **constants: object) -> None:
    """Run a kernel on the device of its operands, on the current stream of that device.

    Args:
        kernel: a function under `triton.jit`.
        grid: number of programs along each axis; nothing runs if one is 0.
        operands: tensors and numbers, in the kernel's order.
        constants: its constant expressions and Triton's own options.

    Raises:
        KernelError: the operands are not all on one device, or Triton cannot run there.
    """
    tensors = [(i, value) for i, value in enumerate(operands) if isinstance(value, Tensor)]
    first = tensors[0][1]
    if any(tensor.device != first.device for _, tensor in tensors):
        places = [f"{kernel.arg_names[i]} on {tensor.device}" for i, tensor in tensors]
        raise KernelError(
            f"{kernel.fn.__name__}: operands on several devices: {listing(places)}. "
            f"All must be on one. Move them with .to(device)."
        )
    if reason := obstacle(first):
        raise KernelError(
            f"{kernel.fn.__name__}: {reason}. Write adapterzoo.kernels.use('auto'), or move the "
            f"operands to a CUDA device."
        )
    if 0 in grid:
        return
    guard: AbstractContextManager[object] = _INTERPRETER if INTERPRETED else nullcontext()
    with guard, torch.cuda.device_of(first):
        kernel[grid](*operands, **constants)


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return _read_capability(device)


# compiled code takes the result as a constant: torch.compiler.assume_constant_result would import
# Triton here
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]
_read_capability = cache(torch.cuda.get_device_capability)
