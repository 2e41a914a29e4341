"""BOFT — Orthogonal Butterfly.

Paper: Liu et al. 2023, arXiv:2311.06243, §4: W' = s ⊙ (W · Rotᵀ), so that
y = s ⊙ (x · Rot) Wᵀ + bias with Rot = M_{m−1} ⋯ M_0, M_i = P_i diag(Q_i) P_iᵀ and the rotations
Q = (I − S) (I + S)⁻¹, S = (R − Rᵀ) / 2 of b features each. m = 1 is block-diagonal OFT.

Differs from the paper: the learned output scale s, as everybody has it. Differs from PEFT: every
number of factors works on every device, and x is rotated instead of building a dense rotation;
m factors are m where PEFT makes them one when its CUDA extension is missing.
Cost per site: m · d_in · b + d_out parameters; one batched product of b · 2^(m−1) columns.
Cannot do: embeddings, whose input has no features to rotate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.configs import (
    MAX_WIDTH,
    architectures,
    config_strings,
    require_choice,
    require_range,
)
from adapterzoo.contracts import Base, WeightAdapter, compute_dtype
from adapterzoo.errors import ConfigError
from adapterzoo.kernels.butterfly import butterfly
from adapterzoo.kernels.cayley import cayley_reference

from ._init import constant, drawn, generator, normal
from ._targets import TargetedConfig

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32)}


@architectures.register("boft")
@config_strings.register("boft")
@dataclass(frozen=True, kw_only=True)
class BOFTConfig(TargetedConfig):
    """Config of BOFT; `TargetedConfig` says where the adapters sit.

    Attributes:
        boft_block_size: features b that a block rotates, at least 2; 0: follows from
            `boft_block_num`, and is 4 when that is 0 as well.
        boft_block_num: instead of the size: blocks of each factor, d_in / b.
        boft_n_butterfly_factor: factors m; above 1, b is even and b · 2^(m−1) divides d_in.
        boft_dropout: share, 0 to below 1, of the blocks of one random factor that a training step
            replaces by the identity.
        init_weights: True: no rotation, scale 1; False: R normal with deviation 0.1, the scale
            normal around 1.
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    architecture: ClassVar[str] = "boft"

    boft_block_size: int = 0
    boft_block_num: int = 0
    boft_n_butterfly_factor: int = 1
    boft_dropout: float = 0.0
    init_weights: bool = True
    init_weights_seed: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is not legal.
        """
        super().__post_init__()
        require_range(self, "boft_block_size", 0, MAX_WIDTH)
        require_range(self, "boft_block_num", 0, MAX_WIDTH)
        require_range(self, "boft_n_butterfly_factor", 1, 16)
        require_range(self, "boft_dropout", 0.0, 1.0 - 1e-9)
        require_choice(self, "init_weights", (True, False))
        require_choice(self, "dtype", (None, *_DTYPES))
        if self.boft_block_size and self.boft_block_num:
            raise ConfigError(
                f"BOFTConfig(boft_block_size={self.boft_block_size}, "
                f"boft_block_num={self.boft_block_num}): one follows from the other at each layer. "
                f"Write BOFTConfig(boft_block_size={self.boft_block_size})."
            )

    @property
    def starts_as_identity(self) -> bool:
        """Whether R starts as zero and the scale as one."""
        return self.init_weights

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> BOFT:
        """A fresh adapter for the site."""
        return BOFT(self, site, device, dtype)

    def block_size_at(self, site: Site) -> int:
        """The block size b at a site.

        Raises:
            ConfigError: it does not fit d_in.
        """
        m, d_in, by_num = self.boft_n_butterfly_factor, site.d_in, self.boft_block_num > 0
        asked = self.boft_block_num or self.boft_block_size or 4

        def fits(b: int) -> bool:
            return b > 1 and d_in % (b << (m - 1)) == 0 and (m == 1 or b % 2 == 0)

        b = d_in // asked if by_num else asked
        if d_in % asked == 0 and fits(b):
            return b
        name = "boft_block_num" if by_num else "boft_block_size"
        legal = [d_in // b if by_num else b for b in range(2, d_in + 1) if fits(b)]
        near = sorted(sorted(legal, key=lambda value: abs(value - asked))[:2])
        wrong = f"does not divide d_in={d_in}"
        if d_in % asked == 0:
            rule = (
                "is at least 2" if m == 1 else f"is even and b · {1 << (m - 1)} divides d_in={d_in}"
            )
            wrong = f"gives blocks of b={b}, where b {rule}"
        cure = "no other value does. Write boft_n_butterfly_factor=1, or use exclude_modules."
        if near:
            cure = (
                f"legal near it: {', '.join(map(str, near))}. Write BOFTConfig({name}={near[-1]})."
            )
        raise ConfigError(
            f"BOFTConfig({name}={asked}, boft_n_butterfly_factor={m}): {name}={asked} {wrong} "
            f"at {site.path!r}; {cure}"
        )


class BOFT(WeightAdapter):
    """y = s ⊙ (x · Rot) Wᵀ + bias.

    In a `Stack` the adapter that comes later rotates x first, so that W is changed in the order
    of the stack: W · Rot_aᵀ · Rot_bᵀ.

    Attributes:
        boft_R: `[m, d_in / b, b, b]`, with experts in front where the site has them.
        boft_s: `[d_out, 1]`, likewise.
        dropout: share of the blocks of one factor that training replaces by the identity.
    """

    def __init__(
        self, config: BOFTConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the parameters.
            dtype: of the layer.

        Raises:
            ConfigError: the blocks do not fit the site, or it has no features to rotate or drop.
        """
        super().__init__()
        self.dropout = config.boft_dropout
        if site.kind == "embedding":
            raise ConfigError(
                f"BOFTConfig() at {site.path!r}: an embedding reads token numbers, so there are "
                f"no features to rotate. Exclude it by exclude_modules, or write LoRAConfig()."
            )
        if self.dropout and site.parameter:
            raise ConfigError(
                f"BOFTConfig(boft_dropout={self.dropout}) at {site.path!r}: the module computes "
                f"with its parameters, which merging reads as well. Write boft_dropout=0.0."
            )
        b, m = config.block_size_at(site), config.boft_n_butterfly_factor
        lead = (site.experts,) if site.experts else ()
        dtype = _DTYPES[config.dtype] if config.dtype else dtype
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        fresh = (constant(0.0), constant(1.0))
        if not config.init_weights:
            fresh = (normal(0.1, source), lambda s: s.normal_(1.0, 0.1, generator=source))
        self.boft_R = drawn((*lead, m, site.d_in // b, b, b), fresh[0], device, dtype)
        self.boft_s = drawn((*lead, site.d_out, 1), fresh[1], device, dtype)

    def forward(self, x: Tensor, base: Base) -> Tensor:
        """The layer on rotated features, its output scaled but for the bias.

        `x` `[*batch, d_in]` → `[*batch, d_out]`.
        """
        Q = self.rotations(x.dtype)
        if self.dropout and self.training:
            Q = _dropped(Q, self.dropout)
        y = base(butterfly(x, Q))  # [*batch, d_out]
        s, bias = self.boft_s.squeeze(-1), base.bias  # [d_out]
        if bias is None:
            return (y * s).to(y.dtype)
        # s (y − bias) + bias in one pass over y, exactly y at s = 1
        return torch.addcmul((1 - s) * bias, y, s).to(y.dtype)

    def weight(self, w: Tensor, base: Base) -> Tensor:
        """The merged weight s ⊙ (w · Rotᵀ), `[d_out, d_in]`, with experts in front."""
        turned = butterfly(w, self.rotations(w.dtype), transposed=True)
        return (turned * self.boft_s).to(w.dtype)

    def bias(self, b: Tensor, base: Base) -> Tensor:
        """The merged bias `[d_out]`: the layer's own stays, what was added to it is scaled."""
        s, own = self.boft_s.squeeze(-1).to(b.dtype), base.bias
        return s * b if own is None else own + s * (b - own)

    def rotations(self, dtype: torch.dtype) -> Tensor:
        """The rotations Q `[*experts, m, d_in / b, b, b]`, wide enough to compute in the dtype."""
        return cayley_reference(self.boft_R.to(compute_dtype(dtype)))

    def extra_repr(self) -> str:
        """Widths, factors and block size."""
        m, blocks, b = self.boft_R.shape[-4:-1]
        return f"d_in={blocks * b}, d_out={self.boft_s.shape[-2]}, factors={m}, block_size={b}"


def _dropped(Q: Tensor, p: float) -> Tensor:
    """`Q` `[m, blocks, b, b]` with int(p · blocks) blocks of one factor replaced by I."""
    m, blocks, b = Q.shape[:-1]
    dropped = torch.randperm(blocks, device=Q.device) < int(p * blocks)  # [blocks]
    factor = torch.arange(m, device=Q.device) == torch.randint(m, (1,), device=Q.device)  # [m]
    replaced = (factor[:, None] & dropped)[..., None, None]  # [m, blocks, 1, 1]
    return torch.where(replaced, torch.eye(b, device=Q.device, dtype=Q.dtype), Q)
