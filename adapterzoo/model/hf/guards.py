"""Guards of the models inside a model with adapters, such as its encoder.

They refuse arguments that only the whole model supports, and that an inner model would ignore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from adapterzoo.errors import StateError

# arguments of `forward` that an inner model would take as `**kwargs`
_OF_WHOLE = (
    "adapter_names", "task_ids", "output_adapter_gating_scores", "output_adapter_fusion_attentions",
)  # fmt: skip


class _Guard:
    """A forward pre-hook of an inner model.

    Attributes:
        active: the state of the model with adapters.
    """

    def __init__(self, active: object) -> None:
        self.active = active

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for name in _OF_WHOLE:
            given = kwargs.get(name)
            if given is not None and given is not False:
                raise StateError(
                    f"{type(module).__name__}.forward({name}=…): a part of the model was called, "
                    f"and only the whole model supports this argument. "
                    f"Write model(…, {name}=…)."
                )


def guard_of(stack: nn.Module) -> _Guard | None:
    """Return the guard of an inner model; None if it has none."""
    hooks: Mapping[int, Any] = stack._forward_pre_hooks
    return next((hook for hook in hooks.values() if isinstance(hook, _Guard)), None)


def put(stack: nn.Module, active: object) -> None:
    """Guard an inner model, unless it is guarded.

    Args:
        stack: the inner model.
        active: the state of the model with adapters.
    """
    if guard_of(stack) is None:
        stack.register_forward_pre_hook(_Guard(active), with_kwargs=True)


def take(stack: nn.Module) -> None:
    """Remove the guard of an inner model."""
    hooks: dict[int, Any] = stack._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Guard)]:
        del hooks[key], stack._forward_pre_hooks_with_kwargs[key]
