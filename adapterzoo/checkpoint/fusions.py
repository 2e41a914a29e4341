"""Fusion layers in a folder: the formats that have any, and which of them a folder holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError, unknown_name

from . import adapterhub_fusion, folders, native
from .formats import Facts
from .stored import Stored

STEM = "adapter_fusion"
_NATIVE = f"{STEM}.safetensors"
FORMATS = ("native", "adapterhub")


def check_format(call: str, format: str) -> None:
    """Raise where fusions cannot be written in a format.

    Raises:
        CheckpointError: PEFT has none.
        UnknownNameError: there is no such format.
    """
    if format == "peft":
        raise CheckpointError(
            f"{call}: PEFT has no fusion of adapters, and its format none of its layers. Nothing "
            f"has been written. Write format='native' or format='adapterhub'."
        )
    if format not in FORMATS:
        raise unknown_name(call, "format", format, FORMATS)


def write(
    folder: Path,
    stored: Stored,
    format: str,
    facts: Facts,
    fused: Sequence[AdapterConfig],
) -> None:
    """Write fusion layers; everything that can be wrong with them is found before.

    Args:
        folder: made when missing.
        stored: what to write, tensors whole.
        format: one that `check_format` knows.
        facts: of the model.
        fused: the configs of its adapters.

    Raises:
        CheckpointError: the format cannot say it, the folder holds a fusion in another one, or
            cannot be written; what was there is still whole.
    """
    call = facts.call
    if format == "native":
        contents, owned = native.encode(stored, STEM), [_NATIVE]
    else:
        contents = adapterhub_fusion.encode(facts, stored, fused)
        owned = list(adapterhub_fusion.TENSORS)
    with folders.saving(call, folder):
        there = _of(folder)
        if there not in (None, format):
            raise CheckpointError(
                f"{call}: the folder {str(folder)!r} holds a fusion in the format {there!r}; files "
                f"of both would be mixed. Write another folder, or empty this one."
            )
        folders.replace_files(call, folder, contents, owned)


def read(folder: Path, facts: Facts, config_of: Callable[[str], AdapterConfig]) -> Stored:
    """Read fusion layers in whichever format they are.

    Args:
        folder: on disk.
        facts: of the model.
        config_of: the config of the adapter of a name.

    Raises:
        CheckpointError: there are none, or a file is missing or damaged.
    """
    with folders.reading(facts.call, folder):
        if _of(folder) != "adapterhub":
            return native.load(folder, STEM)
        names = adapterhub_fusion.fused_names(facts.call, folder)
        return adapterhub_fusion.read(facts, folder, [config_of(name) for name in names])


def _of(folder: Path) -> str | None:
    # a folder that holds both was mixed by hand: what cannot hold code goes first
    if (folder / _NATIVE).is_file():
        return "native"
    return "adapterhub" if adapterhub_fusion.recognises(folder) else None
