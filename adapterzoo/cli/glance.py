"""Adapters on disk, read without torch, which is slow to import.

`look` reads the headers of the files, and the tensors only if they have digests, as in the native
format. It leaves what it cannot read to `checkpoints.open_checkpoint`, which says what is wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adapterzoo.errors import CheckpointError
from adapterzoo.names import STATIC

if TYPE_CHECKING:
    import torch

# copies of names in hub.names, formats and heads, which import torch; a test compares the facts
# with those that are read there
_ADAPTER = "adapter.safetensors", "pytorch_adapter.bin"
_PEFT = "adapter_model.safetensors", "adapter_model.bin"
_HEAD, _HUB_HEAD = "head.safetensors", ("model_head.safetensors", "pytorch_model_head.bin")
_FUSION = "adapter_fusion.safetensors"
_HUB_FUSION = "model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin"
_CONFIGS = ("adapter_config.json", "head_config.json", "adapter_fusion_config.json",
            "adapter_interface.json")  # fmt: skip
_PAIRS = (_ADAPTER, _PEFT, (_HEAD,), _HUB_HEAD, (_FUSION,), _HUB_FUSION)
FILES = (*(name for pair in _PAIRS for name in pair), *_CONFIGS)
"""All names that a file of an adapter may have."""
_NATIVE, _META, _BASE = "adapterzoo", "adapterzoo_meta", "adapterzoo_base"
_HEAD_KEY, _PINNED, _VERSION = "head//", 16, 1
# fields of AdapterHub's configs; other fields are of the author
_FIELDS = frozenset({"name", "model_type", "model_class", "model_name", "hidden_size", "version",
                     "adapter_names", "config", "base_revision", "base_digest"})  # fmt: skip
# dtypes of safetensors, and classes of storages in pickles → dtypes of torch
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64",
}  # fmt: skip
_LARGEST = 2**28


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder with an adapter or only a head, read but not compared with a model.

    Attributes:
        path: as the user wrote it, without a fingerprint.
        folder: the local folder.
        kind: `"adapter"` or `"head"`.
        format: name of the format.
        metadata: its config; native configs hold that of the head too.
        head: description of the head; None if only a model can give it.
        meta: the author's metadata.
        tensors: all tensors, or `Header`s, by their keys in the file.
        sizes: bytes of each file.
        fingerprint: the `adapter_fingerprint`; None if only a model can give it.
        pinned: the first digits of the fingerprint that the user wrote; None: none.
        base: name of the base model; None if the files do not have it.
        base_revision: its commit, or None.
        base_digest: digest of its weights, or None.
    """

    path: str
    folder: Path
    kind: Any
    format: str
    metadata: Mapping[str, Any]
    head: Mapping[str, Any] | None
    meta: Mapping[str, Any]
    tensors: Mapping[str, Any]
    sizes: Mapping[str, int]
    fingerprint: str | None
    pinned: str | None
    base: str | None
    base_revision: str | None
    base_digest: str | None

    @property
    def method(self) -> str | None:
        """The format's name of the method."""
        own = config_in(self.metadata).get("architecture")
        return _text(own or self.metadata.get("peft_type"))

    @property
    def name(self) -> str | None:
        """The adapter's name; some formats have none."""
        return _text(self.metadata.get("name"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most tensors; torch's default if there are none."""
        import torch

        dtypes = Counter(t.dtype for t in self.tensors.values() if t.is_floating_point())
        return dtypes.most_common(1)[0][0] if dtypes else torch.get_default_dtype()

    @property
    def head_type(self) -> str | None:
        """The head's type or the name of its class; None without a head."""
        head = self.head or {}
        return _text(
            config_in(head).get("head_type") or head.get(STATIC) or head.get("model_class")
        )

    @property
    def labels(self) -> list[str] | None:
        """The head's classes in the order of their ids."""
        numbers = config_in(self.head or {}).get("label2id")
        if isinstance(numbers, Mapping) and all(isinstance(n, int) for n in numbers.values()):
            return sorted(numbers, key=numbers.__getitem__)
        return None

    @property
    def settings(self) -> Mapping[str, Any]:
        """What `train` has saved with the adapter."""
        found = self.meta.get("train")
        return found if isinstance(found, Mapping) else {}

    def pin(self, fingerprint: str | None) -> str | None:
        """Return the name that loads this adapter and no other; None without a fingerprint."""
        return None if fingerprint is None else f"{self.path}@{fingerprint[:_PINNED]}"

    def facts(self) -> dict[str, Any]:
        """Return what `info` shows, as JSON types."""
        config = self.metadata.get("config")
        if self.format == "peft":
            config = {k: v for k, v in self.metadata.items() if v not in (None, {}, [])}
        return {
            "path": self.path,
            "format": self.format,
            "holds": self.kind,
            "name": self.name,
            "base_model": self.base,
            "base_revision": self.base_revision,
            "base_digest": self.base_digest,
            "model_type": self.metadata.get("model_type"),
            "method": self.method,
            "head": self.head_type,
            "labels": self.labels,
            "parameters": sum(math.prod(t.shape) for t in self.tensors.values()),
            "tensors": len(self.tensors),
            "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in self.tensors.values()}),
            "bytes": sum(self.sizes.values()),
            "files": dict(self.sizes),
            "fingerprint": self.fingerprint,
            "pinned": self.pin(self.fingerprint),
            "config": config,
            "meta": dict(self.meta),
            "compared_with": None,
        }


class Header(NamedTuple):
    """What a file says of a tensor.

    Attributes:
        dtype: its name in torch.
        shape: its sizes.
    """

    dtype: str
    shape: tuple[int, ...]


def formats_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the format of what a folder holds: an adapter, a head.

    Args:
        folder: that may not exist.
    """
    for kind, native, hub in (("adapter", _ADAPTER[0], _ADAPTER), ("head", _HEAD, _HUB_HEAD)):
        try:
            config = json.loads((folder / f"{kind}_config.json").read_bytes())
        except (OSError, ValueError):
            config = {}
        if (folder / native).is_file() and _is_native(folder / native):
            yield kind, "native"
        elif any((folder / name).is_file() for name in hub) or {"config", "model_class"} <= {
            *config
        }:
            yield kind, "adapterhub"
        elif kind == "adapter" and (
            "peft_type" in config or any((folder / name).is_file() for name in _PEFT)
        ):
            yield kind, "peft"


def refuse_to_replace(folder: Path, to: str) -> None:
    """Refuse a folder that holds a checkpoint in another format: it may be the only copy.

    Args:
        folder: to be written.
        to: name of the format.

    Raises:
        CheckpointError: it holds one.
    """
    for kind, there in formats_in(folder):
        if there != to.removesuffix("-safetensors"):
            raise CheckpointError(
                f"{str(folder)!r} holds an {kind} in the format {there!r}. Write another folder."
            )


def look(path: str) -> CheckpointFolder | None:
    """Return what the headers in a folder say; None if a slower reader must look at it.

    Args:
        path: a local folder, or anything else.
    """
    folder = Path(path)
    try:
        kind, form = next(formats_in(folder))
        there = {file.name for file in folder.iterdir() if file.is_file()}
        # of each pair the first one is read
        names = [next(n for n in pair if n in there) for pair in _PAIRS if there & {*pair}]
        sizes = {n: (folder / n).stat().st_size for n in (*names, *_CONFIGS) if n in there}
        read = _read_native if form == "native" else _read_other
        return read(path, folder, kind, form, sizes) if names else None
    # whatever is wrong, the slower reader says it
    except (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError,
            RecursionError, StopIteration, TypeError, ValueError, pickle.UnpicklingError,
            zipfile.BadZipFile):  # fmt: skip
        return None


def _read_native(
    path: str, folder: Path, kind: str, form: str, sizes: Mapping[str, int]
) -> CheckpointFolder | None:
    file, config = f"{kind}.safetensors", f"{kind}_config.json"
    if sizes.keys() != {file, config} or sizes[file] > _LARGEST:
        return None
    data = (folder / file).read_bytes()
    start, entries, extra = _header(folder / file)
    metadata: dict[str, Any] = extra[_NATIVE]
    expected, digests = metadata.pop("sha256"), {}
    for key, entry in sorted(entries.items()):
        first, last = entry["data_offsets"]
        digest = hashlib.sha256(f"torch.{_DTYPES[entry['dtype']]}{entry['shape']}".encode())
        digest.update(memoryview(data)[start + first : start + last])
        digests[key] = digest.hexdigest()[:32]
    shown = json.loads((folder / config).read_bytes())
    is_same = json.dumps(shown, sort_keys=True) == json.dumps(metadata, sort_keys=True)
    if metadata["version"] != _VERSION or not is_same or expected != _mark(metadata, digests):
        return None
    own = {key: value for key, value in digests.items() if not key.startswith(_HEAD_KEY)}
    # of trained embeddings, the file has only some rows
    is_known = kind == "adapter" and "embeddings" not in metadata
    return CheckpointFolder(
        path, folder, kind, form, metadata, _mapping(metadata.get("head")),
        _mapping(metadata.get("meta")) or {}, _headers(folder / file), sizes,
        _mark(metadata["config"], own) if is_known else None, None,
        *_base_in(metadata, "model_name"),
    )  # fmt: skip


def _read_other(
    path: str, folder: Path, kind: str, form: str, sizes: Mapping[str, int]
) -> CheckpointFolder:
    tensors: dict[str, Header] = {}
    for name in sizes:
        if not name.endswith(".json"):
            tensors |= _headers(folder / name)
    metadata = _object((folder / f"{kind}_config.json").read_bytes())
    if form == "peft":
        extra = _header(folder / _PEFT[0])[2] if _PEFT[0] in sizes else {}
        head, meta = None, extra.get(_META)
        values = {**metadata, **extra.get(_BASE, {})}
        base = _base_in(values, "base_model_name_or_path", "revision")
    else:
        has_head = _CONFIGS[1] in sizes
        head = _object((folder / _CONFIGS[1]).read_bytes()) if has_head else None
        meta = {key: value for key, value in metadata.items() if key not in _FIELDS}
        base = _base_in(metadata, "model_name")
    return CheckpointFolder(path, folder, kind, form, metadata, _mapping(head),
                            _mapping(meta) or {}, tensors, sizes, None, None, *base)  # fmt: skip


def _base_in(
    values: Mapping[str, Any], name: str, revision: str = "base_revision"
) -> tuple[str | None, str | None, str | None]:
    """Return name, revision and digest of the base model that a file names."""
    found = (values.get(name), values.get(revision), values.get("base_digest"))
    one, two, three = (v if isinstance(v, str) and v else None for v in found)
    return one, two, three


# --- the headers of files ---


def _is_native(file: Path) -> bool:
    try:
        return _NATIVE in _header(file)[2]
    except (OSError, ValueError, LookupError):
        # ours may be damaged
        return True


def _header(file: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return where the tensors of a safetensors file start, their entries, and our metadata.

    Raises:
        ValueError: the file is damaged.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _LARGEST:
            raise ValueError("the header is too large")
        entries = _object(stream.read(size))
    texts = entries.pop("__metadata__", {})
    extra = {key: _object(texts[key]) for key in (_NATIVE, _META, _BASE) if key in texts}
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if 8 + size + end != file.stat().st_size:
        raise ValueError("the file has been cut")
    return 8 + size, entries, extra


def _headers(file: Path) -> dict[str, Header]:
    """Return the headers of the tensors in a safetensors file or a pickle of torch."""
    if file.suffix == ".safetensors":
        entries = _header(file)[1]
        return {k: Header(_DTYPES[e["dtype"]], tuple(e["shape"])) for k, e in entries.items()}
    with zipfile.ZipFile(file) as opened:
        names = opened.namelist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in opened.infolist()):
            raise ValueError("the file is compressed")
        with opened.open(next(name for name in names if name.endswith("/data.pkl"))) as stream:
            found = _Headers(stream).load()
    if any(not isinstance(header, Header) for header in found.values()):
        raise ValueError("the file does not map names to tensors")
    return dict(found)


class _Headers(pickle.Unpickler):
    """Reads the pickle of a file of torch, without its tensors and without running code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a tensor or a storage; nothing else is allowed.

        Args:
            module: of the name.
            name: in the pickle.

        Raises:
            UnpicklingError: the name is another one.
        """
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda dtype, _offset, shape, *_: Header(dtype, tuple(shape))
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return the dtype of a storage.

        Args:
            pid: "storage", its class, and more.
        """
        return pid[1]


# --- JSON ---


def _object(text: str | bytes) -> dict[str, Any]:
    def number(constant: str) -> Any:
        raise ValueError(constant)

    found = json.loads(text, parse_constant=number)
    if not isinstance(found, dict):
        raise ValueError("the JSON is not an object")
    return found


def _mark(config: Any, digests: Mapping[str, str]) -> str:
    """Return the fingerprint of a config and the digests of tensors."""
    document = json.dumps([config, digests], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def config_in(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config in a file; an empty one if there is none.

    Args:
        document: the fields of the file.
    """
    return _mapping(document.get("config")) or {}


def _mapping(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def _text(value: object) -> str | None:
    """Return a value from a file as text; None for an empty one."""
    return str(value) if value else None
