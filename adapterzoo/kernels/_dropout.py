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
# the low 32 bits of a number
_LOW = 0xFFFFFFFF


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
        uint8, one dimension; its length is a multiple of 8. Bit k of byte i is the feature at
        k · length + i in the flattened `x`, so that all features unpack in a few vector operations.
    """
    level, planes = threshold(p), PLANES
    while level and level & 1 == 0:
        level, planes = level >> 1, planes - 1
    words = (x.numel() + 63) // 64
    if not level:
        return torch.full((8 * words,), 255, dtype=torch.uint8, device=x.device)
    dropped, *rest = _drawn((planes, words), x.device).unbind()
    for drawn in rest:
        level >>= 1
        dropped = dropped.bitwise_or_(drawn) if level & 1 else dropped.bitwise_and_(drawn)
    # new memory, not a part of all that was drawn
    return dropped.bitwise_not().view(torch.uint8)  # [8 · words]


def _drawn(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return random int64 numbers, all equally likely."""
    if torch.compiler.is_compiling():
        # the same numbers, but for one of 2⁶⁴, which the upper bound excludes; takes longer
        return torch.randint(-(2**63), 2**63 - 1, shape, device=device) ^ -(2**63)
    return torch.empty(shape, dtype=torch.int64, device=device).random_(-(2**63), None)


def mask(noise: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """Return the mask of an `x` of this shape, in uint8 zeros and ones.

    Args:
        noise: what `bits` or `seed` returned. A seed is for Triton; only the gradient of a gradient
            needs its mask here.
        shape: `[*batch, d_in]`.
        p: probability that a feature is dropped.
    """
    if noise.dtype is torch.int64:
        return _mask_of_seed(noise, shape, p)
    place = torch.arange(8, dtype=torch.uint8, device=noise.device).unsqueeze(1)  # [8, 1]
    unpacked = (noise >> place).bitwise_and_(1)  # [8, bytes]
    return unpacked.view(-1)[: math.prod(shape)].view(shape)  # [*batch, d_in]


def _mask_of_seed(seed: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """Return the mask that the Triton kernels compute from a seed; see `_tiles_triton.keep`."""
    width = shape[-1]
    groups = -(-width // 8)
    column = torch.arange(groups, device=seed.device)
    row = torch.arange(math.prod(shape[:-1]), device=seed.device).unsqueeze(1)  # [rows, 1]
    zero = torch.zeros_like(row * column)  # [rows, groups]
    a, b, c, d = row + zero, column + zero, zero, zero
    left, right = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(7):
        # a product may wrap into the sign; only its bits are used
        first, third = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b = ((third >> 32) & _LOW) ^ b ^ left, third & _LOW
        c, d = ((first >> 32) & _LOW) ^ d ^ right, first & _LOW
        left, right = (left + 0x9E3779B9) & _LOW, (right + 0xBB67AE85) & _LOW
    words = torch.stack((a, c, b, d), -1)  # [rows, groups, 4]
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)  # [rows, groups, 4, 2]
    kept = (halves.flatten(1) >= threshold(p))[:, :width]  # [rows, d_in]
    return kept.to(torch.uint8).view(shape)
