"""Whether adapters can act on a mixed batch in one call."""

from __future__ import annotations

from collections.abc import Sequence

from .adapter import Adapter


def can_batch(adapters: Sequence[Adapter]) -> bool:
    """Return whether the adapters can act in one call of `forward_batched`.

    A class that overrides `forward` and inherits `forward_batched` cannot.
    """
    kind = type(adapters[0])
    if any(type(adapter) is not kind for adapter in adapters):
        return False
    names = "forward_batched", "forward"
    owners = [next(c for c in kind.__mro__ if name in vars(c)) for name in names]
    return issubclass(*owners) and kind.supports_batching(adapters)
