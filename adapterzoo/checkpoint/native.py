"""The native format: one folder with one safetensors file, and how it is compared with a model.

`adapter.safetensors` holds an adapter, with its head where there is one; `head.safetensors` a
head alone. Keys are `<path of the layer>/<parameter>`, those of a head `head//<parameter>`; no
name of an adapter or head stands in them. `adapter_config.json` and `head_config.json` repeat the
document for people and for the Hub; both must say the same, see `documents`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.errors import CheckpointError, listing

from . import documents, folders
from .digest import digests, same_bits
from .files import holds_document, json_bytes, read_tensors, tensor_bytes, write_all
from .formats import Facts, Stem, formats
from .stored import Stored

FORMAT = "adapterzoo"
VERSION = 1
_SHOWN = 10
# two slashes: no layer, were it called "head", can have such a key
_HEAD = "head//"


class NativeFormat:
    """The format of this library, as `formats` sees it."""

    def recognises(self, folder: Path, stem: Stem) -> bool:
        """Whether there is the one file, and no other library wrote it."""
        file = folder / f"{stem}.safetensors"
        return file.is_file() and holds_document(file)

    def read(self, folder: Path, stem: Stem, facts: Facts) -> Stored:
        """What `load` reads."""
        return load(folder, stem)

    def encode(self, stored: Stored, stem: Stem, facts: Facts) -> dict[str, bytes]:
        """Tensors and document in one file; the document once more for people."""
        return encode(stored, stem)

    def owned(self, stem: Stem) -> tuple[str, ...]:
        """Always both."""
        return f"{stem}.safetensors", f"{stem}_config.json"


formats.register("native")(NativeFormat())


def encode(stored: Stored, stem: str) -> dict[str, bytes]:
    """The contents of `<stem>.safetensors` and `<stem>_config.json`."""
    tensors = keyed(stored)
    document = {
        "format": FORMAT,
        "version": VERSION,
        **stored.document,
        "digests": digests(tensors),
    }
    return {
        f"{stem}.safetensors": tensor_bytes(tensors, documents.sealed(document)),
        f"{stem}_config.json": json_bytes(documents.copy_of(document)),
    }


def keyed(stored: Stored) -> dict[str, Tensor]:
    """The tensors of an adapter and of its head under the keys of one file."""
    return stored.adapter | {_HEAD + key: tensor for key, tensor in stored.head.items()}


def resealed(folder: Path, stem: str) -> dict[str, bytes]:
    """The files of a checkpoint whose `<stem>_config.json` was edited, which is right from now on.

    Raises:
        CheckpointError: one of its files is missing or damaged.
    """
    return encode(load(folder, stem, edited=True), stem)


def save(folder: Path, stem: str, stored: Stored) -> None:
    """Write `<stem>.safetensors` and `<stem>_config.json`.

    Raises:
        CheckpointError: the folder cannot be written; an old checkpoint is still whole.
    """
    write_all(folder, encode(stored, stem))


def load(folder: Path, stem: str, edited: bool = False) -> Stored:
    """Read what `save` wrote.

    Args:
        folder: that `save` was given.
        stem: the same.
        edited: whether `<stem>_config.json`, changed by hand, is what the tensors mean.

    Raises:
        CheckpointError: it is missing, damaged, of another format or of a newer version.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"load from {str(folder)!r}: there is no such folder. Write the folder that "
            f"save_{stem} was given."
        )
    call = f"load from {str(folder)!r}"
    with folders.reading(call, folder):
        document, tensors = read_tensors(folder / f"{stem}.safetensors", f"save_{stem}")
        version = document.get("version")
        if document.get("format") != FORMAT or not isinstance(version, int):
            raise CheckpointError(
                f"{call}: not the native format (format={document.get('format')!r}). Write a "
                f"folder that save_{stem} made."
            )
        if version > VERSION:
            raise CheckpointError(
                f"{call}: written in version {version} of the format, this release reads up to "
                f"{VERSION}. Write pip install -U adapterzoo."
            )
        document = documents.checked(call, folder, stem, document, edited)
    _check_bits(call, document.get("digests"), tensors)
    head = {k.removeprefix(_HEAD): t for k, t in tensors.items() if k.startswith(_HEAD)}
    adapter = {k: t for k, t in tensors.items() if not k.startswith(_HEAD)}
    return Stored(document, adapter, head)


def differences(
    file: Mapping[str, Tensor], skeleton: Mapping[str, Tensor], dtype: torch.dtype | None
) -> list[str]:
    """How the tensors of a file differ from those of a model in names, shapes and dtypes.

    Args:
        file: what was read.
        skeleton: the fresh parameters that it shall fill.
        dtype: to which the user allows the file to be converted; None: dtypes must agree.
    """
    lines = [f"{key}   in the file only" for key in sorted(set(file) - set(skeleton))]
    lines += [f"{key}   in the model only" for key in sorted(set(skeleton) - set(file))]
    wrong: dict[tuple[torch.dtype, torch.dtype], int] = {}
    for key in sorted(set(file) & set(skeleton)):
        theirs, ours = file[key], skeleton[key]
        if theirs.shape != ours.shape:
            lines.append(f"{key}   file {list(theirs.shape)}   model {list(ours.shape)}")
        elif theirs.dtype != ours.dtype and dtype is None:
            wrong[theirs.dtype, ours.dtype] = wrong.get((theirs.dtype, ours.dtype), 0) + 1
    for (theirs_dtype, ours_dtype), count in wrong.items():
        lines.append(
            f"dtype of {count} tensors   file {theirs_dtype}   model {ours_dtype}   "
            f"(pass dtype={ours_dtype} to convert)"
        )
    return lines


def check_fit(
    call: str,
    model: str,
    file: Mapping[str, Tensor],
    skeleton: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> None:
    """Raise one error with every difference between a file and the model that it shall fill.

    Raises:
        CheckpointError: there is any.
    """
    lines = differences(file, skeleton, dtype)
    start = f"{call}: " if call else ""
    if lines:
        rest = len(lines) - _SHOWN
        shown = lines[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        raise CheckpointError(
            f"{start}{len(lines)} difference{'s' * (len(lines) > 1)} from this {model}; nothing "
            f"has been loaded:\n  " + "\n  ".join(shown)
        )


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module the values of a file that fits it, in the dtypes of the module.

    Args:
        module: where it is on the meta device, and a copy would be lost, it gets the tensors.
        tensors: those of the module that shall change.
    """
    own = module.state_dict(keep_vars=True)
    values = {key: tensor.to(own[key].dtype) for key, tensor in tensors.items()}
    if any(own[key].is_meta for key in values):
        module.load_state_dict(values, strict=False, assign=True)
        _share_again(module, own, values)
        return
    with torch.no_grad():
        for key, value in values.items():
            own[key].copy_(value)
    # a copy within the memory that was checked is right
    far = (key for key in values if own[key].device.type != "cpu")
    wrong = [key for key in far if not same_bits(own[key], values[key])]
    _refuse_bits("load", wrong, own)


def _share_again(module: nn.Module, own: Mapping[str, Tensor], filled: Iterable[str]) -> None:
    """Let what was one tensor under several names be one again, after some got another."""
    first = {id(own[key]): key for key in filled}
    for key, tensor in own.items():
        if (source := first.get(id(tensor), key)) != key:
            _holder(module, key)[_last(key)] = _holder(module, source)[_last(source)]


def _holder(module: nn.Module, key: str) -> dict[str, Any]:
    """The parameters, or the buffers, among which a key of a state dict stands."""
    holder = module.get_submodule(key.rpartition(".")[0])
    parameters = _last(key) in holder._parameters
    return cast("dict[str, Any]", holder._parameters if parameters else holder._buffers)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _check_bits(call: str, expected: object, tensors: Mapping[str, Tensor]) -> None:
    if not isinstance(expected, Mapping):
        raise CheckpointError(f"{call}: the document has no digests. Save the checkpoint again.")
    lines = [f"{key} in the file, and not written" for key in sorted(set(tensors) - set(expected))]
    lines += [f"{key} written, and not in the file" for key in sorted(set(expected) - set(tensors))]
    if lines:
        raise CheckpointError(
            f"{call}: the file has other tensors than those that were written: {listing(lines)}. "
            f"Copy the checkpoint again from where it was saved."
        )
    found = digests(tensors)
    _refuse_bits(call, [key for key in found if found[key] != expected[key]], tensors)


def _refuse_bits(call: str, wrong: list[str], tensors: Mapping[str, Tensor]) -> None:
    if wrong:
        raise CheckpointError(
            f"{call}: in {len(wrong)} of {len(tensors)} tensors the bits are not those that were "
            f"written: {listing(wrong)}. Copy the checkpoint again from where it was saved; if "
            f"that does not help, look at the memory of {tensors[wrong[0]].device}."
        )
