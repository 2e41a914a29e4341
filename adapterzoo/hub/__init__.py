"""The Hub: search, download and upload adapters with `huggingface_hub`.

Nothing that this package raises, logs or writes contains a token.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adapterzoo.errors import FieldError, listing

if TYPE_CHECKING:
    from .card import CardText
    from .download import resolve
    from .search import AdapterInfo, adapter_info, list_adapters
    from .setups import resolve_setup
    from .upload import push

OPTIONS = "cache_dir", "force_download", "local_files_only", "revision", "token"
"""The arguments of `resolve` besides the folder or name."""

# imported on first use: the command line checks names before it imports huggingface_hub
_HOMES = {
    "AdapterInfo": "search",
    "CardText": "card",
    "adapter_info": "search",
    "list_adapters": "search",
    "push": "upload",
    "resolve": "download",
    "resolve_setup": "setups",
}

__all__ = [
    "AdapterInfo",
    "CardText",
    "adapter_info",
    "list_adapters",
    "push",
    "resolve",
    "resolve_setup",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def checked(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments, if they are `OPTIONS` without the revision.

    Raises:
        FieldError: there is no such argument.
    """
    legal = sorted({*OPTIONS} - {"revision"})
    if unknown := sorted(given.keys() - {*legal}):
        raise FieldError(
            f"{unknown[0]}={given[unknown[0]]!r}: there is no such argument. Those for the Hub are "
            f"{listing(legal)}. Leave it out."
        )
    return given
