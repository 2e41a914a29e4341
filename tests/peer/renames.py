"""The renames of docs/from-adapters.md, applied while the peer's tests run in the mode `renames`.

Files: `save_adapter` and its like get `format="adapterhub"`, and no `use_safetensors`. Parameters:
what the peer calls `loras.<name>.`, `prefix_tunings.<name>.` and so on is `adapters.<name>.`, and
`adapter_fusion_layer` is `adapters.fusion:`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

# names of the peer → what gives the object that stands for it
NAMES: dict[str, Callable[[], Any]] = {
    # files say which version of the peer they are for
    "__version__": lambda: "1.3.0",
    "WEIGHTS_NAME": lambda: "pytorch_adapter.bin",
    "ADAPTERFUSION_WEIGHTS_NAME": lambda: "pytorch_model_adapter_fusion.bin",
}

_CONTAINERS = re.compile(
    r"(?<![a-z_])(loras|prefix_tunings|prompt_tunings|refts|invertible_adapters|shared_parameters)\."
)
_HELPERS = ("_filter_parameters", "filter_parameters")


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
        if "use_safetensors" not in taken:
            safe = options.pop("use_safetensors", False)
            by_peer = sys._getframe(1).f_globals.get("__name__", "").startswith("tests.")
            if "format" in taken and by_peer and not safe:
                options.setdefault("format", "adapterhub")
        return method(self, *given, **options)

    return translated


def install_in_tests() -> None:
    """Translate the parameter names that helpers of the tests look for."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            owners = [value for value in vars(module).values() if inspect.isclass(value)]
            for owner in (module, *owners):
                for helper in _HELPERS:
                    function = vars(owner).get(helper)
                    if inspect.isfunction(function) and not hasattr(function, "__wrapped__"):
                        setattr(owner, helper, _by_our_names(function))


def _by_our_names(helper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(helper)
    def translated(*given: Any) -> Mapping[str, Any]:
        *first, keys = given
        if isinstance(keys, str):
            return helper(*first, parameter_name(keys))
        return helper(*first, [parameter_name(key) for key in keys])

    return translated


def parameter_name(key: str) -> str:
    """A part of a parameter's name of the peer, as it is here."""
    ours = _CONTAINERS.sub("adapters.", key)
    return ours.replace("adapter_fusion_layer", "adapters.fusion:")
