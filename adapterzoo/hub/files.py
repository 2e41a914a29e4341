"""The files of an adapter in a repository: native, AdapterHub's or PEFT's."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"
CARD = "README.md"

# of each pair the first existing file is used: safetensors cannot hold code
_WEIGHTS = {
    ADAPTER_CONFIG: (
        ("adapter.safetensors", "pytorch_adapter.bin"),
        ("adapter_model.safetensors", "adapter_model.bin"),
    ),
    "head_config.json": (
        ("head.safetensors",),
        ("model_head.safetensors", "pytorch_model_head.bin"),
    ),
    "adapter_fusion_config.json": (
        ("adapter_fusion.safetensors",),
        ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin"),
    ),
}
# the adapter's config comes last: if it exists, the download was complete
_CONFIGS = (
    "adapter_interface.json",
    "adapter_fusion_config.json",
    "head_config.json",
    ADAPTER_CONFIG,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT = re.compile(r"[0-9a-f]{40}")
_BLOCK = 1 << 20


def wanted(names: Iterable[str]) -> list[str]:
    """Select the files of a folder to download, in the order in which to download them.

    Returns:
        Weights, then configs, the adapter's config last; nothing if the folder has no weights.
    """
    there = set(names)
    pairs = (pair for group in _WEIGHTS.values() for pair in group)
    weights = [next(name for name in pair if name in there) for pair in pairs if there & {*pair}]
    return [*weights, *(name for name in _CONFIGS if name in there)] if weights else []


def is_complete(names: Iterable[str]) -> bool:
    """Return whether a folder that was filled in the order of `wanted` is complete."""
    there = set(names)
    parts = [
        (config in there, any(there & {*pair} for pair in pairs))
        for config, pairs in _WEIGHTS.items()
    ]
    return any(weights for _, weights in parts) and all(c == w for c, w in parts)


def known_files() -> list[str]:
    """Return every name that a file of an adapter may have."""
    pairs = (pair for group in _WEIGHTS.values() for pair in group)
    return [*(name for pair in pairs for name in pair), *_CONFIGS]


def is_digest(text: str | None) -> bool:
    """Return whether a text can be the Hub's digest of a file."""
    return text is not None and bool(_SHA256.fullmatch(text) or _GIT.fullmatch(text))


def has_digest(file: Path, expected: str) -> bool:
    """Return whether a file has the Hub's digest.

    Args:
        file: to read.
        expected: 64 hexadecimal digits, the SHA-256 of a large file; or 40, git's SHA-1 of the
            blob of a small one.
    """
    hashed = hashlib.sha256()
    if len(expected) == 40:
        hashed = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            hashed.update(block)
    return hashed.hexdigest() == expected


def nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists and is accessible.

    Args:
        path: of a file or folder that may be missing.
    """
    # unlike Path.exists, os.access does not raise if a parent is not accessible
    return next(p for p in (path, *path.absolute().parents) if os.access(p, os.F_OK))
