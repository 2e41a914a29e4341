"""The Hub: search, download and upload adapters with `huggingface_hub`.

Nothing that this package raises, logs or writes contains a token.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from adapterzoo.errors import no_attribute

from .download import only_commit as only_commit
from .download import resolve, resolve_file, resolve_setup
from .names import pinned as pinned
from .search import AdapterInfo, adapter_info, list_adapters

if TYPE_CHECKING:
    from .upload import CardText as CardText
    from .upload import completed_card as completed_card
    from .upload import push as push

__all__ = [
    "AdapterInfo",
    "CardText",
    "adapter_info",
    "completed_card",
    "list_adapters",
    "push",
    "resolve",
    "resolve_file",
    "resolve_setup",
]

OPTIONS = "cache_dir", "force_download", "local_files_only", "revision", "token"
"""The arguments of `resolve` besides the folder or name."""


# what publishes an adapter imports torch
_OF_UPLOAD = ("CardText", "completed_card", "push")


def __getattr__(name: str) -> Any:
    if name in _OF_UPLOAD:
        return getattr(importlib.import_module(".upload", __name__), name)
    raise no_attribute(__name__, name, __dir__(), lambda _: [])


def __dir__() -> list[str]:
    return sorted(__all__)
