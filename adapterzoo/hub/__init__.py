"""The Hub: search, download and upload adapters with `huggingface_hub`.

Nothing that this package raises, logs or writes contains a token.
"""

from __future__ import annotations

from .download import only_commit as only_commit
from .download import resolve, resolve_file, resolve_setup
from .names import pinned as pinned
from .search import AdapterInfo, adapter_info, list_adapters
from .upload import CardText, completed_card, push

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
