"""The Hub: adapters are found, fetched and published there, by `huggingface_hub` and nothing else.

Nothing that this package raises, logs or writes holds a token.
"""

from __future__ import annotations

from .card import CardText
from .listing import AdapterInfo, adapter_info, list_adapters
from .pulling import resolve
from .pushing import push

__all__ = ["AdapterInfo", "CardText", "adapter_info", "list_adapters", "push", "resolve"]
