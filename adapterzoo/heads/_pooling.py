"""Pooling: reduce the hidden states of a sequence to one vector."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from adapterzoo.contracts import compute_dtype

Pooling = Literal["auto", "cls", "mean", "last", "eos", "pooler"]
"""The tokens that represent a sequence.

`cls`: the first; `mean`: the average of the real ones; `last`: the last real one, for padding on
either side; `eos`: the last end-of-sequence token; `pooler`: the model's own pooled output; `auto`:
as in the model's family.
"""

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


def pool(hidden: Tensor, mask: Tensor | None, pooling: Pooling) -> Tensor:
    """Return one vector for each sequence.

    Args:
        hidden: `[batch, tokens, d_model]`; `[batch, d_model]` is returned as it is.
        mask: `[batch, tokens]`, true or 1 at the tokens that count: the real ones, for `eos` the
            end-of-sequence tokens. None when all count.
        pooling: resolved, never "auto".

    Returns:
        `[batch, d_model]`. A sequence without any token that counts gives zeros for `mean` and its
        first token for `last` and `eos`.
    """
    if hidden.dim() == 2:
        return hidden
    if pooling == "mean":
        return _mean(hidden, mask)
    if pooling in ("last", "eos"):
        return _last(hidden, mask)
    return hidden[:, 0]


def _mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    # float32: half-precision sums over hundreds of tokens lose digits or overflow
    wide = hidden.to(compute_dtype(hidden.dtype))
    if mask is None:
        return wide.mean(dim=1).to(hidden.dtype)
    kept = mask.to(hidden.device, torch.bool).unsqueeze(-1)  # [batch, tokens, 1]
    # where, not a product: padding may hold inf or nan
    total = torch.where(kept, wide, 0.0).sum(dim=1)
    return (total / kept.sum(dim=1).clamp(min=1)).to(hidden.dtype)


def _last(hidden: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return hidden[:, -1]
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    last = (positions * mask.to(hidden.device, torch.bool)).argmax(dim=1)  # [batch]
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
