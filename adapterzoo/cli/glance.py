"""What `info` shows of a folder in the native format, read without torch: importing it is slow."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

# the names of dtypes in safetensors and in torch; others are left to torch
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TENSORS, _CONFIG = "adapter.safetensors", "adapter_config.json"
# copies of names in formats; a test compares the facts with those that are read there
_FORMAT, _HEAD, _PINNED = "adapterzoo", "head//", 16
_LARGEST = 2**28
# of files that may belong to an adapter
_ENDINGS = (".bin", ".json", ".safetensors")


def facts_of(path: str) -> dict[str, Any] | None:
    """Return the facts of an adapter, or None if a slower reader must look at it.

    Args:
        path: a local folder, or anything else.
    """
    folder = Path(path)
    try:
        sizes = {name: (folder / name).stat().st_size for name in (_TENSORS, _CONFIG)}
        there = {file.name for file in folder.iterdir() if file.suffix in _ENDINGS}
        if there != sizes.keys() or sizes[_TENSORS] > _LARGEST:
            return None
        data = (folder / _TENSORS).read_bytes()
        shown = json.loads((folder / _CONFIG).read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        tensors: dict[str, Any] = json.loads(data[8:start])
        metadata: dict[str, Any] = json.loads(tensors.pop("__metadata__")[_FORMAT])
        expected = metadata.pop("sha256")
        digests, count = {}, 0
        for key, entry in sorted(tensors.items()):
            first, last = entry["data_offsets"]
            digest = hashlib.sha256(f"torch.{_DTYPES[entry['dtype']]}{entry['shape']}".encode())
            digest.update(memoryview(data)[start + first : start + last])
            digests[key] = digest.hexdigest()[:32]
            count += math.prod(entry["shape"])
        own = {key: value for key, value in digests.items() if not key.startswith(_HEAD)}
        fingerprint = _fingerprint(metadata["config"], own)
        head = metadata.get("head") or {}
        config = head.get("config") or {}
        numbers = config.get("label2id")
        base = {name: metadata.get(name) or None
                for name in ("model_name", "base_revision", "base_digest")}  # fmt: skip
        if (
            metadata.get("version") != 1
            or "embeddings" in metadata
            or json.dumps(shown, sort_keys=True) != json.dumps(metadata, sort_keys=True)
            or (head and "head_type" not in config)
            or expected != _fingerprint(metadata, digests)
        ):
            return None
        return {
            "path": path,
            "format": "native",
            "holds": "adapter",
            "name": metadata.get("name"),
            "base_model": base["model_name"],
            "base_revision": base["base_revision"],
            "base_digest": base["base_digest"],
            "model_type": metadata.get("model_type"),
            "method": metadata["config"]["architecture"],
            "head": config.get("head_type"),
            "labels": sorted(numbers, key=numbers.__getitem__) if numbers else None,
            "parameters": count,
            "tensors": len(tensors),
            "dtypes": sorted({_DTYPES[entry["dtype"]] for entry in tensors.values()}),
            "bytes": sum(sizes.values()),
            "files": sizes,
            "fingerprint": fingerprint,
            "pinned": f"{path}@{fingerprint[:_PINNED]}",
            "config": metadata["config"],
            "meta": metadata.get("meta") or {},
            "compared_with": None,
        }
    # whatever is wrong, the slower reader says it
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _fingerprint(config: Any, digests: dict[str, str]) -> str:
    document = json.dumps([config, digests], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()
