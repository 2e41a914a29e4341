"""Layers that PEFT has wrapped: adapters below them act, but none can be added or taken."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from adapterzoo.errors import StateError


def peft_layer(model: nn.Module) -> str | None:
    """Path of the first layer that PEFT has put into a model; None where there is none.

    Args:
        model: of any class.
    """
    # whoever has such a layer has imported the class
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    kinds = getattr(tuners, "BaseTunerLayer", ())
    return next((path for path, m in model.named_modules() if isinstance(m, kinds)), None)


def refuse_if_wrapped(model: Any, call: str) -> None:
    """Raise where adapters would be put onto PEFT's layers, or taken from below them.

    Args:
        model: with adapters.
        call: what the user wrote, for the message.

    Raises:
        StateError: the model has layers of PEFT.
    """
    # PEFT leaves its config in what it wraps; looking at all layers costs more with each adapter
    path = peft_layer(model) if "peft_config" in vars(model) else None
    if path is not None:
        raise StateError(
            f"{call}: PEFT has wrapped the layer {path!r} of this model. Write "
            f"peft_model.unload() or peft_model.merge_and_unload() first, or do this before "
            f"get_peft_model(…)."
        )
