"""OFT — Orthogonal Finetuning.

Papers: Qiu et al. 2023, arXiv:2306.07280; OFTv2: Qiu et al. 2025, arXiv:2506.19847.
y = (x · diag(Q_1, …, Q_r)) Wᵀ + bias with rotations Q of b features, from skew-symmetric S: the
Neumann series Q = I + 2 S + … + 2 Sⁿ⁻² + Sⁿ⁻¹ ≈ (I + S) (I − S)⁻¹, or (I − S) (I + S)⁻¹ exactly.
Constrained (`coft`), ‖S‖ ≤ eps / √r, or `eps` where the blocks share S. An embedding's output is
rotated.

Differs from the paper: S is constrained, not Q − I, as in PEFT. Differs from PEFT: `module_dropout`
acts (PEFT 0.21 ignores it); `coft` bounds S in each forward, with the gradient of PEFT, but the
parameters stay as the optimizer set them; a size that does not divide d_in is refused, where PEFT
takes another one.
Cost per site: d_in · (b − 1) / 2 parameters; one batched product of max(b, 16) columns.
Cannot do: convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.config_base import config_class
from adapterzoo.configs import architectures, config_strings
from adapterzoo.contracts import BaseLayer
from adapterzoo.errors import ConfigError
from adapterzoo.fields import SEED, Share, field
from adapterzoo.kernels.butterfly import butterfly, in_layout_of, rotated
from adapterzoo.kernels.grouped import Groups
from adapterzoo.kernels.ops import exactly
from adapterzoo.spelling import spelled

from . import _oft_spelling
from ._init import DTYPE, DTYPES, constant, drawn, generator, normal
from ._rotating import Rotating
from ._skew import SkewConfig


@architectures.register("oft")
@config_strings.register("oft")
@spelled(_oft_spelling.peft)
@config_class
class OFTConfig(SkewConfig):
    """Config of OFT; `TargetedConfig` chooses the layers, `SkewConfig` the blocks.

    Attributes:
        module_dropout: share, 0 to below 1, of the blocks that a training step replaces by the
            identity.
        init_weights: True: no rotation; False: normal with deviation 0.1.
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    architecture: ClassVar[str] = "oft"
    training_fields = SkewConfig.training_fields | {"module_dropout"}

    module_dropout: float = field(0.0, Share())
    init_weights: bool = True
    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)

    @property
    def starts_as_identity(self) -> bool:
        """Whether S starts as zero."""
        return self.init_weights

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> OFT:
        """Return a fresh adapter for the site."""
        return OFT(self, site, device, dtype)


class OFT(Rotating):
    """y = (x · Rot) Wᵀ + bias; `Stack(a, b)` makes W · Rot_aᵀ · Rot_bᵀ of W.

    Attributes:
        oft_R: upper triangles of S, row by row, `[r, b (b − 1) / 2]`, with experts in front where
            the site has them; r = 1 for blocks that share S.
        blocks: how they become rotations.
        dropout: share of the blocks that training replaces by the identity.
        looks_up: whether the layer is an embedding, whose output is rotated.
    """

    def __init__(
        self, config: OFTConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the parameters.
            dtype: of the layer.

        Raises:
            ConfigError: the blocks do not fit the features, or there is nothing to drop.
        """
        super().__init__()
        self.dropout = config.module_dropout
        self.looks_up = site.kind == "embedding"
        if self.dropout and site.is_only_read:
            raise ConfigError(
                f"OFTConfig(module_dropout={self.dropout}) at {site.path!r}: the module computes "
                f"with its parameters, merged or not. Write module_dropout=0.0."
            )
        self.blocks = config.blocks_at(site)
        b, rows = self.blocks.size, 1 if config.block_share else self.blocks.number
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        fresh = constant(0.0) if config.init_weights else normal(0.1, source)
        shape = (*((site.experts,) if site.experts else ()), rows, b * (b - 1) // 2)
        self.oft_R = drawn(shape, fresh, device, DTYPES[config.dtype] if config.dtype else dtype)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer on rotated features; in an embedding `x` is token numbers `[*batch]`.

        `x` `[*batch, d_in]` → `[*batch, d_out]`.
        """
        if self.looks_up:
            y = base(x)  # [*batch, d_out]
            # autocast narrows products, and no look-up
            return rotated(y, self.rotation(y)).to(y.dtype)
        Q = self.rotation(x)
        return base(in_layout_of(rotated(x, Q), x, Q))

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether their rotations have one shape, rule, dtype and dropout."""
        same = len({a.kind for a in adapters}) == 1
        return same and adapters[0].oft_R.dim() == 2 and not adapters[0].looks_up

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Rotate each row by its adapter. `x` `[rows, *tokens, d_in]`."""
        if not groups.rows:
            return base(x)
        return base(cls.rotated_rows(adapters, groups, x))

    @property
    def rotation_parameter(self) -> Tensor:
        """The numbers above the diagonals of the blocks."""
        return self.oft_R

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal if the rule of the blocks is the same too."""
        return *super().kind, self.blocks

    def rotations_of(self, R: Tensor, dropout: float, dtype: torch.dtype) -> Tensor:
        """Return the folded blocks."""
        return self.blocks.folded(R, dropout, dtype)

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w · Rotᵀ `[d_out, d_in]`, with experts in front.

        In an embedding, whose columns are the tokens, it is Rotᵀ · w.
        """
        Q = self.blocks.rotations(self.oft_R, w.dtype)
        with exactly(w.device):
            if self.looks_up:
                return butterfly(w.mT, Q).mT.to(w.dtype)  # [d_out, d_in]
            return butterfly(w, Q, transposed=True).to(w.dtype)

    def extra_repr(self) -> str:
        """Return the blocks."""
        b, number = self.blocks.size, self.blocks.number
        return f"features={b * number}, blocks={number}, block_size={b}"
