"""Files that other libraries wrote, read without trust: JSON, safetensors, and pickled tensors.

A pickle is a program. It is read by `torch.load(weights_only=True)` alone, which runs nothing but
the rebuilding of tensors; what asks for more is refused.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from adapterzoo.errors import CheckpointError

from .files import MAX_JSON, META, check_header, check_regular, parse_json

_AGAIN = "Copy the checkpoint again from where it was saved"


def read_json(call: str, file: Path, hint: str = _AGAIN) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        call: what the user wrote, for messages.
        file: is not read where it is too large for a config.
        hint: what to do about it, for messages.

    Raises:
        CheckpointError: it is missing, too large, no JSON or no object.
    """
    try:
        _check_regular(call, file)
        size = file.stat().st_size
        text = file.read_bytes() if size <= MAX_JSON else b""
    except OSError as error:
        raise CheckpointError(
            f"{call}: {file.name} cannot be read ({error.strerror or error}). {hint}."
        ) from error
    if not text and size:
        raise CheckpointError(
            f"{call}: {file.name} has {size:,} bytes; a config has {MAX_JSON:,} at most. {hint}."
        )
    try:
        document = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{call}: {file.name} is no JSON ({error}). {hint}.") from error
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{call}: {file.name} holds a {type(document).__name__}, not an object. {hint}."
        )
    return document


def fields_of(file: Path) -> frozenset[str]:
    """The names of the fields in a JSON file; none where it cannot be read as a config."""
    try:
        return frozenset(read_json("", file))
    except CheckpointError:
        return frozenset()


def read_tensors(call: str, file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU; they may share memory.

    Args:
        call: what the user wrote, for messages.
        file: `.safetensors`, or else a pickle that torch wrote.

    Raises:
        CheckpointError: it is damaged, holds code, or something else than tensors.
    """
    try:
        _check_regular(call, file)
        if file.suffix == ".safetensors":
            _check_header(call, file)
            return safetensors.torch.load_file(file)
        _refuse_compressed(call, file)
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    # a damaged pickle raises whatever its bytes say
    except (
        safetensors.SafetensorError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile,
        OSError, EOFError, ArithmeticError, AssertionError, AttributeError, LookupError,
        MemoryError, RecursionError, RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        if isinstance(error, CheckpointError):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{call}: {file.name} is damaged, or holds more than tensors ({reason}). {_AGAIN}; a "
            f"file that holds code is not opened."
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and _is_plain(value) for key, value in loaded.items()
    ):
        raise CheckpointError(
            f"{call}: {file.name} is no object of names and plain tensors. {_AGAIN}."
        )
    for key, tensor in loaded.items():
        # one number can stand for a tensor of any size, until somebody copies it
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{call}: {file.name} has a tensor {key!r} of fewer numbers than its shape: "
                f"file {list(tensor.shape)}; nothing has been loaded. {_AGAIN}."
            )
    return {key: tensor.detach() for key, tensor in loaded.items()}


def read_meta(call: str, file: Path) -> dict[str, Any]:
    """What this library wrote down in the metadata of another's safetensors file; often nothing.

    Raises:
        CheckpointError: the file is damaged, or it is no object.
    """
    try:
        check_header(file)
        with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
            text = (opened.metadata() or {}).get(META, "{}")
        found = parse_json(text)
    except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{call}: {file.name} is damaged, or its {META!r} is no JSON ({error}). {_AGAIN}."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{call}: {file.name} has {META}={text[:60]!r}, which is no object. {_AGAIN}."
        )
    return found


def _check_regular(call: str, file: Path) -> None:
    try:
        check_regular(file)
    except CheckpointError as error:
        raise CheckpointError(f"{call}: {error}.") from error


def _check_header(call: str, file: Path) -> None:
    try:
        check_header(file)
    except CheckpointError as error:
        raise CheckpointError(f"{call}: {file.name} is damaged: {error}. {_AGAIN}.") from error


def _is_plain(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_meta or value.is_quantized or value.is_complex())


def _refuse_compressed(call: str, file: Path) -> None:
    # torch.save compresses nothing: what is compressed can be a thousand times its size in memory
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as opened:
        entries = opened.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(
            f"{call}: {file.name} is compressed, which torch.save never does. {_AGAIN}."
        )
    # entries may lie over each other: each of a thousand as large as the file
    if sum(entry.file_size for entry in entries) > file.stat().st_size:
        raise CheckpointError(
            f"{call}: {file.name} holds more than it has bytes, as its entries share them, which "
            f"those of torch.save never do. {_AGAIN}."
        )
