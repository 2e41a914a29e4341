"""JSON, and the headers of tensor files. Files are not trusted.

Only regular files are opened, the sizes of configs and headers are limited, and pickles are read
without running code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import pickle
import stat
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors

from adapterzoo.errors import CheckpointError, ConfigError, argument

# --- JSON ---

AGAIN = "Copy the checkpoint again from where it was saved"
# configs have a few thousand bytes; lists of labels a few hundred thousand
MAX_JSON = 16 * 2**20


def read_json(file: Path, hint: str = AGAIN) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        file: the file; read only if it is not too large for a config.
        hint: what the error says to do.

    Raises:
        CheckpointError: the file is missing, too large, not JSON or not an object.
    """
    try:
        _check_regular(file)
        size = file.stat().st_size
        text = file.read_bytes() if size <= MAX_JSON else b""
    except CheckpointError:
        raise
    except OSError as error:
        raise _unreadable(file, error, hint) from error
    if size > MAX_JSON:
        raise CheckpointError(f"{str(file)!r} has {size:,} bytes, too many for a config. {hint}.")
    return _object(text, repr(str(file)), hint)


def _unreadable(file: Path, error: OSError, hint: str = AGAIN) -> CheckpointError:
    return CheckpointError(f"{str(file)!r} cannot be read: {error.strerror}. {hint}.")


def fields_of(file: Path) -> dict[str, Any]:
    """Return the fields in a JSON file; empty if it cannot be read as a config."""
    try:
        return read_json(file)
    except CheckpointError:
        return {}


def _object(text: str | bytes, what: str, hint: str = AGAIN) -> dict[str, Any]:
    try:
        values = json.loads(text, parse_constant=_number, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON ({error}). {hint}.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{what} holds a {type(values).__name__}, not an object. {hint}.")
    return values


def _number(text: str) -> float:
    """Parse a number, but not NaN or an infinity, which Python accepts and JSON does not have.

    1e999 would become an infinity too.

    Raises:
        ConfigError: the number is not finite.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ConfigError(f"{text[:60]} is not a number of JSON")
    return number


def _check_regular(file: Path) -> None:
    """Refuse pipes and devices, which might never end.

    A link to a regular file is accepted: huggingface_hub's cache consists of these.

    Raises:
        CheckpointError: the file is not regular.
        OSError: there is no such file.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise CheckpointError(f"{str(file)!r} is not a regular file. {AGAIN}.")


# --- headers of tensors ---

# header of a safetensors file: names, shapes and metadata, about 300 bytes per tensor
MAX_HEADER = 32 * 2**20


class Header(NamedTuple):
    """What a file says about a tensor.

    Attributes:
        dtype: its name in torch.
        shape: its sizes.
    """

    dtype: str
    shape: tuple[int, ...]


# names in safetensors files, and classes of storages in pickles → names in torch
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool",
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
# a damaged file can raise any of these
_DAMAGED = (
    safetensors.SafetensorError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile, OSError,
    EOFError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError,
    RecursionError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


@contextlib.contextmanager
def guarded(file: Path) -> Iterator[None]:
    """Check that a tensor file is regular, and raise one error for all that a damaged file raises.

    Raises:
        CheckpointError: the file is missing, cannot be read, is not regular or is damaged, or it
            holds code.
    """
    try:
        _check_regular(file)
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{str(file)!r}: there is no such file. {AGAIN}.") from error
    except PermissionError as error:
        raise _unreadable(file, error) from error
    except _DAMAGED as error:
        # torch's next sentence says how to run the code anyway
        reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise CheckpointError(
            f"{str(file)!r} is damaged, or holds code ({reason}). {AGAIN}."
        ) from error


@contextlib.contextmanager
def opened(file: Path, framework: str = "numpy") -> Iterator[Any]:
    """Open a safetensors file, if its header is not too large.

    Args:
        file: the file.
        framework: library of the tensors that are read; `"numpy"` is enough for headers.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    with guarded(file):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
        if size > MAX_HEADER:
            raise CheckpointError(f"{str(file)!r} is damaged: its header is too large. {AGAIN}.")
        with safetensors.safe_open(file, framework=framework) as found:
            yield found


def metadata_in(file: Path, key: str) -> dict[str, Any] | None:
    """Return the object under a key of a safetensors file's metadata; None if it is missing.

    Raises:
        CheckpointError: the file is damaged, or the value is not an object.
    """
    with opened(file) as found:
        text = (found.metadata() or {}).get(key)
    return None if text is None else _object(text, f"{str(file)!r}: its metadata {key!r}")


def headers_in(file: Path) -> dict[str, Header]:
    """Return what a `.safetensors` file, or a pickle that torch wrote, says about its tensors.

    Raises:
        CheckpointError: the file is damaged, or holds code or anything other than tensors.
    """
    if file.suffix == ".safetensors":
        with opened(file) as found:
            slices = {key: found.get_slice(key) for key in sorted(found.keys())}
            return {
                key: Header(_DTYPES[each.get_dtype()], tuple(each.get_shape()))
                for key, each in slices.items()
            }
    with guarded(file):
        if check_archive(file):
            with zipfile.ZipFile(file) as archive:
                name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
                with archive.open(name) as stream:
                    loaded = _Headers(stream).load()
        else:
            # before torch 1.6: three pickles about the file come first
            with file.open("rb") as stream:
                *_, loaded = (_Headers(stream).load() for _ in range(4))
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and _is_header(value) for key, value in loaded.items()
    ):
        raise CheckpointError(f"{str(file)!r} does not map names to plain tensors. {AGAIN}.")
    return dict(sorted(loaded.items()))


def _is_header(value: object) -> bool:
    if not isinstance(value, Header) or value.dtype not in _DTYPES.values():
        return False
    return all(isinstance(size, int) and size >= 0 for size in value.shape)


def check_archive(file: Path) -> bool:
    """Check an archive, as torch has written since 1.6; return whether the file is one.

    Raises:
        CheckpointError: it would need more memory than it has bytes.
    """
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    # torch.save never compresses, and a compressed file can expand a thousandfold in memory
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(f"{str(file)!r} is compressed. {AGAIN}.")
    # entries may overlap, each as large as the file
    if sum(entry.file_size for entry in entries) > file.stat().st_size:
        raise CheckpointError(f"{str(file)!r} is damaged: entries share bytes. {AGAIN}.")
    return True


class _Headers(pickle.Unpickler):
    """Reads the pickle of a file of torch, without its tensors and without running code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a tensor or a storage; nothing else is allowed.

        Args:
            module: module of the name.
            name: name in the pickle.

        Raises:
            UnpicklingError: the name is another one.
        """
        if module == "torch._utils" and name in _REBUILT:
            return _REBUILT[name]
        if (module, name) == ("collections", "OrderedDict"):
            # torch gives it attributes
            return OrderedDict
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return lambda make, _type, given, _state: make(*given)
        if module.startswith("torch") and name in ("Tensor", "Parameter", "Buffer"):
            return name
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        # a newer dtype is an argument of its own
        if (module, name) == ("torch.storage", "UntypedStorage") or (
            module == "torch" and name in _DTYPES.values()
        ):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return the dtype of a storage.

        Args:
            pid: "storage", its class, and more.
        """
        return pid[1]


# what pickles call to make a tensor → what makes its header of the same arguments
_REBUILT: Mapping[str, Callable[..., Header]] = {
    "_rebuild_tensor_v2": lambda dtype, _offset, shape, *_: Header(dtype, tuple(shape)),
    "_rebuild_tensor_v3": lambda *given: Header(given[6], tuple(given[2])),
    "_rebuild_parameter": lambda header, *_: header,
    "_rebuild_parameter_with_state": lambda header, *_: header,
}


# --- digests ---


def digest(dtype: str, shape: Iterable[int], data: Any) -> str:
    """Return a digest of a tensor.

    Args:
        dtype: its name in torch.
        shape: its sizes.
        data: its bytes, as a buffer.

    Returns:
        32 hexadecimal digits.
    """
    hashed = hashlib.sha256(f"torch.{dtype}{list(shape)}".encode())
    hashed.update(data)
    return hashed.hexdigest()[:32]


def digests_in(file: Path, headers: Mapping[str, Header]) -> dict[str, str]:
    """Return the digest of each tensor in a safetensors file.

    Args:
        file: path of the file.
        headers: headers of its tensors, which `headers_in` has read and checked.

    Raises:
        CheckpointError: the file is damaged.
    """
    with guarded(file), file.open("rb") as stream:
        size = 8 + int.from_bytes(stream.read(8), "little")
        entries = json.loads(stream.read(size - 8))
        found = {}
        for key, header in headers.items():
            first, last = entries[key]["data_offsets"]
            stream.seek(size + first)
            found[key] = digest(*header, stream.read(last - first))
    return found


def fingerprint_of(config: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """Return one digest for a config of JSON types and the digests of all tensors.

    Returns:
        64 hexadecimal digits.
    """
    document = json.dumps([dict(config), digests], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


PINNED_DIGITS = 16
"""Number of digits of a fingerprint in `name@fingerprint`."""


def other_fingerprint(found: str, expected: str) -> CheckpointError:
    """Return the error for an adapter other than the requested one.

    Args:
        found: the adapter's fingerprint.
        expected: the first digits of the requested fingerprint.
    """
    return CheckpointError(
        f"the adapter has the fingerprint {found}, not {expected}; nothing has been loaded.\n"
        f"Write @{found[:PINNED_DIGITS]} to load it, or "
        f"{argument('revision', expected, 'load_adapter')} for a commit of the Hub."
    )
