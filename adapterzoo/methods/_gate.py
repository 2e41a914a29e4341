"""The gate of UniPELT: how much of an adapter a sequence gets.

Paper: Mao et al. 2022, arXiv:2110.07577, §3.2: g = σ(W x + b), one number a sequence, the mean over
its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ._init import constant, drawn, normal


class Gate(nn.Module):
    """σ(W x + b), the mean over the tokens.

    Attributes:
        weight: `[1, d_in]`.
        bias: `[1]`.
        decided: what it decides goes through it, for those who listen.
    """

    def __init__(
        self,
        d_in: int,
        source: torch.Generator | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make the parameters: W normal with deviation 0.02, b zero.

        Args:
            d_in: width of what is read.
            source: of random numbers.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        self.weight = drawn((1, d_in), normal(0.02, source), device, dtype)
        self.bias = drawn((1,), constant(0.0), device, dtype)
        self.decided = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """How open it is. `x` `[batch, *tokens, d_in]` → `[batch, 1, …, 1]`, of x's dimensions."""
        decided: Tensor = self.decided(
            opened(linear(x.to(self.weight.dtype), self.weight, self.bias))
        )
        return decided

    def extra_repr(self) -> str:
        """The width."""
        return f"d_in={self.weight.shape[1]}"


def opened(score: Tensor) -> Tensor:
    """The mean of σ over the tokens. `score` `[batch, *tokens, 1]` → `[batch, 1, …, 1]`."""
    openness = torch.sigmoid(score)
    if score.dim() < 3:
        return openness  # [*batch, 1]
    return openness.mean(tuple(range(1, score.dim() - 1)), keepdim=True)  # [batch, 1, …, 1]
