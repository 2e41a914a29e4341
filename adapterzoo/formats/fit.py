"""Compare a checkpoint's tensors with the modules to fill, and fill them.

Digests are equal for equal bits, on any device and in any memory layout.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from adapterzoo.errors import CheckpointError, counted, in_python, listing
from adapterzoo.folders import reading


def digest(tensor: Tensor) -> str:
    """Return a digest of dtype, shape and exact bits; device and strides do not matter.

    Returns:
        32 hexadecimal digits.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    return reading.digest(dtype, tensor.shape, _bytes(tensor).numpy().data)


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether dtype, shape and bits are equal."""
    alike = tensor.dtype is other.dtype and tensor.shape == other.shape
    return alike and torch.equal(_bytes(tensor), _bytes(other))


def same_values(theirs: Tensor, mine: Tensor) -> bool:
    """Return whether a file's tensor has the values of a model's tensor, in the model's dtype."""
    own = mine.detach().cpu()
    return theirs.shape == own.shape and bool((theirs.to(own.dtype) == own).all())


def _bytes(tensor: Tensor) -> Tensor:
    # −0 and NaN have bits too, so compare bytes, not numbers
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor."""
    return {key: digest(tensor) for key, tensor in sorted(tensors.items())}


def fingerprint(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return one digest for a config of JSON types and all tensors; 64 hexadecimal digits."""
    return reading.fingerprint_of(config, digests(tensors))


_SHOWN = 10


def differences(
    file: Mapping[str, Tensor], skeleton: Mapping[str, Tensor], dtype: torch.dtype | None
) -> list[str]:
    """Return how the tensors of a file differ from those of a model in names, shapes and dtypes.

    Args:
        file: the tensors that were read.
        skeleton: the new parameters to fill.
        dtype: the dtype to which the file will be converted; None: dtypes must be the same.
    """
    lines = [f"{key}   in the file only" for key in sorted(set(file) - set(skeleton))]
    lines += [f"{key}   in the model only" for key in sorted(set(skeleton) - set(file))]
    wrong = Counter[tuple[torch.dtype, torch.dtype]]()
    for key in sorted(set(file) & set(skeleton)):
        theirs, ours = file[key], skeleton[key]
        if theirs.shape != ours.shape:
            lines.append(f"{key}   file {list(theirs.shape)}   model {list(ours.shape)}")
        elif theirs.dtype != ours.dtype and dtype is None:
            wrong[theirs.dtype, ours.dtype] += 1
    for (theirs_dtype, ours_dtype), count in wrong.items():
        lines.append(
            f"dtype of {count} tensors   file {theirs_dtype}   model {ours_dtype}"
            f"{in_python(f'   (pass dtype={ours_dtype} to convert)')}"
        )
    return lines


def check_same(what: str, saved: object, mine: object) -> None:
    """Check that an entry of a training checkpoint has the same config as in the model.

    Args:
        what: the entry, for the message, such as `adapter 'a'`.
        saved: its config in the checkpoint.
        mine: its config in the model.

    Raises:
        CheckpointError: the configs differ.
    """
    if saved != mine:
        raise CheckpointError(f"the checkpoint's {what} is {saved!r}, the model's {mine!r}.")


def check_fit(
    model: str,
    file: Mapping[str, Tensor],
    skeleton: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> None:
    """Raise one error with every difference between a file and the model to fill.

    Raises:
        CheckpointError: the file and the model differ.
    """
    lines = differences(file, skeleton, dtype)
    if lines:
        rest = len(lines) - _SHOWN
        shown = lines[:_SHOWN] + ([f"and {rest} more"] if rest > 0 else [])
        raise CheckpointError(
            f"{counted(len(lines), 'difference')} from this {model}; nothing "
            f"has been loaded:\n  " + "\n  ".join(shown)
        )


def converted(file: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of layer copies, such as heads, in the dtypes of this model's layers.

    Args:
        file: the tensors that were read.
        like: the model's tensors by the same keys; tensors with other keys do not change.
    """
    return {k: t.to(like[k].dtype) if k in like else t for k, t in file.items()}


def by_path(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return tensors with keys `path/parameter` as path of a module → parameter → tensor."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        path, _, parameter = key.partition("/")
        found.setdefault(path, {})[parameter] = tensor
    return found


def fill(module: nn.Module, tensors: Mapping[str, Tensor], at: torch.device | None = None) -> None:
    """Fill a module with the values of a file that fits it, in the module's dtypes.

    Args:
        module: the module, filled in place; on the meta device its tensors are replaced.
        tensors: tensors by keys of the module's state dict; other parameters do not change.
        at: the device of the replacements; None or the meta device: the tensors of the file are
            used themselves.

    Raises:
        CheckpointError: the copies on a device have other bits than the file.
    """
    own = module.state_dict(keep_vars=True)
    values = {key: tensor.to(own[key].dtype) for key, tensor in tensors.items()}
    if any(own[key].is_meta for key in values):
        copies = at is not None and at.type != "meta"
        # pickles may hold other strides, which change the last bits of a product
        moved = {k: t.contiguous().to(at, copy=True) if copies else t for k, t in values.items()}
        # one object for all names of a tensor, so that they also share the new one
        new = {id(own[key]): _like(own[key], value) for key, value in moved.items()}
        for part in module.modules():
            for held in cast("list[dict[str, Any]]", [part._parameters, part._buffers]):
                held.update({name: new[id(t)] for name, t in held.items() if id(t) in new})
        own = module.state_dict(keep_vars=True)
    else:
        with torch.no_grad():
            for key, value in values.items():
                own[key].copy_(value)
    # copies in CPU memory need no check
    far = (key for key in values if own[key].device.type != "cpu")
    if wrong := [key for key in far if not same_bits(own[key], values[key])]:
        raise CheckpointError(
            f"{listing(wrong)} differ from the file after copying to {own[wrong[0]].device}. Load "
            f"again; if that does not help, check the memory of the device."
        )


def _like(own: Tensor, value: Tensor) -> Tensor:
    """Return a value as a parameter if it replaces one."""
    return nn.Parameter(value, own.requires_grad) if isinstance(own, nn.Parameter) else value


# --- A sample of a base model's weights shows whether an adapter was trained on this base ---
#
# A digest of the bits would differ for a cast copy of the same base. So the file has the values at
# fixed positions of a few tensors, in float32, to compare those of a model with:
#
# - Vectors, which quantization does not change, must be equal up to one unit in the last place of
#   the less precise of the two. Fine-tuning moves them further than that.
# - Matrices may have been quantized and unpacked again. For independent weights
#   ‖a − b‖² = ‖a‖² + ‖b‖²; rounding to 3 bits gives a twentieth of that; the limit is a half.

# number of tensors of each kind, and of values of each tensor
_TENSORS, _VALUES = 8, 4
_FORMAT = f"<{_VALUES}f"
# the limit, as a share of ‖a‖² + ‖b‖²
_OTHER = 0.5
# the smallest float16, and half of it from rounding
_TINY = 1e-7
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_Pair: TypeAlias = "tuple[tuple[float, ...], tuple[float, ...]]"


def base_sample(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a sample: key → shape, and values in hexadecimal digits.

    Args:
        tensors: tensors of the base model by key, unquantized and on this process.
    """
    keys = sampled_keys({key: tensor.dim() for key, tensor in tensors.items()})
    return {
        key: [list(tensors[key].shape), struct.pack(_FORMAT, *_values(tensors[key])).hex()]
        for key in keys
    }


def sampled_keys(dims: Mapping[str, int]) -> list[str]:
    """Return the keys of the tensors to sample; if only these are given, it returns all of them.

    Args:
        dims: key of a tensor → its number of dimensions.
    """
    kinds: tuple[list[str], list[str]] = [], []
    for key in sorted(dims):
        kinds[dims[key] > 1].append(key)
    # spread over the model; if there are only a few tensors, some are listed twice
    spread = (keys[i * len(keys) // _TENSORS] for keys in kinds if keys for i in range(_TENSORS))
    return [*dict.fromkeys(spread)]


def is_other_base(kept: object, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a sample was taken from weights other than these.

    Args:
        kept: a sample, as read from a file; damaged parts are ignored.
        tensors: tensors of the base model by key, unquantized and on this process.
    """
    kinds: tuple[list[_Pair], list[_Pair]] = [], []
    for key, entry in kept.items() if isinstance(kept, Mapping) else ():
        # files of other authors may hold anything
        with contextlib.suppress(TypeError, ValueError, struct.error):
            shape, digits = entry
            values = struct.unpack(_FORMAT, bytes.fromhex(digits))
            if key in tensors and list(tensors[key].shape) == list(shape):
                kinds[len(shape) > 1].append((values, _values(tensors[key])))
    vectors, matrices = kinds
    unit = max(_unit(a for a, _ in vectors), _unit(b for _, b in vectors))
    numbers = (pair for a, b in vectors for pair in zip(a, b, strict=True))
    if any(abs(x - y) > unit * max(abs(x), abs(y)) + _TINY for x, y in numbers):
        return True
    # each tensor counts the same, regardless of its scale
    shares = [
        sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / total
        for a, b in matrices
        if (total := sum(x * x for x in (*a, *b))) > 0
    ]
    return bool(shares) and sum(shares) / len(shares) > _OTHER


def _values(tensor: Tensor) -> tuple[float, ...]:
    """Return the values of a tensor at fixed positions."""
    at = [(2 * i + 1) * tensor.numel() // (2 * _VALUES) for i in range(_VALUES)]
    return tuple(tensor.detach().flatten()[at].float().tolist())


def _unit(values: Iterable[tuple[float, ...]]) -> float:
    """Return the machine epsilon of the narrowest dtype that holds all the values.

    A float32 copy of bfloat16 weights is only as precise as these.
    """
    wide = torch.tensor([*itertools.chain(*values)], dtype=torch.float32)
    fitting = (d for d in _DTYPES if torch.equal(wide.to(d).float(), wide))
    return float(torch.finfo(next(fitting, torch.float32)).eps)
