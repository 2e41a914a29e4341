"""Readers: each reads a folder as a server does, written from the server's own source.

They share no code and no constants with what writes the folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from . import gguf, punica, sglang, vllm
from .reading import Reading, Update, apply, opened

__all__ = ["READERS", "Reader", "Reading", "Update", "apply", "gguf", "opened"]


@dataclass(frozen=True, slots=True)
class Reader:
    """How a server reads a folder.

    Attributes:
        version: the server's version.
        read: a function that returns its reading of PEFT's config and tensors.
    """

    version: str
    read: Callable[[Mapping[str, Any], Mapping[str, Tensor], nn.Module], Reading]


READERS: Mapping[str, Reader] = {
    "vllm": Reader(vllm.VERSION, vllm.read),
    "sglang": Reader(sglang.VERSION, sglang.read),
    "lorax": Reader(punica.LORAX, punica.read_lorax),
    "tgi": Reader(punica.TGI, punica.read_tgi),
    "gguf": Reader(gguf.VERSION, gguf.read),
}
"""By the name of the server."""
