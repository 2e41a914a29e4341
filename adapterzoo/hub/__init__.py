"""The Hub: adapters are found, fetched and published there, by `huggingface_hub` and nothing else.

Nothing that this package raises, logs or writes holds a token.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .card import CardText
    from .listing import AdapterInfo, adapter_info, list_adapters
    from .pulling import resolve
    from .pushing import push

# imported when first asked for: names of folders and repositories are checked before torch and
# huggingface_hub are there
_HOMES = {
    "AdapterInfo": "listing",
    "CardText": "card",
    "adapter_info": "listing",
    "list_adapters": "listing",
    "push": "pushing",
    "resolve": "pulling",
}

__all__ = ["AdapterInfo", "CardText", "adapter_info", "list_adapters", "push", "resolve"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
