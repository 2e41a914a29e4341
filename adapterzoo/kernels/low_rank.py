"""The low-rank update: y + s · (x Aᵀ) Bᵀ, without ever building B A.

Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def low_rank_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """The definition: `y + scaling · x aᵀ bᵀ`, in the dtype of `y`.

    Args:
        y: `[*batch, d_out]`, the output that gets the update.
        x: `[*batch, d_in]`, in the dtype of `a` and `b`.
        a: `[rank, d_in]`.
        b: `[d_out, rank]`.
        scaling: the factor s.
    """
    update = linear(linear(x, a), b)  # [*batch, d_out]
    return torch.add(y, update.to(y.dtype), alpha=scaling)
