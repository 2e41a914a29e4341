"""Initial values that do not depend on the device or on the order in which adapters are added."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from adapterzoo.config import Choice

# the valid dtypes of parameters, by name
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32)}
DTYPE = Choice(None, *DTYPES)


def dtype_named(name: str | None, otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype with a name of `DTYPES`; for None, the given one."""
    return otherwise if name is None else DTYPES[name]


_skips_drawing = ContextVar("_skips_drawing", default=False)


@contextmanager
def undrawn() -> Iterator[None]:
    """Leave parameters that this thread creates uninitialized, to be filled from a file."""
    token = _skips_drawing.set(True)
    try:
        yield
    finally:
        _skips_drawing.reset(token)


def generator(seed: int | None, path: str) -> torch.Generator | None:
    """Return the random number generator for the adapter at a path.

    Args:
        seed: None for torch's default generator, which `torch.manual_seed` sets.
        path: the site's path; each site gets different numbers.
    """
    if seed is None:
        return None
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def drawn(
    shape: tuple[int, ...],
    fill: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> torch.nn.Parameter:
    """Return a parameter filled on the CPU in float32, with the same bits on every device.

    Args:
        shape: shape of the parameter.
        fill: an in-place initializer.
        device: device of the parameter; on the meta device and in `undrawn` it stays uninitialized.
        dtype: dtype of the parameter.
    """
    if device.type == "meta" or _skips_drawing.get():
        return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    # an explicit device: a caller's `with torch.device(…)` must not move the random draw
    filled = fill(torch.empty(shape, device="cpu", dtype=torch.float32))
    return torch.nn.Parameter(filled.to(device=device, dtype=dtype))


def kaiming(source: torch.Generator | None) -> Callable[[Tensor], Tensor]:
    """Return torch's initializer of linear layers: uniform in ±1/√fan_in (Kaiming, a = √5)."""

    def fill(t: Tensor) -> Tensor:
        bound = 1.0 / math.sqrt(t.shape[-1])
        return t.uniform_(-bound, bound, generator=source)

    return fill


def uniform(bound: float, source: torch.Generator | None) -> Callable[[Tensor], Tensor]:
    """Return an initializer with uniform values in ±bound."""
    return lambda t: t.uniform_(-bound, bound, generator=source)


def normal(std: float, source: torch.Generator | None) -> Callable[[Tensor], Tensor]:
    """Return an initializer with normal values of mean 0."""
    return lambda t: t.normal_(0.0, std, generator=source)


def constant(value: float) -> Callable[[Tensor], Tensor]:
    """Return an initializer with one value everywhere."""
    return lambda t: t.fill_(value)
