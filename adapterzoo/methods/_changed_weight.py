"""Adapters that change the weight of a small linear layer instead of its input and output.

With few tokens each operation costs more than what it computes, so that one product with the
changed weight is faster. Evaluation keeps that weight.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, cast

from torch import Tensor
from torch.nn.functional import linear

from adapterzoo.contracts import BaseLayer, Linear, WeightAdapter

from ._weight_cache import WeightCache


class ChangedWeight(WeightAdapter):
    """Base of the adapters whose changed weight costs too much to be computed in each call.

    Attributes:
        sources: names of the parameters that the change depends on.
        scaling: the number that it depends on.
        dropout: probability of dropping something in training, which no weight can express.
        kept: what evaluation keeps: the changed weight of a small layer, or what the method
            computes from its parameters for other layers or many tokens.
    """

    sources: ClassVar[tuple[str, ...]]
    scaling: float = 1.0
    dropout: float
    kept: WeightCache

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Start with nothing kept; the arguments are for the other bases."""
        super().__init__(*args, **kwargs)
        self.kept = WeightCache()

    def sources_at(self, base: BaseLayer) -> tuple[Tensor, ...]:
        """Return all tensors that the change depends on, without the layer's own."""
        return tuple(getattr(self, name) for name in self.sources)

    def small(self, x: Tensor, base: BaseLayer) -> Linear | None:
        """Return the changed weight and the bias of a small layer; None for others, with dropout.

        Only for adapters that leave the bias as it is.

        Args:
            x: `[*batch, d_in]`.
            base: the layer.
        """
        found = None if self.training and self.dropout > 0 else base.small(x)
        if found is None:
            return None
        w, bias = found
        compute = partial(self.weight, w, base)
        return self.kept.get(compute, w, *self.sources_at(base), facts=self._facts()), bias

    def on_few_small(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the bits of `small` in fewer calls, if the changed weight is kept.

        In evaluation without gradients.

        Args:
            x: `[*batch, d_in]`.
            w: the weight of a small layer; see `BaseLayer.small`.
            bias: its bias.
        """
        try:
            # a parametrization or a replica has tensors in their place
            own = cast("list[Tensor]", [self._parameters[name] for name in self.sources])
        except KeyError:
            return None
        kept = cast("WeightCache", self._modules["kept"])
        changed = kept.found(self._facts(), w, *own)
        return None if changed is None else linear(x, changed, bias)

    def _facts(self) -> tuple[str, float]:
        return "weight", self.scaling
