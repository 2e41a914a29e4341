"""The names of an adapter's files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from adapterzoo.errors import CheckpointError

Kind = Literal["adapter", "head", "adapter_fusion"]


class FileNames(NamedTuple):
    """The names of the files that hold one kind of content.

    Attributes:
        config: JSON, in all formats.
        native: the tensors in our format.
        adapterhub: the tensors in AdapterHub's: safetensors, and a pickle.
        peft: the same in PEFT's, which has no heads and fusions of its own.
    """

    config: str
    native: str
    adapterhub: tuple[str, str]
    peft: tuple[str, ...] = ()

    @property
    def weights(self) -> tuple[tuple[str, ...], ...]:
        """Alternative names of each tensor file; the first that exists is read.

        Safetensors come first, as they cannot hold code.
        """
        own = () if self.native in self.adapterhub else ((self.native,),)
        return (*own, self.adapterhub, *((self.peft,) if self.peft else ()))


NAMES: Mapping[Kind, FileNames] = {
    "adapter": FileNames(
        "adapter_config.json",
        "adapter.safetensors",
        ("adapter.safetensors", "pytorch_adapter.bin"),
        ("adapter_model.safetensors", "adapter_model.bin"),
    ),
    "head": FileNames(
        "head_config.json",
        "head.safetensors",
        ("model_head.safetensors", "pytorch_model_head.bin"),
    ),
    "adapter_fusion": FileNames(
        "adapter_fusion_config.json",
        "adapter_fusion.safetensors",
        ("model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin"),
    ),
}
CONFIG, HEAD_CONFIG, FUSION_CONFIG = (names.config for names in NAMES.values())
INTERFACE = "adapter_interface.json"
SETUP = "adapter_setup.json"
CARD = "README.md"
_WEIGHTS = [names for each in NAMES.values() for names in each.weights]
_CONFIGS = (CONFIG, HEAD_CONFIG, FUSION_CONFIG, INTERFACE)
KNOWN_FILES = [*(name for names in _WEIGHTS for name in names), *_CONFIGS]
"""All names that a file of an adapter may have."""


def file_given(path: str | os.PathLike[str]) -> CheckpointError:
    """Return the error for the path of a file where a folder is needed.

    Args:
        path: path of the file.
    """
    is_ours = Path(path).name in (*KNOWN_FILES, SETUP)
    folder = f"that holds it, {str(Path(path).parent)!r}" if is_ours else "of an adapter"
    return CheckpointError(f"{os.fspath(path)!r} is a file. Write the folder {folder}.")


def wanted(names: Iterable[str]) -> list[str]:
    """Return an adapter's files among those of a folder: weights, then configs.

    Returns:
        The names; empty if the folder has no weights.
    """
    there = set(names)
    weights = [next(n for n in names if n in there) for names in _WEIGHTS if there & {*names}]
    return [*weights, *(name for name in _CONFIGS if name in there)] if weights else []


def is_complete(names: Iterable[str]) -> bool:
    """Return whether a folder has weights, and each weights file has its config and vice versa."""
    there = set(names)
    parts = [
        (own.config in there, any(there & {*each} for each in own.weights), own.native in there)
        for own in NAMES.values()
    ]
    # the native file holds its config
    return any(w for _, w, _ in parts) and all(c == w or native for c, w, native in parts)
