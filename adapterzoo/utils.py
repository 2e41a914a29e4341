"""`adapters.utils`: names of files, and adapters of the Hub.

The names are those of AdapterHub's format, which `save_adapter(…, format="adapterhub")` writes; the
native format has `CONFIG_NAME` and `SAFE_WEIGHTS_NAME`.
"""

from __future__ import annotations

from enum import StrEnum

from .checkpoint.adapterhub import names_of_files
from .checkpoint.adapterhub.hashes import get_adapter_config_hash
from .hub import AdapterInfo, adapter_info, list_adapters

__all__ = [
    "ADAPTERFUSION_CONFIG_NAME",
    "ADAPTERFUSION_WEIGHTS_NAME",
    "CONFIG_NAME",
    "HEAD_CONFIG_NAME",
    "HEAD_WEIGHTS_NAME",
    "SAFE_ADAPTERFUSION_WEIGHTS_NAME",
    "SAFE_HEAD_WEIGHTS_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_NAME",
    "AdapterInfo",
    "AdapterType",
    "get_adapter_config_hash",
    "get_adapter_info",
    "list_adapters",
]

CONFIG_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME = names_of_files("adapter")
HEAD_CONFIG_NAME, SAFE_HEAD_WEIGHTS_NAME, HEAD_WEIGHTS_NAME = names_of_files("head")
ADAPTERFUSION_CONFIG_NAME, SAFE_ADAPTERFUSION_WEIGHTS_NAME, ADAPTERFUSION_WEIGHTS_NAME = (
    names_of_files("fusion")
)

get_adapter_info = adapter_info


class AdapterType(StrEnum):
    """What an adapter was trained for, in the files of adapter-transformers."""

    text_task = "text_task"
    text_lang = "text_lang"

    @classmethod
    def has(cls, value: object) -> bool:
        """Return whether it is one of them."""
        return value in cls.__members__.values()
