"""Fusion layers in a folder: the formats that have any, and which of them a folder holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import argument, unknown_name

from . import folders, native
from .adapterhub import fusion as adapterhub
from .formats import Checkpoint, ModelInfo, inexpressible

KIND = "adapter_fusion"
_NATIVE = f"{KIND}.safetensors"
FORMATS = ("native", "adapterhub", "adapterhub-safetensors")


def check_format(format: str) -> None:
    """Raise where fusions cannot be written in a format.

    Raises:
        CheckpointError: PEFT has none.
        UnknownNameError: there is no such format.
    """
    if format == "peft":
        raise inexpressible(
            "PEFT has no fusion of adapters, and its format none of its layers",
            *(argument("format", name) for name in FORMATS),
        )
    if format not in FORMATS:
        raise unknown_name("", "format", format, FORMATS)


def write(
    folder: Path,
    checkpoint: Checkpoint,
    format: str,
    info: ModelInfo,
    fused: Sequence[AdapterConfig],
) -> None:
    """Write fusion layers; everything that can be wrong with them is found before.

    Args:
        folder: made when missing.
        checkpoint: what to write, tensors whole.
        format: one that `check_format` accepts.
        info: of the model.
        fused: the configs of its adapters.

    Raises:
        CheckpointError: the format cannot express it, or the folder cannot be written; what was
            there is still whole.
    """
    if format == "native":
        contents = native.encode(checkpoint, KIND)
    else:
        contents = adapterhub.encode(info, checkpoint, fused, safe=format != "adapterhub")
    with folders.saving(folder):
        stale = (_NATIVE, f"{KIND}_config.json", *adapterhub.TENSORS)
        folders.replace_files(folder, contents, stale)


def read(folder: Path, info: ModelInfo, config_of: Callable[[str], AdapterConfig]) -> Checkpoint:
    """Read fusion layers in whichever format they are.

    Args:
        folder: on disk.
        info: of the model.
        config_of: the config of the adapter of a name.

    Raises:
        CheckpointError: there are none, or a file is missing or damaged.
    """
    with folders.reading(folder):
        if _of(folder) != "adapterhub":
            return native.load(folder, KIND)
        return adapterhub.read(info, folder, config_of)


def _of(folder: Path) -> str | None:
    # a folder that holds both was mixed by hand: what cannot hold code goes first
    if (folder / _NATIVE).is_file():
        return "native"
    return "adapterhub" if adapterhub.recognises(folder) else None
