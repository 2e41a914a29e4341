"""Registration of the operators: one call for definition, shapes, autocast and gradients.

Registered operators work with `torch.compile`, fake tensors, autocast, DDP and FSDP2.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from adapterzoo.errors import KernelError, listing

from . import mode

_LIBRARY = torch.library.Library("adapterzoo", "FRAGMENT")
# torch.library looks up its caller by inspect.getmodule, which searches all modules for a file that
# is not in its (private) cache
inspect.modulesbyfile[__file__] = __name__
# the dispatch key that tracks views
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
# the device types that have an autocast dispatch key
_AUTOCAST = ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1")

Operator: TypeAlias = Callable[..., Any]
"""An operator, or a function that computes it, of tensors, numbers and strings."""

Prepare: TypeAlias = Callable[[bool, tuple[Any, ...]], tuple[Any, ...]]
"""From whether Triton computes, and an operator's arguments, to the arguments of the function."""


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
        run: computes it, on every device, below autograd and autocast.
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
    kernel: str,
    triton: str,
    in_torch: tuple[Operator, Operator],
    shapes: Operator,
    *,
    added: bool = False,
    noise: int | None = None,
    prepare: Prepare | None = None,
    narrows: tuple[int, ...] = (),
    width: Callable[[Tensor], int] = lambda factor: factor.shape[-1],
) -> tuple[Operator, Operator]:
    """Define an operator that multiplies x by a factor, and the operator of its backward.

    Each of the two gradients needs the other operand. The backward gets the gradient, all arguments
    except the one that the product is added to, and which of the two gradients are needed; it
    returns both, empty if not needed.

    Args:
        schema: see `register`; x and the factor come first, or after the argument that the product
            is added to.
        kernel: its name, for messages.
        triton: the module with functions of the same names as `in_torch`.
        in_torch: the product in torch operations, and its backward.
        shapes: see `register`.
        added: whether the product is added to the first argument.
        noise: the position of dropout's noise; None: no dropout.
        prepare: converts the operator's arguments to those of the functions.
        narrows: see `register`.
        width: returns the width of x from the factor.

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

    function = differentiated(lambda *args: below(op, *args), backpropagated, added)
    name, _, arguments = schema.partition("(")
    inner = arguments.partition(")")[0].split(", ")[added:]
    operands = 2 + added
    op = register(
        schema,
        computed(kernel, triton, forward, operands, noise, prepare),
        shapes,
        function,
        narrows,
    )
    op_backward = register(
        f"{name}_backward(Tensor grad, {', '.join(inner)}, bool needs_x, bool needs_factor) "
        f"-> (Tensor, Tensor)",
        computed(kernel, triton, backward, 3, None if noise is None else noise + 1, prepare),
        shapes_of_both,
    )
    return op, op_backward


def differentiated(
    forward: Operator, backward: Operator, added: bool = False
) -> type[torch.autograd.Function]:
    """Return a product with its backward as a `Function`; see `product` for their arguments.

    Args:
        forward: the product.
        backward: returns the gradients of x and of the factor.
        added: whether the product is added to the first argument.
    """

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            x, factor, *rest = args[added:]
            # without a gradient of the factor, only the dtype of x is needed
            x = x if ctx.needs_input_grad[added + 1] else x.new_empty(0)
            tensors = [v if isinstance(v, Tensor) else None for v in rest]
            ctx.save_for_backward(x, factor, *tensors)
            ctx.rest = [None if isinstance(v, Tensor) else v for v in rest]
            return forward(*args)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, factor, *tensors = ctx.saved_tensors
            rest = [v if t is None else t for t, v in zip(tensors, ctx.rest, strict=True)]
            needs = ctx.needs_input_grad[added : added + 2]
            found = backward(grad, x, factor, *rest, *needs)
            own = (g if need else None for g, need in zip(found, needs, strict=True))
            return *[grad] * added, *own, *[None] * len(rest)

    return Product


def computed(
    kernel: str,
    triton: str,
    in_torch: Operator,
    operands: int,
    noise: int | None = None,
    prepare: Prepare | None = None,
    single: bool = False,
) -> Operator:
    """Return a function that runs Triton if it takes the operands, else torch operations.

    Args:
        kernel: its name, for messages.
        triton: the module with a function of the same name as `in_torch`, imported when needed.
        in_torch: the same in torch operations.
        operands: how many of the first arguments Triton must be able to take; None is ignored.
        noise: the position of dropout's noise: a seed is for Triton and bits are for torch, so
            that a backward uses the mask of its forward.
        prepare: converts the operator's arguments to those of the functions.
        single: see `mode.takes_triton`.
    """

    def run(*args: Any) -> Any:
        drawn = None if noise is None else args[noise]
        if drawn is None:
            given = [v for v in args[:operands] if v is not None]
            taken = mode.takes_triton(kernel, *given, single=single)
        else:
            taken = drawn.dtype is torch.int64
        args = args if prepare is None else prepare(taken, args)
        compute = in_torch
        if taken:
            module = importlib.import_module(f".{triton}", __package__)
            compute = getattr(module, in_torch.__name__)
        out = compute(*args)
        # the memory layout of the fake outputs; Triton may leave a product to torch
        if isinstance(out, Tensor):
            return out.contiguous()
        return tuple(each.contiguous() for each in out)

    return run


def below(op: Operator, *args: Any) -> Any:
    """Call an operator from its own `Function.forward`.

    No output is tracked as a view, even if it was reshaped: a model may change it in place.
    """
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        return op(*args)


def check(
    kernel: str,
    left: str,
    right: str,
    operands: Mapping[str, Tensor | None],
    fits: bool,
    legal: str = "Factors are a [rank, d_in] and b [d_out, rank]",
) -> None:
    """Check the operands of an operator on fake tensors, before the real ones are computed.

    Args:
        kernel: its name, for the message.
        left: name of an operand whose shape is checked.
        right: name of the other.
        operands: by name; None: not given.
        fits: whether the shapes fit.
        legal: the legal shapes, for the message.

    Raises:
        KernelError: the operands are on several devices, or their shapes do not fit.
    """
    given = {name: tensor for name, tensor in operands.items() if tensor is not None}
    if len({tensor.device for tensor in given.values()}) > 1:
        places = [f"{name} on {tensor.device}" for name, tensor in given.items()]
        raise KernelError(
            f"{kernel}: Expected all tensors to be on the same device, found {listing(places)}. "
            f"Move them with .to(device)."
        )
    if not fits:
        shapes = [f"{name} {list(tensor.shape)}" for name, tensor in given.items()]
        raise KernelError(
            f"{kernel}: the shapes of {left} and {right} do not fit: {listing(shapes)}. {legal}."
        )


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
