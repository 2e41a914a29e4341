"""BOFT — Orthogonal Butterfly.

Paper: Liu et al. 2023, arXiv:2311.06243, §4: W' = s ⊙ (W · Rotᵀ), so that
y = s ⊙ (x · Rot) Wᵀ + bias with Rot = M_{m−1} ⋯ M_0, M_i = P_i diag(Q_i) P_iᵀ and the rotations
Q = (I − S) (I + S)⁻¹, S = (R − Rᵀ) / 2 of b features each. m = 1 is block-diagonal OFT.

Differs from the paper: the learned output scale s, as in all implementations. Differs from PEFT:
x is rotated by blocks instead of a dense rotation; m factors are m on every device (one in PEFT
without its CUDA code).
Cost per site: m · d_in · b + d_out parameters; one batched product of b · 2^(m−1) columns.
Cannot do: embeddings, whose input has no features to rotate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.config_base import config_class
from adapterzoo.configs import architectures, config_strings
from adapterzoo.contracts import BaseLayer, compute_dtype
from adapterzoo.errors import ConfigError
from adapterzoo.fields import SEED, Share, field
from adapterzoo.kernels.butterfly import butterfly, in_layout_of, rotated
from adapterzoo.kernels.cayley import cayley
from adapterzoo.kernels.compose import compose, compose_reference
from adapterzoo.kernels.grouped import Groups
from adapterzoo.kernels.ops import exactly
from adapterzoo.spelling import spelled

from . import _boft_spelling
from ._blocks import BlockConfig, rotation
from ._init import DTYPE, DTYPES, constant, drawn, generator, normal
from ._rotating import Rotating
from ._rows import features, restored


@architectures.register("boft")
@config_strings.register("boft")
@spelled(_boft_spelling.peft)
@config_class
class BOFTConfig(BlockConfig):
    """Config of BOFT; `TargetedConfig` chooses the layers, `BlockConfig` the blocks.

    Attributes:
        boft_dropout: share, 0 to below 1, of the blocks of one random factor that a training step
            replaces by the identity.
        init_weights: True: no rotation, scale 1; False: normal with deviation 0.1 around that.
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    architecture: ClassVar[str] = "boft"
    training_fields = BlockConfig.training_fields | {"boft_dropout"}

    boft_dropout: float = field(0.0, Share())
    init_weights: bool = True
    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)

    @property
    def starts_as_identity(self) -> bool:
        """Whether R starts as zero and the scale as one."""
        return self.init_weights

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> BOFT:
        """Return a fresh adapter for the site."""
        return BOFT(self, site, device, dtype)


class BOFT(Rotating):
    """y = s ⊙ (x · Rot) Wᵀ + bias; `Stack(a, b)` makes W · Rot_aᵀ · Rot_bᵀ of W.

    Attributes:
        boft_R: `[m, d_in / b, b, b]`, with experts in front where the site has them.
        boft_s: `[d_out, 1]`, likewise.
        dropout: share of one factor's blocks that training replaces by the identity.
        kept_rotation: the folded factors of evaluation.
    """

    def __init__(
        self, config: BOFTConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Raises:
            ConfigError: the blocks do not fit d_in, or there is nothing to rotate or to drop.
        """
        super().__init__()
        self.dropout = config.boft_dropout
        if site.kind == "embedding" or (self.dropout and site.is_only_read):
            lookup = "an embedding reads token numbers, so it has no features to rotate. Write "
            shared = "the module computes with its parameters, merged or not. Write boft_dropout=0"
            why = f"{shared}." if site.is_only_read else f"{lookup}exclude_modules=[{site.path!r}]."
            raise ConfigError(f"BOFTConfig(boft_dropout={self.dropout}) at {site.path!r}: {why}")
        b, m = config.block_size_at(site), config.boft_n_butterfly_factor
        lead = (site.experts,) if site.experts else ()
        dtype = DTYPES[config.dtype] if config.dtype else dtype
        fresh = constant(0.0), constant(1.0)
        if not config.init_weights:
            source = generator(config.init_weights_seed, f"{site.path}{site.role}")
            fresh = normal(0.1, source), lambda s: s.normal_(1.0, 0.1, generator=source)
        self.boft_R = drawn((*lead, m, site.d_in // b, b, b), fresh[0], device, dtype)
        self.boft_s = drawn((*lead, site.d_out, 1), fresh[1], device, dtype)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer on rotated features, its output scaled but for the bias.

        `x` `[*batch, d_in]` → `[*batch, d_out]`.
        """
        Q = self.rotation(x)
        gain = self.boft_s.squeeze(-1).to(Q.dtype)  # [d_out]
        y = base(in_layout_of(rotated(x, Q), x, Q))  # [*batch, d_out]
        return compose(y, gain, base.bias)  # [*batch, d_out]

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether their rotations have one shape, dtype and dropout, and no experts."""
        kinds = {(a.kind, a.boft_s.dtype, a.boft_R.dim()) for a in adapters}
        return len(kinds) == 1 and adapters[0].boft_R.dim() == 4

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Apply to each row its rotation and scale. `x` `[rows, *tokens, d_in]`."""
        if not groups.rows:
            return base(x)
        y = base(cls.rotated_rows(adapters, groups, x))  # [rows, *tokens, d_out]
        scales = [a.boft_s.squeeze(-1).to(compute_dtype(x.dtype)) for a in adapters]
        gain = features(scales, groups, y.dim())  # [rows, 1, …, d_out]
        return restored(compose_reference(y, gain, base.bias), y, groups)

    def identity_values(self, base: BaseLayer) -> Mapping[str, Tensor]:
        """Return the identity scale 1; R, whose skew part generates the rotation, is 0."""
        return {"boft_s": torch.ones_like(self.boft_s)}

    @property
    def rotation_parameter(self) -> Tensor:
        """R, whose skew part generates the rotation."""
        return self.boft_R

    def rotations_of(self, R: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
        """Return the folded factors."""
        return rotation(R, dropout, compute_dtype(dtype))

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight s ⊙ (w · Rotᵀ), `[d_out, d_in]`, with experts in front."""
        with exactly(w.device):
            merged = butterfly(w, self.rotations(w.dtype), transposed=True)
        return (merged * self.boft_s).to(w.dtype)

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias `[d_out]`: the layer's own stays, additions to it are scaled."""
        s, own = self.boft_s.squeeze(-1).to(b.dtype), base.bias  # [d_out] each
        return s * b if own is None else own + s * (b - own)

    def rotations(self, dtype: torch.dtype) -> Tensor:
        """Q `[*experts, m, d_in / b, b, b]`, in float64 for a float64 layer, else in float32."""
        return cayley(self.boft_R.to(compute_dtype(dtype)))

    def extra_repr(self) -> str:
        """Return widths, factors and block size."""
        m, blocks, b = self.boft_R.shape[-4:-1]
        return f"d_in={blocks * b}, d_out={self.boft_s.shape[-2]}, factors={m}, block_size={b}"
