"""The peers' names, arguments and config objects for models of this library.

`AdapterModelMixin` gets the peers' methods here; `adapterzoo.model` imports this module, so a model
has them however the package is imported.
"""

from __future__ import annotations

import inspect

from adapterzoo.errors import names_call
from adapterzoo.model.mixin import AdapterModelMixin

from .adapters import AdaptersMethods
from .peft.methods import PeftMethods

for _name, _member in {**vars(AdaptersMethods), **vars(PeftMethods)}.items():
    if not _name.startswith("_"):
        _method = names_call(_member) if inspect.isfunction(_member) else _member
        setattr(AdapterModelMixin, _name, _method)
