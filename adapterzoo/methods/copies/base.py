"""Values of an adapter's own in place of those of its layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from adapterzoo.averaging import Combination
from adapterzoo.contracts import BaseLayer, WeightAdapter


class Copy(WeightAdapter):
    """y = f_θ'(x), with the function f of the layer and parameters θ', initially the layer's θ.

    After other adapters in a stack it adds its change: y + f_θ'(x) − f_θ(x).

    Attributes:
        noun: what it is a copy of, for messages.
    """

    noun: ClassVar[str]

    @abstractmethod
    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return θ, the values of the layer, by the names of the adapter's parameters."""

    def init_from_layer(self, base: BaseLayer) -> None:
        """Take the values of the layer."""
        with torch.no_grad():
            for name, value in self.identity_values(base).items():
                self.get_parameter(name).copy_(value)

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Combine the values linearly.

        Raises:
            CompositionError: the strategy leaves out entries.
        """
        if strategy.prunes:
            raise strategy.refusal(f"{self.noun} is not a sum of such")
        names = [name for name, _ in self.named_parameters()]
        self.combine_linearly(names, adapters, weights, strategy, base)


def looked_up(
    ids: Tensor, rows: Tensor, padding: int | None, base: BaseLayer, dtype: torch.dtype
) -> Tensor:
    """Return rows times the scale of the embedding, `[*batch, d]`.

    Args:
        ids: numbers of rows, `[*batch]`.
        rows: `[rows, d]`.
        padding: the row that gets no gradient; None for none.
        base: the embedding.
        dtype: of the result.
    """
    own = embedding(ids, rows, padding)
    scale = base.scale
    if isinstance(scale, Tensor):
        # cast like the families that have such a scale
        own = own * scale.to(own.dtype)
    elif scale != 1.0:
        own = own * scale
    return own.to(dtype)
