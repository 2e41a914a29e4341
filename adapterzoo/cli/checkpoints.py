"""Checkpoints of any format, read without a model."""

from __future__ import annotations

import os

from adapterzoo import formats, hub
from adapterzoo.errors import CheckpointError
from adapterzoo.formats import adapterhub, files, native, peft
from adapterzoo.formats.checkpoint import base_of
from adapterzoo.formats.fit import fingerprint, other_fingerprint
from adapterzoo.hub.names import ADAPTER_CONFIG, wanted

from .checks import no_adapter
from .glance import CheckpointFolder, config_in

_HEAD_CONFIG = "head_config.json"


def open_checkpoint(path: str, revision: str | None = None) -> CheckpointFolder:
    """Read a local folder, or download a repository and read it.

    Args:
        path: a folder, `user/repository` or `user/repository/folder`; `@` and a fingerprint may
            follow.
        revision: branch, tag or commit on the Hub.

    Raises:
        CheckpointError: there is no adapter, its files are damaged, or it has another fingerprint.
        HubError: it cannot be downloaded.
    """
    name_or_path, pinned = hub.pinned(path)
    path = os.fspath(name_or_path)
    folder = hub.resolve(path, revision)
    found = ((kind, formats.of(folder, kind)) for kind in formats.KINDS)
    kind, name = next((pair for pair in found if pair[1] is not None), ("adapter", None))
    if name is None:
        raise no_adapter(path)
    names = wanted(file.name for file in folder.iterdir() if file.is_file())
    sizes = {file: (folder / file).stat().st_size for file in names}
    own_fingerprint = None
    if name == "native":
        stored = native.load(folder, kind)
        metadata, tensors = stored.metadata, native.keyed(stored)
        head, meta = metadata.get("head"), metadata.get("meta")
        # the file has only some rows of trained embeddings
        if kind == "adapter" and "embeddings" not in metadata:
            own_fingerprint = fingerprint(config_in(metadata), stored.adapter)
    else:
        tensors = {}
        for file in names:
            if not file.endswith(".json"):
                tensors |= files.read_tensors(folder / file)
        metadata = files.read_json(folder / (ADAPTER_CONFIG if kind == "adapter" else _HEAD_CONFIG))
        has_head = name != "peft" and (folder / _HEAD_CONFIG).is_file()
        head = files.read_json(folder / _HEAD_CONFIG) if has_head else None
        meta = adapterhub.meta_in(metadata) if name == "adapterhub" else peft.meta_in(folder)
    if pinned is not None and kind == "head":
        raise CheckpointError(f"{path!r} holds a head, which has no fingerprint. Write {path!r}.")
    if pinned is not None and not (own_fingerprint or pinned).startswith(pinned):
        raise other_fingerprint(str(own_fingerprint), pinned)
    if kind == "adapter":
        base = formats.formats[name].base(folder)
    else:
        base = base_of(metadata, "model_name")
    return CheckpointFolder(
        path, folder, kind, name, metadata,
        head if isinstance(head, dict) else None, meta if isinstance(meta, dict) else {},
        tensors, sizes, own_fingerprint, pinned, base.name, base.revision, base.digest,
    )  # fmt: skip
