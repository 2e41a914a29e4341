"""The contract of a head: a function of hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Head(nn.Module, ABC):
    """Base of all heads: hidden states to logits, and logits with labels to a loss."""

    @abstractmethod
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """Return the logits of the task.

        Args:
            hidden: `[batch, tokens, d_model]`, or `[batch, d_model]` if the model has pooled.
            mask: `[batch, tokens]`, true or 1 at real tokens; None when all are.
        """

    @abstractmethod
    def loss(self, logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """Return the training loss, a scalar; labels of −100 do not count."""
