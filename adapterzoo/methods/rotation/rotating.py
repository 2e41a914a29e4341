"""Rotations of features."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from adapterzoo.contracts import WeightAdapter, compute_dtype
from adapterzoo.kernels.butterfly import in_layout_of, rotated
from adapterzoo.kernels.grouped import Groups

from ._rows import restored, taken
from ._weight_cache import WeightCache


class Rotating(WeightAdapter):
    """Base of the adapters that rotate the layer's input by chunks.

    Attributes:
        kept_rotation: the rotations of evaluation.
        dropout: share of the blocks that training replaces by the identity.
    """

    dropout: float

    def __init__(self) -> None:
        """Start with nothing kept."""
        super().__init__()
        self.kept_rotation = WeightCache()

    @property
    @abstractmethod
    def rotation_parameter(self) -> Tensor:
        """The parameter that generates the rotation."""

    @abstractmethod
    def rotations_of(self, R: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
        """Return the rotations by chunks, folded into one factor where that is faster.

        Args:
            R: `[*experts, …]`, the parameter.
            dropout: share of the blocks that are replaced by the identity.
            dtype: of the features.

        Returns:
            `[*experts, 1 or m, chunks, width, width]`, in float32 or float64.
        """

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for adapters whose rotations have one shape, dtype and dropout."""
        R = self.rotation_parameter
        return R.dtype, R.shape, self.dropout

    def rotation(self, x: Tensor) -> Tensor:
        """Return the rotations by chunks, `[*experts, 1 or m, chunks, width, width]`.

        Args:
            x: the features, whose dtype the rotations fit.
        """
        R = self.rotation_parameter
        if self.training:
            return self.rotations_of(R, self.dropout, x.dtype)
        make = partial(self.rotations_of, R, 0.0, x.dtype)
        return self.kept_rotation.get(make, R, facts=compute_dtype(x.dtype))

    @classmethod
    def rotated_rows(cls, adapters: Sequence[Self], groups: Groups, x: Tensor) -> Tensor:
        """Return the rows `[rows, *tokens, d_in]`, each rotated by its adapter, if it has one."""
        # each row has its own rotation, as each expert has in other layers
        Q = taken([a.rotation(x) for a in adapters], groups)  # [rows, 1, chunks, width, width]
        return in_layout_of(restored(rotated(x, Q), x, groups), x, Q)
