"""Fusion layers in a folder: reading and writing them in the formats that have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import argument, unknown_name

from . import files, folders, native
from .adapterhub import fusion as adapterhub
from .checkpoint import Checkpoint, ModelInfo, inexpressible

KIND = "adapter_fusion"
_NATIVE = native.names_of_files(KIND)
FORMATS = ("native", "adapterhub", "adapterhub-safetensors")


def check_format(format: str) -> None:
    """Raise if fusions cannot be written in a format.

    Raises:
        CheckpointError: PEFT's format has no fusions.
        UnknownNameError: there is no such format.
    """
    if format == "peft":
        raise inexpressible(
            "PEFT has no fusion of adapters, and its format cannot store one",
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
    """Write fusion layers, after checking everything that could be wrong with them.

    Args:
        folder: created if missing.
        checkpoint: what to write, with whole tensors.
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
        stale = (*_NATIVE, *adapterhub.TENSORS)
        files.warn_of_another(folder, KIND, checkpoint.metadata.get("name"))
        folders.replace_files(folder, contents, stale)


def read(folder: Path, info: ModelInfo, config_of: Callable[[str], AdapterConfig]) -> Checkpoint:
    """Read fusion layers in any format.

    Args:
        folder: on disk.
        info: of the model.
        config_of: returns the config of an adapter by its name.

    Raises:
        CheckpointError: there are none, or a file is missing or damaged.
    """
    with folders.reading(folder):
        if _of(folder) != "adapterhub":
            return native.load(folder, KIND)
        return adapterhub.read(info, folder, config_of)


def _of(folder: Path) -> str | None:
    # a folder with both was mixed by hand: prefer the file that cannot hold code
    if (folder / _NATIVE[0]).is_file():
        return "native"
    return "adapterhub" if adapterhub.recognizes(folder) else None
