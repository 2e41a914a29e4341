"""Compare the tensors of a checkpoint with the modules to fill, and fill the modules.

Digests are equal for equal bits, on any device and in any memory layout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.errors import CheckpointError, in_python, listing


def digest(tensor: Tensor) -> str:
    """Return a digest of dtype, shape and exact bits; the device and the strides do not matter.

    Returns:
        32 hexadecimal digits.
    """
    hashed = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    hashed.update(_bytes(tensor).numpy().data)
    return hashed.hexdigest()[:32]


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether dtype, shape and bits are equal."""
    alike = tensor.dtype is other.dtype and tensor.shape == other.shape
    return alike and torch.equal(_bytes(tensor), _bytes(other))


def same_values(theirs: Tensor, mine: Tensor) -> bool:
    """Return whether a file's tensor has the values of a model's tensor, in the model's dtype."""
    own = mine.detach().cpu()
    return theirs.shape == own.shape and bool((theirs.to(own.dtype) == own).all())


def _bytes(tensor: Tensor) -> Tensor:
    # −0 and NaN have bits too: bytes are compared, not numbers
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor."""
    return {key: digest(tensor) for key, tensor in sorted(tensors.items())}


def fingerprint(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return one digest for a config of JSON types and all tensors; 64 hexadecimal digits."""
    document = json.dumps([dict(config), digests(tensors)], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


_SHOWN = 10


def differences(
    file: Mapping[str, Tensor], skeleton: Mapping[str, Tensor], dtype: torch.dtype | None
) -> list[str]:
    """Return how the tensors of a file differ from those of a model in names, shapes and dtypes.

    Args:
        file: what was read.
        skeleton: the new parameters to fill.
        dtype: to which the user lets the file be converted; None: dtypes must agree.
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
            f"dtype of {count} tensors   file {theirs_dtype}   model {ours_dtype}"
            f"{in_python(f'   (pass dtype={ours_dtype} to convert)')}"
        )
    return lines


def check_same(what: str, saved: object, mine: object) -> None:
    """Check that an entry of a training checkpoint has the same config in the model.

    Args:
        what: names the entry in the message, such as `adapter 'a'`.
        saved: its config in the checkpoint.
        mine: its config in the model.

    Raises:
        CheckpointError: they differ.
    """
    if saved != mine:
        raise CheckpointError(
            f"the {what} of the checkpoint is {saved!r}, that of the model {mine!r}; nothing has "
            f"been loaded. Add it with the config of the checkpoint."
        )


def check_fit(
    model: str,
    file: Mapping[str, Tensor],
    skeleton: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> None:
    """Raise one error with every difference between a file and the model to fill.

    Raises:
        CheckpointError: there is a difference.
    """
    lines = differences(file, skeleton, dtype)
    if lines:
        rest = len(lines) - _SHOWN
        shown = lines[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        raise CheckpointError(
            f"{len(lines)} difference{'s' * (len(lines) > 1)} from this {model}; nothing "
            f"has been loaded:\n  " + "\n  ".join(shown)
        )


def converted(file: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of copies of layers, such as heads, in the dtypes of the layers here.

    Args:
        file: what was read.
        like: tensors of the model by the same keys; others do not change.
    """
    return {k: t.to(like[k].dtype) if k in like else t for k, t in file.items()}


def by_path(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors `path/parameter` of a file as path of a module → parameter → tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        path, _, parameter = key.partition("/")
        found.setdefault(path, {})[parameter] = tensor
    return found


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fill a module with the values of a file that fits it, in the dtypes of the module.

    Args:
        module: on the meta device it gets the tensors themselves, as it cannot hold copies.
        tensors: by keys of the module's state dict; other parameters do not change.

    Raises:
        CheckpointError: a device holds other bits than were copied to it.
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
    # copies in the CPU's memory need no check
    far = (key for key in values if own[key].device.type != "cpu")
    if wrong := [key for key in far if not same_bits(own[key], values[key])]:
        _refuse_other_bits(wrong, own[wrong[0]].device)


def _refuse_other_bits(wrong: Sequence[str], device: torch.device) -> None:
    if wrong:
        raise CheckpointError(
            f"after copying to {device} the bits of {listing(wrong)} are not those "
            f"of the file. Load again; if that does not help, check the memory of the device."
        )


def _share_again(module: nn.Module, own: Mapping[str, Tensor], filled: Iterable[str]) -> None:
    """Share tensors again that had several names before some names got new tensors."""
    first = {id(own[key]): key for key in filled}
    for key, tensor in own.items():
        if (source := first.get(id(tensor), key)) != key:
            _holder(module, key)[_last(key)] = _holder(module, source)[_last(source)]


def _holder(module: nn.Module, key: str) -> dict[str, Any]:
    """Return the parameters or the buffers of the module that a state dict's key names."""
    holder = module.get_submodule(key.rpartition(".")[0])
    parameters = _last(key) in holder._parameters
    return cast("dict[str, Any]", holder._parameters if parameters else holder._buffers)


def _last(key: str) -> str:
    return key.rpartition(".")[2]
