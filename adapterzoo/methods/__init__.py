"""Adapter methods: one file each. Importing the package registers every file that is there."""

from __future__ import annotations

import importlib
import pkgutil

from ._init import generator, undrawn

__all__ = ["generator", "undrawn"]

for _found in pkgutil.iter_modules(__path__, f"{__name__}."):
    # machinery begins with an underscore and registers nothing
    if not _found.name.rpartition(".")[2].startswith("_"):
        importlib.import_module(_found.name)
