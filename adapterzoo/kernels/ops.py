"""The choice of code that computes a kernel, and registration and launch of operators.

An operator has two forms: its definition in torch operations, with its own backward, and a
Triton kernel; one call registers both. Registered operators work with `torch.compile`, fake
tensors, autocast, DDP and FSDP2.

Triton launches on the *current* device without checking where the operands are: reading a pointer
into another GPU's memory gives zeros, old values or an illegal access. So every launch of this
package goes through `launch`; a test finds those that do not.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeAlias

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
_read_capability = cache(torch.cuda.get_device_capability)
_MODES = ("auto", "reference", "triton")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# subclasses may compute differently or hide their memory, and fake tensors have no values
ORIGINAL = (Tensor, torch.nn.Parameter)
# a plain global, which torch.compile guards, unlike a ContextVar: it recompiles after a change
_mode = "auto"
_CHANGE = threading.Lock()
_LIBRARY = torch.library.Library("adapterzoo", "FRAGMENT")
# torch.library looks up its caller by inspect.getmodule, which searches all modules for a file
# missing from its (private) cache
inspect.modulesbyfile[__file__] = __name__
# the dispatch key that tracks views
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
# the device types that have an autocast dispatch key
_AUTOCAST = ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1")
Operator: TypeAlias = Callable[..., Any]
"""An operator, or a function that computes it, of tensors, numbers and strings."""
Prepare: TypeAlias = Callable[[bool, tuple[Any, ...]], tuple[Any, ...]]
"""Whether Triton computes, and an operator's arguments → the function's arguments."""


def obstacle(x: Tensor) -> str | None:
    """Return why Triton cannot run on the device of `x`; None if it can."""
    if not INSTALLED:
        return "triton is not installed"
    if INTERPRETED:
        return None
    if x.device.type != "cuda":
        return f"the operands are on {x.device}, but Triton needs a CUDA device"
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
        constants: the kernel's constant expressions, and Triton's own options.

    Raises:
        KernelError: the operands are not all on one device.
    """
    tensors = [(i, value) for i, value in enumerate(operands) if isinstance(value, Tensor)]
    first = tensors[0][1]
    if any(tensor.device != first.device for _, tensor in tensors):
        places = [f"{kernel.arg_names[i]} on {tensor.device}" for i, tensor in tensors]
        raise KernelError(
            f"{kernel.fn.__name__}: operands on several devices: {listing(places)}. "
            f"Move them to one with .to(device)."
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


def exactly(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast changes no dtype; some device types have no autocast.

    Args:
        device: device of the operands.
    """
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()


def is_autocast(device: torch.device) -> bool:
    """Return whether autocast changes dtypes on a device; some device types have none."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def use(mode: str) -> contextlib.ExitStack:
    """Choose the code that computes all kernels, permanently or until a `with` block ends.

    A mode changes time and memory; results change only by rounding and by the random numbers of
    dropout. It applies to the whole process: other threads see the change at their next call, and
    overlapping `with` blocks of two threads interfere. A backward pass uses the mode that is set
    when it runs, not that of its forward. A compiled model is recompiled after a change.

    Args:
        mode: `"auto"`: Triton on CUDA if it takes the operands, else torch operations with
            hand-written backward passes. `"reference"`: the definitions, differentiated by
            autograd. `"triton"`: Triton or an error.

    Returns:
        A context manager that restores the earlier mode at its end.

    Raises:
        KernelError: there is no such mode.
    """
    if mode not in _MODES:
        raise KernelError(f"use({mode!r}): the modes are {listing(_MODES)}. Write use('auto').")
    block = contextlib.ExitStack()
    block.callback(_set, _set(mode))
    return block


def is_reference() -> bool:
    """Return whether to compute kernels by their definitions, as for torch.func.

    Its transforms cannot look into custom operators.
    """
    if _mode == "reference":
        return True
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_plain(x: Tensor) -> bool:
    """Return whether torch operations compute a kernel of `x`, and autocast changes no dtype.

    This is the usual case on a CPU, where each call in Python counts.
    """
    if x.is_cpu and _mode == "auto":
        cast = torch.is_autocast_enabled("cpu")
        return not (cast or (torch._C._are_functorch_transforms_active() and is_reference()))
    return not (is_autocast(x.device) or asks_triton(x) or is_reference())


def asks_triton(x: Tensor) -> bool:
    """Return whether Triton is used at all: on CUDA, or on request."""
    return _mode == "triton" or (_mode == "auto" and x.device.type == "cuda" and not ROCM)


def takes_triton(kernel: str, *given: Tensor | None, single: bool = False) -> bool:
    """Return whether Triton computes a kernel for these operands.

    Operands that are all float32 are left to torch: a GPU's matrix units would need three products
    for each, and models for GPUs are in half precision. The interpreter takes them.

    Args:
        kernel: name of the kernel, for the message.
        given: all its floating-point tensors, on one device; None is ignored.
        single: whether Triton also takes operands that are all float32.

    Raises:
        KernelError: the mode is `"triton"`, and Triton cannot take them.
    """
    # the interpreter runs only in the mode "triton"
    first = given[0]
    if first is None or not asks_triton(first):
        return False
    dtypes = [x.dtype for x in given if x is not None]
    reason = obstacle(first)
    if reason is None and any(dtype not in _DTYPES for dtype in dtypes):
        reason = f"it does not compute in {next(d for d in dtypes if d not in _DTYPES)}"
    takes_single = single or INTERPRETED
    if reason is None and not takes_single and all(d is torch.float32 for d in dtypes):
        reason = "it leaves operands that are all float32 to torch"
    if reason is not None and _mode == "triton":
        raise KernelError(
            f"use('triton') and {kernel}: {reason}. Triton takes float32, float16 and bfloat16 on "
            f"CUDA devices. Write adapterzoo.kernels.use('auto')."
        )
    return reason is None


def _set(mode: str) -> str:
    """Change the mode; return the earlier one."""
    global _mode
    with _CHANGE:
        before, _mode = _mode, mode
    return before


def register(
    schema: str,
    run: Operator,
    shapes: Operator,
    function: type[torch.autograd.Function] | None = None,
    narrows: tuple[int, ...] = (),
) -> Operator:
    """Define an operator `adapterzoo::name`; no output may share memory with an input.

    A call costs 6 µs more than `run` without gradients and 13 µs more with them; a product of two
    small matrices costs 3 µs.

    Args:
        schema: `"name(Tensor x, …) -> Tensor"`.
        run: computes it on every device, below autograd and autocast.
        shapes: the same for fake tensors: empty outputs of the right shape, dtype and device.
        function: its `forward` saves for the backward pass and returns `below(op, …)`; None for
            an operator that is not differentiated.
        narrows: positions of the tensors that autocast casts to its dtype, float64 excepted.

    Returns:
        The operator.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"adapterzoo::{name}", shapes, lib=_LIBRARY)
    op: Operator = getattr(torch.ops.adapterzoo, name).default
    for kind in _AUTOCAST:
        _LIBRARY.impl(name, _exact(op, kind.lower(), narrows), f"Autocast{kind}")
    if function is not None:
        apply = function.apply

        # without gradients a Function would only add cost
        def differentiable(*args: Any) -> Any:
            return apply(*args) if torch.is_grad_enabled() else below(op, *args)

        _LIBRARY.impl(name, differentiable, "Autograd")
    return op


def product(
    schema: str,
    triton: str,
    in_torch: tuple[Operator, Operator],
    shapes: Operator,
    *,
    added: bool = False,
    noise: int | None = None,
    prepare: Prepare | None = None,
    narrows: tuple[int, ...] = (),
    width: Callable[[Tensor], int] = lambda factor: factor.shape[-1],
) -> tuple[Callable[..., Tensor], Operator]:
    """Define an operator that multiplies x by a factor, and the operator of its backward.

    Each of the two gradients needs the other operand. The backward gets the gradient, all arguments
    except the one that the product is added to, and which of the two gradients are needed; it
    returns both, empty if not needed.

    Args:
        schema: see `register`; x and the factor come first, or after the argument that the product
            is added to.
        triton: `"module.function"`; its backward is `function_backward`.
        in_torch: the product in torch operations, and its backward.
        shapes: see `register`.
        added: whether the product is added to the first argument.
        noise: the position of dropout's noise; None: no dropout.
        prepare: converts the operator's arguments to those of the functions.
        narrows: see `register`.
        width: a function that returns the width of x from the factor.

    Returns:
        Both operators.
    """
    forward, backward = in_torch

    def shapes_of_both(grad: Tensor, x: Tensor, factor: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        needs_x, needs_factor = rest[-2:]
        dx = x.new_empty((*grad.shape[:-1], width(factor)) if needs_x else 0)
        return dx, factor.new_empty(factor.shape if needs_factor else 0)

    def backpropagated(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return op_backward(*args)
        return backward(*(args if prepare is None else prepare(False, args)))

    class ProductFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            x, factor, *rest = args[added:]
            # without a gradient of the factor, only the dtype of x is needed
            x = x if ctx.needs_input_grad[added + 1] else x.new_empty(0)
            tensors = [v if isinstance(v, Tensor) else None for v in rest]
            ctx.save_for_backward(x, factor, *tensors)
            ctx.rest = [None if isinstance(v, Tensor) else v for v in rest]
            return below(op, *args)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, factor, *tensors = ctx.saved_tensors
            rest = [v if t is None else t for t, v in zip(tensors, ctx.rest, strict=True)]
            needs = ctx.needs_input_grad[added : added + 2]
            found = backpropagated(grad, x, factor, *rest, *needs)
            own = (g if need else None for g, need in zip(found, needs, strict=True))
            return *[grad] * added, *own, *[None] * len(rest)

    name, _, arguments = schema.partition("(")
    inner = arguments.partition(")")[0].split(", ")[added:]
    run = computed(triton, forward, 2 + added, noise, prepare)
    op = register(schema, run, shapes, ProductFunction, narrows)
    op_backward = register(
        f"{name}_backward(Tensor grad, {', '.join(inner)}, bool needs_x, bool needs_factor) "
        f"-> (Tensor, Tensor)",
        computed(f"{triton}_backward", backward, 3, None if noise is None else noise + 1, prepare),
        shapes_of_both,
    )
    return op, op_backward


def computed(
    triton: str,
    in_torch: Operator,
    operands: int,
    noise: int | None = None,
    prepare: Prepare | None = None,
    single: bool = False,
) -> Operator:
    """Return a function that runs Triton if it takes the operands, else torch operations.

    Args:
        triton: `"module.function"`, imported when needed.
        in_torch: the same in torch operations.
        operands: number of leading arguments that Triton must be able to take; None is ignored.
        noise: the position of dropout's noise: a seed is for Triton and bits are for torch, so
            that a backward uses the mask of its forward.
        prepare: converts the operator's arguments to those of the functions.
        single: see `takes_triton`.
    """

    def run(*args: Any) -> Any:
        module, name = triton.split(".")
        drawn = None if noise is None else args[noise]
        if drawn is None:
            taken = takes_triton(name, *args[:operands], single=single)
        else:
            taken = drawn.dtype is torch.int64
        args = args if prepare is None else prepare(taken, args)
        compute = in_torch
        if taken:
            compute = getattr(importlib.import_module(f".{module}", __package__), name)
        out = compute(*args)
        # the memory layout of the fake outputs; Triton may leave a product to torch
        if isinstance(out, Tensor):
            return out.contiguous()
        return tuple(map(Tensor.contiguous, out))

    return run


def below(op: Operator, *args: Any) -> Any:
    """Call an operator from its own `Function.forward`.

    No output is tracked as a view, even if it was reshaped: a model may change it in place.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        return op(*args)


def _exact(op: Operator, kind: str, narrows: tuple[int, ...]) -> Operator:
    """Return the operator for autocast, which must not affect the operations inside."""
    device = torch._C._get_privateuse1_backend_name if kind == "privateuse1" else lambda: kind

    def run(*args: Any) -> Any:
        own = device()
        dtype = torch.get_autocast_dtype(own)
        cast = [
            v.to(dtype) if i in narrows and v.dtype is not torch.float64 else v
            for i, v in enumerate(args)
        ]
        with torch.autocast(own, enabled=False):
            return op(*cast)

    return run


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `run(x)`; keeps only x for the backward.

    Args:
        run: a function that draws no random numbers, reads no other learned tensor, and does not
            depend on autocast.
        x: a tensor of any shape.
    """
    if torch.compiler.is_compiling() or is_reference():
        return run(x)
    y: Tensor = _Recomputed.apply(run, x)
    return y


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        # for gradients of gradients, x stays in its graph; hooks of x itself must not run here
        again = torch.is_grad_enabled()
        with torch.enable_grad(), exactly(x.device):
            x = x.view_as(x) if again else x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.run(x), x, dy, create_graph=again)
