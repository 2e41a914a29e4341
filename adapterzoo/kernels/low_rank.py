"""The low-rank update: y + s · (x Aᵀ) Bᵀ, without computing B A.

Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3.

There are two operators: `shrink` computes t = x Aᵀ, and `expand` y + s · t Bᵀ; methods that need
x Aᵀ elsewhere call only the first. Saves x, t and, with dropout, one bit for each feature for the
backward. Products and t are in the dtype of the factors; a copy of x in that dtype lives no longer
than a call.

The backward pass can repeat the dropout. The torch form draws the mask bit by bit and keeps it
packed, in a 32nd of the size of a float32 input. In Triton the mask is a function of seed and
position, so only the seed is kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import dropout as plain_dropout
from torch.nn.functional import linear

from . import ops
from .ops import product

# probabilities are rounded to multiples of 2⁻¹⁶; the scale uses the multiple, to keep the mean
PLANES = 16
# mask of the low 32 bits of a number
_LOW = 0xFFFFFFFF


def low_rank_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return the definition: `y + scaling · x aᵀ bᵀ`, in the dtype of `y`.

    Args:
        y: `[*batch, d_out]`, the output that gets the update.
        x: `[*batch, d_in]`, in the dtype of `a` and `b`.
        a: `[rank, d_in]`.
        b: `[d_out, rank]`.
        scaling: the factor s.
    """
    update = linear(linear(x, a), b)  # [*batch, d_out]
    return torch.add(y, update.to(y.dtype), alpha=scaling)


def low_rank(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scaling: float,
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """Return `low_rank_reference` for `x` of any dtype, with dropout, with few saved tensors.

    Args:
        y: `[*batch, d_out]`, the output that gets the update.
        x: `[*batch, d_in]`, in any floating dtype.
        a: `[rank, d_in]`.
        b: `[d_out, rank]`.
        scaling: the factor s.
        dropout: probability, 0 to below 1, of dropping a feature of x on the way to A.
        training: whether to drop features.

    Returns:
        Shape and dtype of `y`.

    Raises:
        KernelError: the mode is `"triton"`, and Triton cannot take the operands.
    """
    drops = training and dropout > 0.0
    # autograd keeps as little as the operators, and costs less
    if not drops and y.dtype is x.dtype is a.dtype is b.dtype and ops.is_plain(y):
        return low_rank_reference(y, x, a, b, scaling)
    return expand(y, shrink(x, a, dropout, training), b, scaling)


def shrink(x: Tensor, a: Tensor, dropout: float = 0.0, training: bool = False) -> Tensor:
    """Project down: t = dropout(x) Aᵀ, accumulated in float32 or float64.

    Args:
        x: `[*batch, d_in]`, in any floating dtype.
        a: `[rank, d_in]`.
        dropout: probability, 0 to below 1, of dropping a feature of x.
        training: whether to drop features.

    Returns:
        `[*batch, rank]`, in the dtype of `a`; under autocast in its dtype.
    """
    drops = training and dropout > 0.0
    # autograd keeps as little, and costs less than the operator
    if not drops and x.dtype is a.dtype and ops.is_plain(x):
        return linear(x, a)
    if ops.is_reference():
        return linear(plain_dropout(x.to(a.dtype), dropout, training), a)
    noise = None
    if drops:
        in_triton = ops.takes_triton("shrink", x, a)
        noise = dropout_seed(x) if in_triton else dropout_bits(x, dropout)
    return _shrink(x, a, dropout, noise)


def expand(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Add the update: y + scaling · t Bᵀ.

    Args:
        y: `[*batch, d_out]`, the output that gets the update.
        t: `[*batch, rank]`, from `shrink`.
        b: `[d_out, rank]`.
        scaling: the factor s.

    Returns:
        Shape and dtype of `y`.
    """
    if ops.is_reference() or (y.dtype is t.dtype is b.dtype and ops.is_plain(y)):
        update = linear(t, b.to(t.dtype))  # [*batch, d_out]
        return torch.add(y, update.to(y.dtype), alpha=scaling)
    return _expand(y, t, b, scaling)


def dropout_threshold(p: float) -> int:
    """Return how many of 2¹⁶ equally likely numbers drop a feature; never all of them.

    Args:
        p: probability, 0 to below 1.
    """
    return min(round(p * (1 << PLANES)), (1 << PLANES) - 1)


def dropout_scale(p: float) -> float:
    """Return the factor of the kept features, 1 / (1 − p)."""
    return 1 / (1 - dropout_threshold(p) / (1 << PLANES))


def dropout_seed(x: Tensor) -> Tensor:
    """Return a seed from the generator of `x`'s device, int64 `[1]`; the host does not read it."""
    return torch.randint(2**63 - 1, (1,), device=x.device)


def dropout_bits(x: Tensor, p: float) -> Tensor:
    """Return a mask for `x`, drawn on its device, with eight features in a byte; 1 keeps.

    One bit of each feature's random number u is drawn at a time, for all features at once. u < p is
    decided from the lowest bit of p upwards: a 1 in p is an "or" with the drawn bit, a 0 an "and".

    Args:
        x: `[*batch, d_in]`.
        p: probability that a feature is dropped.

    Returns:
        uint8, one dimension; its length is a multiple of 8. Bit k of byte i is the feature at
        k · length + i in the flattened `x`, so all features unpack in a few vector operations.
    """
    level, planes = dropout_threshold(p), PLANES
    while level and level & 1 == 0:
        level, planes = level >> 1, planes - 1
    words = (x.numel() + 63) // 64
    if not level:
        return torch.full((8 * words,), 255, dtype=torch.uint8, device=x.device)
    # random int64 numbers, all equally likely
    shape, least = (planes, words), -(2**63)
    if torch.compiler.is_compiling():
        # except for one of 2⁶⁴, which the upper bound excludes; including it takes longer
        drawn = torch.randint(least, 2**63 - 1, shape, device=x.device) ^ least
    else:
        drawn = torch.empty(shape, dtype=torch.int64, device=x.device).random_(least, None)
    dropped, *rest = drawn.unbind()
    for bit in rest:
        level >>= 1
        dropped = dropped.bitwise_or_(bit) if level & 1 else dropped.bitwise_and_(bit)
    # new memory, not a view of all that was drawn
    return dropped.bitwise_not().view(torch.uint8)  # [8 · words]


def dropout_mask(noise: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """Return the mask of an `x` of this shape, in uint8 zeros and ones.

    Args:
        noise: from `dropout_bits` or `dropout_seed`. A seed is for Triton; only the gradient of a
            gradient needs its mask here.
        shape: `[*batch, d_in]`.
        p: probability that a feature is dropped.
    """
    if noise.dtype is torch.int64:
        return _mask_of_seed(noise, shape, p)
    place = torch.arange(8, dtype=torch.uint8, device=noise.device).unsqueeze(1)  # [8, 1]
    unpacked = (noise >> place).bitwise_and_(1)  # [8, bytes]
    return unpacked.view(-1)[: math.prod(shape)].view(shape)  # [*batch, d_in]


def _mask_of_seed(seed: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    """Return the mask that the Triton kernels compute from a seed; see `tiles_triton.keep`."""
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
    kept = (halves.flatten(1) >= dropout_threshold(p))[:, :width]  # [rows, d_in]
    return kept.to(torch.uint8).view(shape)


def shrink_torch(x: Tensor, a: Tensor, p: float, noise: Tensor | None) -> Tensor:
    """Project down: t = dropout(x) aᵀ; `noise` from `dropout_bits`.

    `x` `[*batch, d_in]`, `a` `[rank, d_in]` → `[*batch, rank]` in the dtype of `a`.
    """
    if noise is None:
        return linear(x.to(a.dtype), a)
    kept = dropout_mask(noise, x.shape, p).to(a.dtype).mul_(x)  # [*batch, d_in]
    return linear(kept, a).mul_(dropout_scale(p))


def shrink_torch_backward(
    dt: Tensor,
    x: Tensor,
    a: Tensor,
    p: float,
    noise: Tensor | None,
    needs_x: bool = True,
    needs_a: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in its dtype, and of a; empty if not needed.

    Differentiable again. Without `needs_a`, `x` may be empty: only its dtype is read.
    """
    dx, da, mask = x.new_empty(0), a.new_empty(0), None
    if noise is not None:
        dt = dt * dropout_scale(p)  # [*batch, rank]
        mask = dropout_mask(noise, (*dt.shape[:-1], a.shape[-1]), p).to(a.dtype)
    if needs_x:
        dx = dt @ a  # [*batch, d_in]
        dx = (dx if mask is None else dx * mask).to(x.dtype)
    if needs_a:
        kept = x if mask is None else mask * x
        da = rows_of(dt).T @ rows_of(kept.to(a.dtype))  # [rank, d_in]
    return dx, da


def expand_torch(y: Tensor, t: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Add the update: y + scaling · t bᵀ.

    `y` `[*batch, d_out]`, `t` `[*batch, rank]`, `b` `[d_out, rank]` → shape and dtype of `y`.
    """
    # do not round y to the dtype of the products: float16 and bfloat16 each lose the other's bits
    dtype = torch.promote_types(y.dtype, t.dtype)
    update = linear(t.to(dtype), b.to(dtype))  # [*batch, d_out]
    return torch.add(y, update, alpha=scaling).to(y.dtype)


def expand_torch_backward(
    dy: Tensor, t: Tensor, b: Tensor, scaling: float, needs_t: bool = True, needs_b: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the gradients of t and b; empty if not needed.

    Differentiable again. Without `needs_b`, `t` may be empty: only its dtype is read.
    """
    dy = dy.to(t.dtype)
    dt, db = t.new_empty(0), b.new_empty(0)
    if needs_t:
        dt = dy @ (scaling * b.to(t.dtype))  # [*batch, rank]
    if needs_b:
        db = (rows_of(dy).T @ rows_of(t) * scaling).to(b.dtype)  # [d_out, rank]
    return dt, db


def rows_of(x: Tensor) -> Tensor:
    """Return `x` `[*batch, width]` as `[rows, width]`."""
    return x.reshape(-1, x.shape[-1])


_shrink, _shrink_backward = product(
    "low_rank_shrink(Tensor x, Tensor a, float p, Tensor? noise) -> Tensor",
    "low_rank_triton.shrink",
    (shrink_torch, shrink_torch_backward),
    lambda x, a, p, noise: x.new_empty((*x.shape[:-1], a.shape[0]), dtype=a.dtype),
    noise=3,
    narrows=(1,),
)


_expand, _expand_backward = product(
    "low_rank_expand(Tensor y, Tensor t, Tensor b, float scaling) -> Tensor",
    "low_rank_triton.expand",
    (expand_torch, expand_torch_backward),
    lambda y, t, b, scaling: y.new_empty(y.shape),
    added=True,
    narrows=(1, 2),
)
