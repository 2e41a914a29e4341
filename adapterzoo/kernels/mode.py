"""Which code computes a kernel: Triton, torch operations, or the definition."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import Tensor

from adapterzoo.errors import KernelError, listing

from . import _launch
from .exact import is_autocast

_MODES = ("auto", "reference", "triton")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# subclasses may compute differently or hide their memory, and fake tensors have no values
ORIGINAL = (Tensor, torch.nn.Parameter)

# On a GPU, where calls of registered operators cost the host more than plain ones, and the GPU
# waits for the host if there is little to compute. An assumption: with up to so many values, the
# passes that plain operations add (one over y for a low-rank update, four of float32 for a
# composition) cost less than the calls that they save.
_FEW_ON_GPU = 1 << 19

# a plain global, which torch.compile guards, unlike a ContextVar: it recompiles after a change
_mode = "auto"
_CHANGE = threading.Lock()


def use(mode: str) -> contextlib.ExitStack:
    """Choose what computes all kernels, from now on or until a `with` block ends.

    A mode changes time and memory; results change only by rounding and by the random numbers of
    dropout. It applies to the whole process: other threads see the change at their next call, and
    overlapping `with` blocks of two threads interfere. A backward pass uses the mode that is set
    when it runs, not that of its forward. A compiled model is recompiled after a change.

    Args:
        mode: `"auto"`: Triton on CUDA if it takes the operands, otherwise torch operations with
            hand-written backward passes. `"reference"`: the definitions, differentiated by
            autograd. `"triton"`: Triton or an error.

    Returns:
        A context manager that restores the earlier mode at its end.

    Raises:
        KernelError: there is no such mode, or Triton cannot run in this process.
    """
    if mode not in _MODES:
        raise KernelError(
            f"use({mode!r}): there is no such mode. Legal are {listing(_MODES)}. Write use('auto')."
        )
    if mode == "triton" and not _launch.INTERPRETED:
        missing = not _launch.INSTALLED
        if missing or _launch.ROCM or not torch.cuda.is_available():
            what = "torch is built for AMD GPUs" if _launch.ROCM else "torch sees no CUDA device"
            hint = "Set TRITON_INTERPRET=1 before Python starts"
            if missing:
                what, hint = "triton is not installed", "Install triton"
            raise KernelError(
                f"use('triton'): {what}. {hint}, or write use('auto'), which uses torch "
                f"operations where Triton cannot run."
            )
    block = contextlib.ExitStack()
    block.callback(_set, _set(mode))
    return block


def is_reference() -> bool:
    """Return whether to compute kernels by their definitions, as for torch.func.

    Its transforms cannot look into operators of our own.
    """
    if _mode == "reference":
        return True
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_plain(x: Tensor, draws: bool = False) -> bool:
    """Return whether torch operations compute a kernel of `x`, and no autocast changes a dtype.

    This is the usual case on a CPU, where each call in Python counts.

    Args:
        x: the input.
        draws: whether the kernel draws random numbers; see `may_take_triton`.
    """
    if x.is_cpu and _mode == "auto":
        cast = torch.is_autocast_enabled("cpu")
        return not (cast or (torch._C._are_functorch_transforms_active() and is_reference()))
    return not (is_autocast(x.device) or may_take_triton(x, draws) or is_reference())


def is_batched(grad: Tensor) -> bool:
    """Return whether a gradient is many at once (`is_grads_batched`), which `out=` cannot hold."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def may_take_triton(x: Tensor, draws: bool = False) -> bool:
    """Return whether to call an operator that Triton may compute: `asks_triton`, but not for few.

    Few values without gradients, as in decoding, take plain operations, because the host's calls
    take most of the time. Compiled and captured code makes no such calls.

    Args:
        x: the input.
        draws: whether the kernel draws random numbers: they must not depend on gradients, because a
            reentrant checkpoint runs first without them.
    """
    return asks_triton(x) and not (_mode == "auto" and not draws and _is_bound_by_host(x))


def asks_triton(x: Tensor) -> bool:
    """Return whether Triton computes at all: on CUDA, or if it is requested."""
    return _mode == "triton" or (_mode == "auto" and x.device.type == "cuda" and not _launch.ROCM)


def _is_bound_by_host(x: Tensor) -> bool:
    return not (
        torch.is_grad_enabled()
        or x.numel() > _FEW_ON_GPU
        or torch.compiler.is_compiling()
        or _launch.is_captured()
    )


def takes_triton(kernel: str, *operands: Tensor, single: bool = False) -> bool:
    """Return whether Triton computes a kernel for these operands.

    Operands that are all float32 are left to torch: a GPU's matrix units would need three products
    for each, and models for GPUs are in half precision. The interpreter takes them.

    Args:
        kernel: its name, for the message.
        operands: all of its floating-point tensors, on one device.
        single: whether Triton takes operands that are all float32 too.

    Raises:
        KernelError: the mode is `"triton"`, and Triton cannot take them.
    """
    # the interpreter runs only in the mode "triton"
    if not asks_triton(operands[0]):
        return False
    reason = _launch.obstacle(operands[0])
    if reason is None:
        wide = next((x.dtype for x in operands if x.dtype not in _DTYPES), None)
        reason = f"it does not compute in {_name(wide)}" if wide else None
    if reason is None and not (single or _launch.INTERPRETED):
        alone = all(x.dtype is torch.float32 for x in operands)
        reason = "it leaves operands that are all float32 to torch" if alone else None
    if reason is None:
        return True
    if _mode == "triton":
        names = [_name(dtype) for dtype in _DTYPES]
        raise KernelError(
            f"use('triton') and {kernel}: {reason}. Triton takes {listing(names)} on CUDA devices. "
            f"Write adapterzoo.kernels.use('auto')."
        )
    return False


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _set(mode: str) -> str:
    """Change the mode; return the earlier one."""
    global _mode
    with _CHANGE:
        before, _mode = _mode, mode
    return before
