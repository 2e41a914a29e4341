"""Initial values that do not depend on the device or on the order in which adapters are added."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from adapterzoo.fields import Choice

# what a config may name as the dtype of parameters
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32)}
DTYPE = Choice(None, *DTYPES)


class _Drawing(threading.local):
    skipped = False


_drawing = _Drawing()


@contextmanager
def undrawn() -> Iterator[None]:
    """Leave the parameters made by this thread without values: a file has them."""
    before, _drawing.skipped = _drawing.skipped, True
    try:
        yield
    finally:
        _drawing.skipped = before


def generator(seed: int | None, path: str) -> torch.Generator | None:
    """The source of random numbers for the adapter at a path.

    Args:
        seed: None draws from torch's default generator, so that `torch.manual_seed` rules.
        path: of the site; each site gets numbers of its own.
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
    """A parameter filled on the CPU in float32, then copied: the same bits for every device.

    Args:
        shape: of the parameter.
        fill: an in-place initialiser.
        device: where it shall live; nothing is drawn for the meta device, nor in `undrawn`.
        dtype: of the parameter.
    """
    if device.type == "meta" or _drawing.skipped:
        return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    # an explicit device: a caller's `with torch.device(…)` must not move the drawing
    filled = fill(torch.empty(shape, device="cpu", dtype=torch.float32))
    return torch.nn.Parameter(filled.to(device=device, dtype=dtype))


def kaiming(source: torch.Generator | None) -> Callable[[Tensor], Tensor]:
    """Uniform in ±1/√fan_in: what torch's linear layers do (Kaiming's with a = √5)."""

    def fill(t: Tensor) -> Tensor:
        bound = 1.0 / math.sqrt(t.shape[-1])
        return t.uniform_(-bound, bound, generator=source)

    return fill


def uniform(bound: float, source: torch.Generator | None) -> Callable[[Tensor], Tensor]:
    """Uniform in ±bound."""
    return lambda t: t.uniform_(-bound, bound, generator=source)


def normal(std: float, source: torch.Generator | None) -> Callable[[Tensor], Tensor]:
    """Normal with mean 0."""
    return lambda t: t.normal_(0.0, std, generator=source)


def constant(value: float) -> Callable[[Tensor], Tensor]:
    """The same value everywhere."""
    return lambda t: t.fill_(value)
