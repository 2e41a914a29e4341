"""A sample of a base model's weights: whether an adapter was trained on this base.

A digest of the bits would differ for a cast copy of the same base. The file therefore has values
at fixed positions of a few tensors, in float32, and a model is compared with these:

- Vectors, which quantization leaves alone, must be equal up to one unit in the last place of the
  less precise of both. Fine-tuning moves them further.
- Matrices may have been quantized and unpacked again. For independent weights
  ‖a − b‖² = ‖a‖² + ‖b‖², for rounding to 3 bits a twentieth of that; the limit is a half.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# tensors of each kind, and values of each tensor
_TENSORS, _VALUES = 8, 4
_FORMAT = f"<{_VALUES}f"
# the limit, a share of ‖a‖² + ‖b‖²
_OTHER = 0.5
# the smallest float16, and half of it from rounding
_TINY = 1e-7
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sample(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return key → shape and values in hexadecimal digits; empty without tensors.

    Args:
        tensors: of the base model by key, unquantized and on this process.
    """
    keys = chosen({key: tensor.dim() for key, tensor in tensors.items()})
    values = _values([tensors[key] for key in keys])
    return {
        key: [list(tensors[key].shape), struct.pack(_FORMAT, *each).hex()]
        for key, each in zip(keys, values, strict=True)
    }


def chosen(dims: Mapping[str, int]) -> list[str]:
    """Return the keys of the tensors that a sample has; of these alone, all.

    Args:
        dims: key of a tensor → how many dimensions it has.
    """
    kinds: tuple[list[str], list[str]] = [], []
    for key in sorted(dims):
        kinds[dims[key] > 1].append(key)
    # spread over the model; a tensor is listed twice where there are few
    spread = (keys[i * len(keys) // _TENSORS] for keys in kinds if keys for i in range(_TENSORS))
    return [*dict.fromkeys(spread)]


def is_other(kept: object, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a sample was taken from weights other than these.

    Args:
        kept: a sample, as read from a file; nothing is compared if it is not one.
        tensors: of the base model by key, unquantized and on this process.
    """
    pairs = [
        (tensors[key], values)
        for key, shape, values in _read(kept)
        if key in tensors and list(tensors[key].shape) == shape
    ]
    own = _values([tensor for tensor, _ in pairs])
    both = [(t.dim() > 1, a, b) for (t, a), b in zip(pairs, own, strict=True)]
    vectors = [(a, b) for is_matrix, a, b in both if not is_matrix]
    unit = max(_unit(a for a, _ in vectors), _unit(b for _, b in vectors))
    for a, b in ((x, y) for u, v in vectors for x, y in zip(u, v, strict=True)):
        if abs(a - b) > unit * max(abs(a), abs(b)) + _TINY:
            return True
    matrices = [(a, b) for is_matrix, a, b in both if is_matrix]
    # each tensor counts the same, whatever its scale
    shares = [
        sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / total
        for a, b in matrices
        if (total := sum(x * x for x in (*a, *b))) > 0
    ]
    return bool(shares) and sum(shares) / len(shares) > _OTHER


def _read(kept: object) -> Iterator[tuple[str, list[int], tuple[float, ...]]]:
    """Yield key, shape and values of each tensor of a sample; what is damaged is left out."""
    for key, entry in kept.items() if isinstance(kept, Mapping) else ():
        # files of other authors may hold anything
        with contextlib.suppress(TypeError, ValueError, struct.error):
            shape, digits = entry
            yield key, list(shape), struct.unpack(_FORMAT, bytes.fromhex(digits))


def _values(tensors: list[Tensor]) -> list[tuple[float, ...]]:
    """Return the values of each tensor at fixed positions, with one transfer for each device."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        count = tensor.numel()
        for i in range(_VALUES):
            at, place = (2 * i + 1) * count // (2 * _VALUES), []
            for size in reversed(tensor.shape):
                at, here = divmod(at, size)
                place.append(here)
            value = tensor.detach()[tuple(reversed(place))].float()
            found.setdefault(tensor.device, []).append(value)
    moved = {device: iter(torch.stack(each).tolist()) for device, each in found.items()}
    return [tuple(itertools.islice(moved[t.device], _VALUES)) for t in tensors]


def _unit(values: Iterable[tuple[float, ...]]) -> float:
    """Return the relative distance of neighbors in the narrowest dtype that has all the values.

    A float32 copy of bfloat16 weights is as precise as those.
    """
    wide = torch.tensor([*itertools.chain(*values)], dtype=torch.float32)
    fitting = (d for d in _DTYPES if torch.equal(wide.to(d).float(), wide))
    return float(torch.finfo(next(fitting, torch.float32)).eps)
