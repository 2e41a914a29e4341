"""Registration of the operators: one call for definition, shapes, autocast and gradients.

Through the dispatcher `torch.compile`, FakeTensor, autocast, DDP and FSDP2 see the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from adapterzoo.errors import KernelError, listing

_LIBRARY = torch.library.Library("adapterzoo", "FRAGMENT")
# where views are noted
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
# the device types whose autocast the dispatcher knows by name
_AUTOCAST = ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1")


def register(
    schema: str,
    run: Callable[..., Any],
    shapes: Callable[..., Any],
    function: type[torch.autograd.Function] | None = None,
    cast: Callable[..., tuple[Any, ...]] | None = None,
) -> Callable[..., Any]:
    """Define an operator `adapterzoo::name`; no output may share memory with an input.

    A call costs what its Python costs: 6 µs above `run` without gradients, 13 with them, where a
    product of two small matrices costs 3.

    Args:
        schema: `"name(Tensor x, …) -> Tensor"`.
        run: computes it, on every device; not seen by autograd, and never under autocast.
        shapes: the same on fake tensors: empty outputs of the right shape, dtype and device.
        function: its `forward` saves for the backward pass and returns `below(op, …)`; None for
            an operator that is not differentiated.
        cast: under autocast, called with the dtype and the arguments; gives the arguments to
            take. None: all as they are.

    Returns:
        The operator, to be called.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"adapterzoo::{name}", shapes, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.adapterzoo, name).default
    for kind in _AUTOCAST:
        _LIBRARY.impl(name, _exact(op, kind.lower(), cast), f"Autocast{kind}")
    if function is not None:
        apply = function.apply

        # without gradients a Function would only cost
        def differentiable(*args: Any) -> Any:
            return apply(*args) if torch.is_grad_enabled() else below(op, *args)

        _LIBRARY.impl(name, differentiable, "Autograd")
    return op


def below(op: Callable[..., Any], *args: Any) -> Any:
    """Call an operator from its own `Function.forward`.

    No output is a view there, whatever reshapes it: a model may write into it in place.
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
    """For the fake side of an operator: what the real side would find out too late.

    Args:
        kernel: its name, for the message.
        left: name of one operand whose shape counts.
        right: name of the other.
        operands: by name; None: not given.
        fits: whether the shapes fit.
        legal: what they would have to be.

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


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in the dtype of autocast, which leaves float64 alone."""
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)


def _exact(
    op: Callable[..., Any], kind: str, cast: Callable[..., tuple[Any, ...]] | None
) -> Callable[..., Any]:
    """The operator under autocast, which must not reach the operations inside."""
    device = torch._C._get_privateuse1_backend_name if kind == "privateuse1" else lambda: kind

    def run(*args: Any) -> Any:
        own = device()
        if cast is not None:
            args = cast(torch.get_autocast_dtype(own), *args)
        with torch.autocast(own, enabled=False):
            return op(*args)

    return run
