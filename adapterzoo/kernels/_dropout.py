"""Dropout that the backward pass can repeat: a bit for each feature, or a seed.

On the torch path the mask is drawn bit by bit and kept packed, a 32nd of a float32 input; in
Triton it is a function of the seed and of the position, and nothing is kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# a probability is a multiple of 2⁻¹⁶; the scale is that of the multiple, so that the mean is right
PLANES = 16


def threshold(p: float) -> int:
    """Return how many of 2¹⁶ equally likely numbers drop a feature; never all of them.

    Args:
        p: probability, 0 to below 1.
    """
    return min(round(p * (1 << PLANES)), (1 << PLANES) - 1)


def kept_scale(p: float) -> float:
    """Return what the kept features are multiplied by, 1 / (1 − p)."""
    return 1 / (1 - threshold(p) / (1 << PLANES))


def seed(x: Tensor) -> Tensor:
    """Return a seed from the generator of the device of `x`: int64 `[1]`, not read by the host."""
    return torch.randint(2**63 - 1, (1,), device=x.device)


def bits(x: Tensor, p: float) -> Tensor:
    """Return a mask for `x` from torch's generator of its device, eight features a byte; 1 keeps.

    All bits of a number are drawn at once: u < p is decided from the lowest bit of p upwards,
    where a bit of 1 in p means "or below here", one of 0 "and below there".

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
    # of all 2⁶⁴ numbers one is never drawn
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
    # the eight features of a byte are looked up as one number of eight bytes
    found = unpacked.view(torch.int64).flatten().index_select(0, packed.int())  # [bytes]
    return found.view(torch.uint8)[: math.prod(shape)].view(shape)
