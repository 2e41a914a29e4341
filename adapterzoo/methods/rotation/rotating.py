"""Rotations of blocks of features, shared by OFT and BOFT."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache, partial

import torch
from torch import Tensor

from adapterzoo.caches import cached
from adapterzoo.contracts import BaseLayer, WeightAdapter, compute_dtype
from adapterzoo.errors import CompositionError
from adapterzoo.kernels.butterfly import in_layout_of, rotated
from adapterzoo.kernels.grouped import RowGroups


class Rotating(WeightAdapter):
    """Base of the adapters that rotate the layer's input by chunks.

    Attributes:
        dropout: share of the blocks that training replaces with the identity.
    """

    adapts_convolutions = True
    dropout: float

    @abstractmethod
    def folded(self, dropout: float, dtype: torch.dtype) -> Tensor:
        """Return the rotations by chunks, folded into one factor if that is faster.

        Args:
            dropout: share of the blocks that are replaced with the identity.
            dtype: dtype of the features.

        Returns:
            `[*experts, 1 or m, chunks, width, width]`, in float32 or float64.
        """

    @abstractmethod
    def turned(self, w: Tensor, base: BaseLayer, dropout: float) -> Tensor:
        """Return the rotated weight, see `merged_weight`; with `dropout` as in `folded`."""

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight, `[*experts, d_out, d_in]`."""
        return self.turned(w, base, 0.0)

    def trained_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the weight with the identity for the blocks that training drops in this call."""
        return self.turned(w, base, self.dropout if self.training else 0.0)

    def convolved(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the rotated convolution.

        Raises:
            CompositionError: the output of an earlier adapter cannot be rotated.
        """
        if not base.is_original:
            kind = type(self).__name__
            raise CompositionError(
                f"{kind} at a convolution rotates its weight, without the earlier adapters in a "
                f"Stack. Write the {kind} adapter first."
            )
        return super().convolved(x, base)

    def rotation(self, dtype: torch.dtype) -> Tensor:
        """Return the rotations by chunks, see `folded`.

        Args:
            dtype: dtype of the features.
        """
        dtype = compute_dtype(dtype)
        make = partial(self.folded, self.dropout if self.training else 0.0, dtype)
        return cached(self, make, partial(list, self.parameters()), dtype)


def turned_rows(stack: Tensor, groups: RowGroups, x: Tensor) -> Tensor:
    """Return the features of each row, rotated as its adapter does.

    Args:
        stack: `rotation` of each adapter, `[n, 1 or m, chunks, width, width]`.
        groups: the adapter of each row.
        x: `[rows, *tokens, d]`.
    """
    Q, own = groups.taken(stack), groups.acting(x)
    return groups.placed(in_layout_of(rotated(own, Q), own, Q), x)


@cache
def block_sizes(d_in: int, factors: int) -> tuple[int, ...]:
    """Return the valid sizes b, ascending: above 1, even for m > 1, b · 2^(m−1) divides d_in."""
    step = 1 if factors == 1 else 2
    return tuple(b for b in range(2, d_in + 1, step) if d_in % (b << (factors - 1)) == 0)


def dropped(Q: Tensor, p: float) -> Tensor:
    """Draw int(p · blocks) blocks of one factor. Q `[*adapters, m, blocks, b, b]` → bool."""
    m, blocks = Q.shape[-4:-2]
    lead = Q.shape[:-4]
    chosen = torch.rand((*lead, 1, blocks), device=Q.device).argsort(-1) < int(p * blocks)
    drawn = torch.randint(m, (*lead, 1, 1), device=Q.device)
    factor = torch.arange(m, device=Q.device).unsqueeze(-1) == drawn  # [*adapters, m, 1]
    return factor & chosen  # [*adapters, m, blocks]
