"""One edit of ReFT; see `reft` for the formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from adapterzoo.activations import activation
from adapterzoo.contracts import compute_dtype

from ._init import generator, kaiming, uniform
from ._products import Affine

_New: TypeAlias = Callable[[tuple[int, ...], Callable[[Tensor], Tensor]], nn.Parameter]


class UnitConfig(Protocol):
    """The fields of `ReftConfig` that a unit reads."""

    @property
    def r(self) -> int: ...
    @property
    def orthogonality(self) -> bool: ...
    @property
    def subtract_projection(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    @property
    def non_linearity(self) -> str | None: ...
    @property
    def init_weights_seed(self) -> int | None: ...


class ReftUnit(nn.Module):
    """One intervention: drop(h + (φ(A h + a) − R h) R), with A and a in `source`."""

    def __init__(self, config: UnitConfig, d: int, name: str, new: _New) -> None:
        """Initialize A and a like torch's linear layers; R with orthonormal rows if required."""
        super().__init__()
        draw, shape = generator(config.init_weights_seed, name), (config.r, d)
        self.source = Affine(new(shape, kaiming(draw)), new(shape[:1], uniform(d**-0.5, draw)))
        orthogonal = partial(nn.init.orthogonal_, generator=draw)
        self.projection = new(shape, orthogonal if config.orthogonality else kaiming(draw))
        self.config = config
        self.activation = activation(config.non_linearity)

    def forward(self, h: Tensor) -> Tensor:
        """Return the edited states. `h` `[rows, positions, d_model]`, same shape and dtype."""
        dtype, h = h.dtype, h.to(self.projection.dtype)
        R = self.rows()  # [r, d_model]
        change = self.activation(self.source(h))  # [rows, positions, r]
        if self.config.subtract_projection:
            change = change - linear(h, R)  # [rows, positions, r]
        return dropout(h + change @ R, self.config.dropout, self.training).to(dtype)

    def rows(self) -> Tensor:
        """Return R `[r, d_model]`, with orthonormal rows if the config requires them."""
        if not self.config.orthogonality:
            return self.projection
        R = self.projection.to(compute_dtype(self.projection.dtype))
        # R Rᵀ = L Lᵀ, so that the rows of L⁻¹ R are orthonormal; L = I if those of R already are
        L = torch.linalg.cholesky(R @ R.T)  # [r, r]
        rows: Tensor = torch.linalg.solve_triangular(L, R, upper=False)  # [r, d_model]
        return rows.to(self.projection.dtype)

    def widened(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors of a unit with more rows of R that gives the same.

        Rows at the end of R do not change the orthonormal ones before them. The new ones are
        orthonormal too, and those of A are the same, with a = 0: without φ, A h + a − R h is zero.

        Args:
            rank: with a smaller one the tensors are as they are.
        """
        tensors, r = dict(self.state_dict()), len(self.projection)
        if not self.config.orthogonality or rank <= r:
            return tensors
        wide = self.projection.detach().to(compute_dtype(self.projection.dtype))
        q = torch.linalg.qr(wide.T, mode="complete").Q  # [d_model, d_model]
        more = q[:, r:rank].T.to(self.projection.dtype)  # [rank − r, d_model]
        for key in ("projection", "source.weight"):
            tensors[key] = torch.cat([tensors[key], more])  # [rank, d_model]
        return tensors
