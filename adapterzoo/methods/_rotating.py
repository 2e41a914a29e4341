"""Rotations of features, which adapters that read one input compute together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from adapterzoo.contracts import SharedInputAdapter, WeightAdapter, compute_dtype
from adapterzoo.kernels.butterfly import in_layout_of, rotated
from adapterzoo.kernels.exact import exactly
from adapterzoo.kernels.grouped import Groups

from ._rows import restored, taken
from ._weight_cache import WeightCache


class Rotating(SharedInputAdapter, WeightAdapter):
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
            R: `[*lead, …]`, parameters of adapters with equal `shared_input_key`.
            dropout: share of the blocks that are replaced by the identity.
            dtype: of the features.

        Returns:
            `[*lead, 1 or m, chunks, width, width]`, in float32 or float64.
        """

    @property
    def shared_input_key(self) -> tuple[object, ...]:
        """Equal for adapters whose rotations are made together: parameters of one shape."""
        R = self.rotation_parameter
        return type(R), R.device, R.dtype, R.shape, self.dropout, self.training

    @classmethod
    def from_input(cls, adapters: Sequence[Self], x: Tensor) -> Sequence[Tensor]:
        """Return the rotations of each, which are made together in training."""
        one = adapters[0]
        if one.training:
            # autocast refuses to stack some dtypes
            with exactly(x.device):
                R = torch.stack([a.rotation_parameter for a in adapters])  # [adapters, …]
            return one.rotations_of(R, one.dropout, x.dtype).unbind()
        return [
            a.kept_rotation.get(
                partial(a.rotations_of, a.rotation_parameter, 0.0, x.dtype),
                a.rotation_parameter,
                facts=compute_dtype(x.dtype),
            )
            for a in adapters
        ]

    @classmethod
    def rotated_rows(cls, adapters: Sequence[Self], groups: Groups, x: Tensor) -> Tensor:
        """Return the rows `[rows, *tokens, d_in]`, each rotated by its adapter, if it has one."""
        # each row has its own rotation, as each expert has in other layers
        Q = taken(cls.from_input(adapters, x), groups)  # [rows, 1, chunks, width, width]
        return in_layout_of(restored(rotated(x, Q), x, groups), x, Q)
