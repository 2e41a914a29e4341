"""What a checkpoint holds, in whatever format it lies on disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Stored:
    """What a checkpoint holds.

    Attributes:
        document: JSON types: format, version, name, model_type, `config` of the adapter, `head`.
        adapter: `<path>/<parameter>` to tensor.
        head: parameter to tensor.
    """

    document: dict[str, Any]
    adapter: dict[str, Tensor] = field(default_factory=dict)
    head: dict[str, Tensor] = field(default_factory=dict)
