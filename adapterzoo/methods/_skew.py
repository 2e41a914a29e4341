"""Rotations of blocks of features, from the upper triangles of skew-symmetric matrices.

Papers: Qiu et al. 2023, arXiv:2306.07280; Qiu et al. 2025,
arXiv:2506.19847 (the Neumann series).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.config_base import config_class
from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import ConfigError
from adapterzoo.fields import MAX_WIDTH, Positive, Range, field
from adapterzoo.kernels.butterfly import folded, without
from adapterzoo.kernels.cayley import cayley, cayley_fold, cayley_neumann
from adapterzoo.kernels.ops import recomputed

from ._blocks import block_sizes, dropped
from ._targets import TargetedConfig

TERMS = Range(2, 64)


@config_class
class SkewConfig(TargetedConfig):
    """Base of the configs whose adapters rotate blocks of features by skew-symmetric matrices.

    Attributes:
        oft_block_size: features b that a block rotates, at least 2 and a divisor of d_in.
        r: instead of the size, with `oft_block_size=0`: number of blocks, d_in / b.
        block_share: whether all blocks of a layer are the same.
        use_cayley_neumann: whether Q is a Neumann series, orthogonal only for small S, instead of
            the exact Cayley transform.
        num_cayley_neumann_terms: of the series, 2 to 64.
        coft: whether the norms of S are bounded.
        eps: bound of the norms of all blocks of a layer together.
    """

    r: int = field(0, Range(0, MAX_WIDTH))
    oft_block_size: int = field(32, Range(0, MAX_WIDTH))
    block_share: bool = False
    use_cayley_neumann: bool = True
    num_cayley_neumann_terms: int = field(5, TERMS)
    coft: bool = False
    eps: float = field(6e-5, Positive())

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is not legal, or has no effect.
        """
        super().__post_init__()
        r, b, kind = self.r, self.oft_block_size, type(self).__name__
        if bool(r) == bool(b):
            why = "one follows from the other at each layer" if r else "nothing says how large"
            hint = f"r={r}, oft_block_size=0" if r else "oft_block_size=32"
            raise ConfigError(
                f"{kind}(r={r}, oft_block_size={b}): {why} the blocks are. Write {kind}({hint})."
            )
        for name, default, flag in (
            ("num_cayley_neumann_terms", 5, "use_cayley_neumann"),
            ("eps", 6e-5, "coft"),
        ):
            if (value := getattr(self, name)) != default and not getattr(self, flag):
                raise ConfigError(
                    f"{kind}({name}={value}): has an effect only with {flag}=True. Write "
                    f"{name}={default}."
                )

    @property
    def gradients_are_exact(self) -> bool:
        """A constrained S passes its gradient on as it is."""
        return not self.coft

    def blocks_at(self, site: Site) -> Blocks:
        """Return the blocks at a site.

        Raises:
            ConfigError: no block has the size that is asked for.
        """
        width = site.d_out if site.kind == "embedding" else site.d_in
        asked, name = (self.r, "r") if self.r else (self.oft_block_size, "oft_block_size")
        legal = {width // b if self.r else b: b for b in block_sizes(width, 1)}
        if asked not in legal:
            near = sorted(sorted(legal, key=lambda value: abs(value - asked))[:2])
            hint = f"exclude_modules=[{site.path!r}]"
            if near:
                size = ", oft_block_size=0" if self.r else ""
                hint = f"{type(self).__name__}({name}={near[-1]}{size})"
            raise ConfigError(
                f"{type(self).__name__}({name}={asked}): {name}={asked} does not divide the "
                f"{width} features at {site.path!r} into blocks of at least 2; legal near it: "
                f"{near}. Write {hint}."
            )
        terms = self.num_cayley_neumann_terms if self.use_cayley_neumann else 0
        return Blocks(legal[asked], width // legal[asked], terms, self.eps if self.coft else None)


class Blocks(NamedTuple):
    """How an adapter's vectors become rotations.

    Attributes:
        size: features b of a block.
        number: of blocks in the layer; they may share one vector.
        terms: of the Neumann series; 0: the exact Cayley transform.
        eps: bound of the norms; None: there is none.
    """

    size: int
    number: int
    terms: int
    eps: float | None

    def rotations(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        """Return Q, in float64 for a float64 layer, else in float32.

        Args:
            vectors: `[*lead, number or 1, b (b − 1) / 2]`.
            dtype: of the layer.

        Returns:
            `[*lead, 1, number, b, b]`: one factor of a butterfly.
        """
        wide = vectors.to(compute_dtype(dtype))
        Q = recomputed(self._series, wide) if self.terms else cayley(self._skew(wide))
        return self._all(Q)

    def folded(self, vectors: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
        """Return the rotations as `[*lead, 1, chunks, width, width]`; see `rotations`.

        `dropout` is the share of blocks that are replaced by the identity.
        """
        shared = vectors.shape[-2] < self.number
        if self.terms or shared:
            Q = self.rotations(vectors, dtype)
            return folded(without(Q, dropped(Q, dropout)) if dropout else Q)
        S = self._all(self._skew(vectors.to(compute_dtype(dtype))))
        return cayley_fold(S, dropped(S, dropout) if dropout else None)

    def _series(self, vectors: Tensor) -> Tensor:
        """Return Q `[*lead, number or 1, b, b]`, a Neumann series."""
        return cayley_neumann(self._skew(vectors), self.terms)

    def _skew(self, vectors: Tensor) -> Tensor:
        """Return S `[*lead, number or 1, b, b]`."""
        S = skew(vectors, self.size)
        return S if self.eps is None else constrained(S, self.eps)

    def _all(self, Q: Tensor) -> Tensor:
        """Return `Q` `[*lead, number or 1, b, b]` as one factor, `[*lead, 1, number, b, b]`."""
        return Q.unsqueeze(-4).expand(*Q.shape[:-3], 1, self.number, self.size, self.size)


def skew(vectors: Tensor, b: int) -> Tensor:
    """Return the skew-symmetric matrices with these upper triangles, row by row.

    Args:
        vectors: `[*lead, b (b − 1) / 2]`.
        b: rows and columns of each matrix.

    Returns:
        `[*lead, b, b]`.
    """
    row, column = torch.triu_indices(b, b, 1, device=vectors.device)
    flat = vectors.new_zeros(*vectors.shape[:-1], b * b).index_copy(-1, row * b + column, vectors)
    upper: Tensor = flat.unflatten(-1, (b, b))  # [*lead, b, b]
    return upper - upper.mT


def constrained(S: Tensor, eps: float) -> Tensor:
    """Return S with no block's Frobenius norm above eps / √blocks.

    The gradient is that of the constrained S, as if S itself had been set to it.

    Args:
        S: `[*lead, blocks, b, b]`.
        eps: bound of the norms of all blocks together.
    """
    limit = eps / S.shape[-3] ** 0.5
    fixed = S.detach()
    norm = fixed.square().sum((-2, -1), keepdim=True).sqrt()  # [*lead, blocks, 1, 1]
    inside = norm <= limit
    scale = torch.where(inside, 1.0, limit / norm.masked_fill(inside, 1.0))
    # S − fixed is exactly zero: it only passes the gradient on
    return fixed * scale + (S - fixed)
