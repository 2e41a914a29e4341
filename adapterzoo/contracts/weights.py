"""Adapters that equal a changed weight, so that they can be merged."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from .adapter import Adapter, BaseLayer


class WeightAdapter(Adapter):
    """An adapter that equals a changed weight, so that it can be merged into the layer.

    Attributes:
        is_additive: whether `weight` adds something that does not depend on the layer, so that
            it does not matter which of several such adapters are merged and which are active.
        keeps_weight: whether only the bias changes, so that the layer needs no weight matrix.
    """

    is_additive: bool = False
    keeps_weight: ClassVar[bool] = False

    @abstractmethod
    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight.

        Args:
            w: the weight so far, `[d_out, d_in]`, float32 or float64; with several adapters
                merged one after the other it includes the earlier ones.
            base: the layer; `base.weight` is its untouched weight.

        Returns:
            `[d_out, d_in]`.
        """

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor] | None:
        """Return A and B with `weight(w, base)` = w + B A, whatever w is; None: there are none.

        A conversion to LoRA takes them as they are, scaling included; without them it takes the
        SVD of the change.

        Args:
            w: gives the device and the dtype.
            base: the layer.

        Returns:
            A `[*experts, rank, d_in]` and B `[*experts, d_out, rank]`.
        """
        return None

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias, for adapters that change it.

        Args:
            b: the bias so far, `[d_out]`; zeros if the layer has none.
            base: the layer.

        Returns:
            `[d_out]`.
        """
        return b


class FactoredAdapter(WeightAdapter):
    """An adapter that can make any change of a weight whose rank is not above its own."""

    @abstractmethod
    def set_factors(self, a: Tensor, b: Tensor) -> None:
        """Make the change B A.

        Args:
            a: `[*experts, rank, d_in]`, at most the adapter's rank.
            b: `[*experts, d_out, rank]`.
        """


class CopyAdapter(WeightAdapter):
    """An adapter that runs a copy of its layer, with parameters of its own, in the layer's place.

    Attributes:
        layer: the copy. Building the adapter for a layer sets it; `init_from_layer` or a file gives
            it values.
    """

    stands_alone: ClassVar[bool] = True
    layer: nn.Module

    @abstractmethod
    def parameter(self, name: str, value: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged value of a parameter, of which a norm has no matrix.

        Args:
            name: of the parameter.
            value: so far, float32 or float64, as the layer stores it.
            base: the layer; `base.parameters` are its untouched ones.
        """


def replaced(value: Tensor, own: Tensor, plain: Tensor) -> Tensor:
    """Return `own` where nothing has changed `plain` yet; otherwise add its difference to `value`.

    Args:
        value: with the changes of earlier adapters.
        own: the adapter's value.
        plain: the layer's value.
    """
    return torch.where(value == plain, own, value + (own - plain))
