"""AdapterHub's format: folders of `adapters`, and of adapter-transformers before it.

`adapter_config.json` with `pytorch_adapter.bin` or `adapter.safetensors`; with a head
`head_config.json` and `pytorch_model_head.bin` or `model_head.safetensors`. What is written is
what `adapters` 1.3 writes by itself: the pickles, which it reads without being told.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError, listing

from .adapterhub_config import VERSION, read_config
from .adapterhub_heads import read_head, write_head
from .adapterhub_keys import foreign_feature, is_invertible, read_adapter, take_apart
from .adapterhub_write import write_adapter
from .files import json_bytes
from .foreign import fields_of, read_json, read_tensors
from .formats import Facts, Stem, formats
from .stored import Stored

_ADAPTER = ("adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin")
_HEAD = ("head_config.json", "model_head.safetensors", "pytorch_model_head.bin")
# what its configs say of themselves; adapters puts what `meta_dict` says beside these
_FIELDS = frozenset(
    ("adapter_names", "config", "hidden_size", "model_class", "model_name", "model_type", "name",
     "version")
)  # fmt: skip


class AdapterHubFormat:
    """The format of AdapterHub, as `formats` sees it."""

    def recognises(self, folder: Path, stem: Stem) -> bool:
        """Whether there are tensors under AdapterHub's names, or a config that is its own."""
        config, safe, pickled = _ADAPTER if stem == "adapter" else _HEAD
        if (folder / safe).is_file() or (folder / pickled).is_file():
            return True
        return {"config", "model_class"} <= fields_of(folder / config)

    def read(self, folder: Path, stem: Stem, facts: Facts) -> Stored:
        """The adapter, and the head where there is one; or the head alone.

        Raises:
            CheckpointError: a file is missing or damaged, or needs what does not exist here.
        """
        head: tuple[dict[str, Any] | None, dict[str, Tensor]] = None, {}
        name = None
        if stem == "head" or (facts.with_head and any((folder / f).is_file() for f in _HEAD)):
            document, tensors = _read(facts.call, folder, _HEAD)
            name = document.get("name")
            head = read_head(facts, document, tensors)
        if stem == "head":
            return Stored({"name": name, "head": head[0]}, {}, head[1])
        document, tensors = _read(facts.call, folder, _ADAPTER)
        keys = [take_apart(key, str(document.get("name"))) for key in tensors]
        config = read_config(facts.call, document, any(map(is_invertible, keys)))
        if (foreign := foreign_feature(keys)) is not None:
            raise CheckpointError(
                f"{facts.call}: the checkpoint needs {foreign[0]} (it has {foreign[1]!r}), which "
                f"adapterzoo does not have; nothing has been loaded. Bottlenecks, LoRA and DoRA of "
                f"AdapterHub can be loaded."
            )
        config, adapter = read_adapter(facts, config, keys, tensors)
        described = {
            "name": document.get("name"),
            "model_type": document.get("model_type"),
            "config": config.to_dict(),
            "head": head[0],
            "meta": meta_in(document),
        }
        return Stored(described, adapter, head[1])

    def encode(self, stored: Stored, stem: Stem, facts: Facts) -> dict[str, bytes]:
        """Configs and pickled tensors.

        Raises:
            CheckpointError: `adapters` has no such adapter or head, or not for such a model.
        """
        document = stored.document
        name = str(document["name"])
        common = {key: document.get(key) for key in ("name", "model_type", "model_class",
                                                      "model_name", "hidden_size")}  # fmt: skip
        common["version"] = VERSION
        files: dict[str, bytes] = {}
        if stem == "adapter":
            config = AdapterConfig.from_dict(document["config"])
            fields, tensors = write_adapter(facts, config, name, stored.adapter)
            meta = meta_for(facts.call, document.get("meta") or {})
            files[_ADAPTER[2]] = pickled(tensors)
            files[_ADAPTER[0]] = json_bytes({**meta, **common, "config": fields})
        if document.get("head") is not None:
            more, tensors = write_head(facts, name, document["head"], stored.head)
            files[_HEAD[2]] = pickled(tensors)
            files[_HEAD[0]] = json_bytes({**common, **more})
        return files

    def owned(self, stem: Stem) -> tuple[str, ...]:
        """Both kinds of tensors; those of a head too."""
        return (*_ADAPTER, *_HEAD) if stem == "adapter" else _HEAD


formats.register("adapterhub")(AdapterHubFormat())


def meta_in(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says beside its own fields: what `meta_dict` said, there as here."""
    return {key: value for key, value in document.items() if key not in _FIELDS}


def meta_for(call: str, meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `meta_dict` says, for a place beside the fields of a config.

    Raises:
        CheckpointError: it has a key that is such a field.
    """
    if taken := sorted(_FIELDS & set(meta)):
        raise CheckpointError(
            f"{call}: AdapterHub's format keeps meta_dict beside its own fields, and has "
            f"{listing(taken)} among these. Nothing has been written. Give such keys of meta_dict "
            f"another name, or write format='native'."
        )
    return meta


def _read(
    call: str, folder: Path, names: tuple[str, str, str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, safe, pickled = names
    document = read_json(call, folder / config)
    # of two files with the same tensors the one that cannot hold code
    file = next((folder / n for n in (safe, pickled) if (folder / n).is_file()), None)
    if file is None:
        raise CheckpointError(
            f"{call}: there is {config}, but neither {safe} nor {pickled} beside it. Copy the "
            f"checkpoint again from where it was saved."
        )
    return document, read_tensors(call, file)


def pickled(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as `torch.save` writes them."""
    stream = io.BytesIO()
    # cloned: a view would bring all the memory that it looks at
    torch.save({key: t.detach().cpu().clone() for key, t in tensors.items()}, stream)
    return stream.getvalue()
