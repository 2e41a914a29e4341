"""Blocks of features that are rotated: the config fields of their size, and their factors."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.config_base import config_class
from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import ConfigError
from adapterzoo.fields import MAX_WIDTH, Range, field
from adapterzoo.kernels.cayley import cayley_fold

from ._targets import TargetedConfig


@config_class
class BlockConfig(TargetedConfig):
    """Base of the configs whose adapters rotate blocks of features.

    Attributes:
        boft_block_size: features b that a block rotates, at least 2; 0: d_in / `boft_block_num`,
            or 4 if that is 0 too.
        boft_block_num: instead of the size: number of blocks of each factor, d_in / b.
        boft_n_butterfly_factor: factors m; above 1, b is even and b · 2^(m−1) divides d_in.
    """

    boft_block_size: int = field(0, Range(0, MAX_WIDTH))
    boft_block_num: int = field(0, Range(0, MAX_WIDTH))
    boft_n_butterfly_factor: int = field(1, Range(1, 16))

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is not legal.
        """
        super().__post_init__()
        if (b := self.boft_block_size) and (n := self.boft_block_num):
            kind = type(self).__name__
            raise ConfigError(
                f"{kind}(boft_block_size={b}, boft_block_num={n}): one follows from the other "
                f"at each layer. Write {kind}(boft_block_size={b})."
            )

    def block_size_at(self, site: Site) -> int:
        """Return the block size b at a site.

        Raises:
            ConfigError: no block size fits d_in, or not the one asked for.
        """
        m, d_in, num = self.boft_n_butterfly_factor, site.d_in, self.boft_block_num
        asked = num or self.boft_block_size or 4
        legal = {d_in // b if num else b: b for b in block_sizes(d_in, m)}
        if asked in legal:
            return legal[asked]
        near = sorted(sorted(legal, key=lambda value: abs(value - asked))[:2])
        kind, field = type(self).__name__, f"boft_block_{'num' if num else 'size'}"
        rule = "into blocks b > 1, even for m > 1, with b · 2^(m−1) dividing it too "
        raise ConfigError(
            f"{kind}({field}={asked}, boft_n_butterfly_factor={m}): {field}={asked} does not "
            f"divide d_in={d_in} {'' if d_in % asked else rule}at {site.path!r}; "
            + (f"legal near it: {near}. Write {kind}({field}={near[-1]})." if near else "")
            + ("" if near else "nothing does. Write boft_n_butterfly_factor=1 or exclude_modules.")
        )


@cache
def block_sizes(d_in: int, factors: int) -> tuple[int, ...]:
    """Return the legal sizes b, ascending: above 1, even for m > 1, b · 2^(m−1) divides d_in."""
    step = 1 if factors == 1 else 2
    return tuple(b for b in range(2, d_in + 1, step) if d_in % (b << (factors - 1)) == 0)


def rotation(R: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
    """Return the factors, folded to `[*adapters, 1, chunks, width, width]` if that is faster.

    Args:
        R: `[*adapters, m, d_in / b, b, b]`.
        dropout: share of one factor's blocks that are replaced by the identity.
        dtype: of the layer's input.
    """
    R = R.to(compute_dtype(dtype))
    return cayley_fold(R, dropped(R, dropout) if dropout else None)


def dropped(Q: Tensor, p: float) -> Tensor:
    """Draw int(p · blocks) blocks of one factor. Q `[*adapters, m, blocks, b, b]` → bool."""
    m, blocks = Q.shape[-4:-2]
    lead = Q.shape[:-4]
    chosen = torch.rand((*lead, 1, blocks), device=Q.device).argsort(-1) < int(p * blocks)
    drawn = torch.randint(m, (*lead, 1, 1), device=Q.device)
    factor = torch.arange(m, device=Q.device).unsqueeze(-1) == drawn  # [*adapters, m, 1]
    return factor & chosen  # [*adapters, m, blocks]
