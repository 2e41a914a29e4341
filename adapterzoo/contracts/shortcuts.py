"""Whether shorter ways than `forward` lead to what it returns."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules import module as _global

from .adapter import Adapter


def can_batch(adapters: Sequence[Adapter]) -> bool:
    """Return whether the adapters can act in one call of `forward_batched`.

    A class that overrides `forward` and inherits `forward_batched` cannot.
    """
    kind = type(adapters[0])
    if any(type(adapter) is not kind for adapter in adapters):
        return False
    return _matches_forward(kind, "forward_batched") and kind.supports_batching(adapters)


def can_take_few(adapter: Adapter) -> bool:
    """Return whether the adapter's class has an `on_few` that matches its `forward`."""
    return _matches_forward(type(adapter), "on_few") and type(adapter).on_few is not Adapter.on_few


def is_hooked(module: nn.Module) -> bool:
    """Return whether a call of the module runs more than the forward of its class.

    Args:
        module: called without gradients.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        # accelerate keeps its hooks in the instance
        or "forward" in module.__dict__
        or _global._global_forward_hooks
        or _global._global_forward_pre_hooks
    )


def _matches_forward(kind: type[Adapter], name: str) -> bool:
    """Return whether the class that defines `forward`, or a subclass of it, defines the method."""
    owners = [next(c for c in kind.__mro__ if n in vars(c)) for n in (name, "forward")]
    return issubclass(*owners)
