"""`import peft` and its modules give the names of `adapterzoo.peft`, and PEFT's own for all others.

Code of PEFT that was imported before keeps its own names: its methods that do not exist here run as
they are.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

MODULES = ("adapterzoo.peft.utils.hotswap", "adapterzoo.peft.optimizers")


def ours() -> dict[str, Any]:
    """PEFT's names that adapterzoo has, without those that only say what to write instead."""
    package = importlib.import_module("adapterzoo.peft")
    classes = importlib.import_module("adapterzoo.compat.peft.classes")
    names = {n for n in dir(package) if n[0] != "_" and n not in classes.NOT_MADE}
    found = {name: getattr(package, name) for name in names}
    for path in MODULES:
        module = importlib.import_module(path)
        found |= {n: getattr(module, n) for n in dir(module) if n[0] != "_"}
    modules = {name for name, value in found.items() if isinstance(value, ModuleType)}
    return {name: value for name, value in found.items() if name not in modules}


class _View(ModuleType):
    """A module of PEFT in which some names are ours."""

    def __init__(self, real: ModuleType, names: Mapping[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        vars(self).update(_real=real, _names=names)
        for name in ("__file__", "__path__", "__spec__", "__package__", "__loader__"):
            if hasattr(real, name):
                vars(self)[name] = getattr(real, name)

    def __getattr__(self, name: str) -> Any:
        real, names = vars(self)["_real"], vars(self)["_names"]
        if name in names and (name in vars(real) or real.__name__ == "peft"):
            return names[name]
        value = getattr(real, name)
        # a module that was imported from this one is seen through its view
        return sys.modules.get(value.__name__, value) if isinstance(value, ModuleType) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_real"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_real"], name)


def install() -> None:
    """Put views in the place of all modules of PEFT."""
    real = importlib.import_module("peft")
    for found in pkgutil.walk_packages(real.__path__, "peft."):
        # modules for packages that are not there
        with contextlib.suppress(Exception):
            importlib.import_module(found.name)
    names = ours()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "peft":
            sys.modules[name] = _View(module, names)
