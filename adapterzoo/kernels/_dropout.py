"""Dropout that the backward pass can repeat: one bit for each feature, or a seed.

The torch path draws the mask bit by bit and keeps it packed, in a 32nd of the size of a float32
input. In Triton the mask is a function of seed and position, so that only the seed is kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# probabilities are rounded to multiples of 2⁻¹⁶; the scale uses the multiple, to keep the mean
PLANES = 16


def threshold(p: float) -> int:
    """Return how many of 2¹⁶ equally likely numbers drop a feature; always fewer than all.

    Args:
        p: probability, 0 to below 1.
    """
    return min(round(p * (1 << PLANES)), (1 << PLANES) - 1)


def kept_scale(p: float) -> float:
    """Return the factor of the kept features, 1 / (1 − p)."""
    return 1 / (1 - threshold(p) / (1 << PLANES))


def seed(x: Tensor) -> Tensor:
    """Return a seed from the generator of `x`'s device, int64 `[1]`; the host does not read it."""
    return torch.randint(2**63 - 1, (1,), device=x.device)


def bits(x: Tensor, p: float) -> Tensor:
    """Return a mask for `x`, drawn on its device, with eight features in a byte; 1 keeps.

    One bit of each feature's random number u is drawn at a time, for all features at once. u < p is
    decided from the lowest bit of p upwards: a 1 in p is an "or" with the drawn bit, a 0 an "and".

    Args:
        x: `[*batch, d_in]`.
        p: probability that a feature is dropped.

    Returns:
        uint8, one dimension; its length is a multiple of 8.
    """
    level, planes = threshold(p), PLANES
    while level and level & 1 == 0:
        level, planes = level >> 1, planes - 1
    words = (x.numel() + 63) // 64
    if not level:
        return torch.full((8 * words,), 255, dtype=torch.uint8, device=x.device)
    # randint's upper bound excludes one of the 2⁶⁴ numbers
    drawn = torch.randint(-(2**63), 2**63 - 1, (planes, words), device=x.device)
    dropped = drawn[0]
    for i in range(1, planes):
        level >>= 1
        dropped = dropped.bitwise_or_(drawn[i]) if level & 1 else dropped.bitwise_and_(drawn[i])
    return dropped.bitwise_not().view(torch.uint8)  # [8 · words]


def mask(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the mask that `bits` drew for an `x` of this shape, in uint8 zeros and ones."""
    byte = torch.arange(256, device=packed.device).unsqueeze(1)  # [256, 1]
    bit = torch.arange(8, device=packed.device)
    unpacked = (byte >> bit & 1).to(torch.uint8)  # [256, 8]
    # look up the eight features of a byte as one number of eight bytes
    found = unpacked.view(torch.int64).flatten().index_select(0, packed.int())  # [bytes]
    return found.view(torch.uint8)[: math.prod(shape)].view(shape)  # [*batch, d_in]
