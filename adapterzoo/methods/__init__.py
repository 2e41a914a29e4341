"""Adapter methods: one file each. Importing the package registers every file in it."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from ._init import generator, undrawn

__all__ = ["generator", "undrawn"]

_files: list[ModuleType] = []
for _found in pkgutil.iter_modules(__path__, f"{__name__}."):
    # machinery begins with an underscore, and registers nothing
    if not _found.name.rpartition(".")[2].startswith("_"):
        _files.append(importlib.import_module(_found.name))


def __getattr__(name: str) -> Any:
    """Return a class by name from the file that defines or imports it, such as `LoRAConfig`."""
    for file in _files:
        if name in vars(file):
            return vars(file)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
