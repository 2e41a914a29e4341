"""`adapters.utils`: names of files, and adapters of the Hub.

`WEIGHTS_NAME`, `HEAD_WEIGHTS_NAME` and `ADAPTERFUSION_WEIGHTS_NAME` are the files that
`save_adapter`, `save_head` and `save_adapter_fusion` write by default; `SAFE_…` are those that they
write with `use_safetensors=True`. All are in safetensors. The configs have the same names in both.
"""

from __future__ import annotations

from enum import StrEnum

from .folders.names import INTERFACE as INTERFACE_CONFIG_NAME
from .folders.names import NAMES
from .folders.names import SETUP as SETUP_CONFIG_NAME
from .hub import AdapterInfo, adapter_info, list_adapters
from .hub.old_ids import get_adapter_config_hash

__all__ = [
    "ADAPTERFUSION_CONFIG_NAME",
    "ADAPTERFUSION_WEIGHTS_NAME",
    "CONFIG_NAME",
    "HEAD_CONFIG_NAME",
    "HEAD_WEIGHTS_NAME",
    "INTERFACE_CONFIG_NAME",
    "SAFE_ADAPTERFUSION_WEIGHTS_NAME",
    "SAFE_HEAD_WEIGHTS_NAME",
    "SAFE_WEIGHTS_NAME",
    "SETUP_CONFIG_NAME",
    "WEIGHTS_NAME",
    "AdapterInfo",
    "AdapterType",
    "get_adapter_config_hash",
    "get_adapter_info",
    "list_adapters",
]

_ADAPTER, _HEAD, _FUSION = NAMES.values()
WEIGHTS_NAME, CONFIG_NAME = _ADAPTER.native, _ADAPTER.config
HEAD_WEIGHTS_NAME, HEAD_CONFIG_NAME = _HEAD.native, _HEAD.config
ADAPTERFUSION_WEIGHTS_NAME, ADAPTERFUSION_CONFIG_NAME = _FUSION.native, _FUSION.config

SAFE_WEIGHTS_NAME = _ADAPTER.adapterhub[0]
SAFE_HEAD_WEIGHTS_NAME = _HEAD.adapterhub[0]
SAFE_ADAPTERFUSION_WEIGHTS_NAME = _FUSION.adapterhub[0]

get_adapter_info = adapter_info


class AdapterType(StrEnum):
    """What an adapter was trained for, in the files of adapter-transformers."""

    text_task = "text_task"
    text_lang = "text_lang"

    @classmethod
    def has(cls, value: object) -> bool:
        """Return whether it is one of them."""
        return value in cls.__members__.values()
