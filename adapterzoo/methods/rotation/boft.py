"""BOFT — Orthogonal Butterfly.

Paper: Liu et al. 2023, arXiv:2311.06243, §4: W' = s ⊙ (W · Rotᵀ), so that
y = s ⊙ (x · Rot) Wᵀ + bias with Rot = M_{m−1} ⋯ M_0, M_i = P_i diag(Q_i) P_iᵀ and the rotations
Q = (I − S) (I + S)⁻¹, S = (R − Rᵀ) / 2 of b features each. m = 1 is block-diagonal OFT.

Differs from the paper: the learned output scale s, as in all implementations. Differs from PEFT:
x is rotated by blocks instead of by a dense rotation; m factors are m on every device (one in PEFT
without its CUDA code).
Cost per site: m · d_in · b + d_out parameters; one batched product of b · 2^(m−1) columns.
Cannot do: embeddings, whose input has no features to rotate.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.config import MAX_WIDTH, SEED, Placement, Range, Share, field, method_config
from adapterzoo.contracts import BaseLayer, compute_dtype
from adapterzoo.errors import ConfigError
from adapterzoo.kernels.butterfly import butterfly, in_layout_of, rotated, without
from adapterzoo.kernels.cayley import cayley, cayley_fold
from adapterzoo.kernels.compose import compose, compose_reference
from adapterzoo.kernels.grouped import RowGroups
from adapterzoo.kernels.ops import exactly
from adapterzoo.methods._init import DTYPE, constant, drawn, dtype_named, generator, normal
from adapterzoo.methods._peft import (
    EXCLUDED,
    STORED,
    TARGETS,
    bias,
    ignored,
    not_plain_2d,
    ours,
    refuse_ignored,
    same_as,
    unsayable,
)
from adapterzoo.methods._targets import TargetedConfig, check_site, check_size
from adapterzoo.peft_arguments import PeftArguments
from adapterzoo.spelling import (
    ConvolutionShape,
    Fields,
    PeftLayer,
    PeftOutput,
    PeftSpelling,
    spelled,
)

from .rotating import Rotating, block_sizes, dropped, turned_rows


@method_config("boft")
class BOFTConfig(TargetedConfig):
    """Config of BOFT; `TargetedConfig` chooses the layers.

    Attributes:
        boft_block_size: features b that a block rotates, at least 2; 0: d_in / `boft_block_num`,
            or 4 if that is also 0.
        boft_block_num: instead of the size: number of blocks of each factor, d_in / b.
        boft_n_butterfly_factor: factors m; above 1, b is even and b · 2^(m−1) divides d_in.
        boft_dropout: share, 0 to below 1, of the blocks of one random factor that a training step
            replaces with the identity.
        init_weights: True: no rotation, scale 1; False: normal with deviation 0.1 around that.
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        dtype: dtype of the parameters, by name ("float32"); None for that of the layer.
    """

    training_fields = TargetedConfig.training_fields | {"boft_dropout"}

    boft_block_size: int = field(0, Range(0, MAX_WIDTH))
    boft_block_num: int = field(0, Range(0, MAX_WIDTH))
    boft_n_butterfly_factor: int = field(1, Range(1, 16))
    boft_dropout: float = field(0.0, Share())
    init_weights: bool = True
    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is invalid.
        """
        super().__post_init__()
        if (b := self.boft_block_size) and (n := self.boft_block_num):
            kind = type(self).__name__
            raise ConfigError(
                f"{kind}(boft_block_size={b}, boft_block_num={n}): one follows from the other. "
                f"Write {kind}(boft_block_size={b})."
            )

    def block_size_at(self, site: Site) -> int:
        """Return the block size b at a site.

        Raises:
            ConfigError: the block size does not fit d_in, or none does.
        """
        m, d_in, num = self.boft_n_butterfly_factor, site.d_in, self.boft_block_num
        asked = num or self.boft_block_size or 4
        legal = {d_in // b if num else b: b for b in block_sizes(d_in, m)}
        name = f"boft_block_{'num' if num else 'size'}"
        check_size(self, site, name, asked, legal, "", "boft_n_butterfly_factor=1")
        return legal[asked]


class BOFT(Rotating):
    """y = s ⊙ (x · Rot) Wᵀ + bias; `Stack(a, b)` turns W into W · Rot_aᵀ · Rot_bᵀ.

    Attributes:
        boft_R: `[m, d_in / b, b, b]`, with experts first if the site has any.
        boft_s: `[d_out, 1]`, likewise.
        dropout: share of one factor's blocks that training replaces with the identity.
    """

    def __init__(
        self, config: BOFTConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Raises:
            ConfigError: the blocks do not fit d_in, or there is nothing to rotate or drop.
        """
        super().__init__()
        self.dropout = config.boft_dropout
        check_site(config, site, "boft_dropout")
        b, m = config.block_size_at(site), config.boft_n_butterfly_factor
        dtype = dtype_named(config.dtype, dtype)
        fresh = constant(0.0), constant(1.0)
        if not config.init_weights:
            source = generator(config.init_weights_seed, f"{site.path}{site.role}")
            fresh = normal(0.1, source), lambda s: s.normal_(1.0, 0.1, generator=source)
        self.boft_R = drawn((*site.lead, m, site.d_in // b, b, b), fresh[0], device, dtype)
        self.boft_s = drawn((*site.lead, site.d_out, 1), fresh[1], device, dtype)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer on rotated features, with its output scaled, except for the bias.

        `x` `[*batch, d_in]` → `[*batch, d_out]`.
        """
        Q = self.rotation(x.dtype)
        gain = self.boft_s.squeeze(-1).to(Q.dtype)  # [d_out]
        y = base(in_layout_of(rotated(x, Q), x, Q))  # [*batch, d_out]
        return compose(y, gain, base.bias)  # [*batch, d_out]

    @property
    def row_options(self) -> Hashable | None:
        """Shape and dtype of the blocks, and dropout; None with experts."""
        R = self.boft_R
        return None if R.dim() > 4 else (tuple(R.shape), R.dtype, self.dropout)

    def row_tensors(self, base: BaseLayer, dtype: torch.dtype) -> Mapping[str, Tensor | float]:
        """Return the rotation and s."""
        Q = self.rotation(dtype)
        return {"rotation": Q, "gain": self.boft_s.squeeze(-1).to(Q.dtype)}

    def forward_rows(
        self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row with its own rotation and scale. `x` `[rows, *tokens, d_in]`."""
        y = base(turned_rows(stacks["rotation"], groups, x))  # [rows, *tokens, d_out]
        gain = groups.features(stacks["gain"], y.dim())  # [rows, 1, …, d_out]
        return groups.restored(compose_reference(y, gain, base.bias), y)

    def identity_values(self, base: BaseLayer) -> Mapping[str, Tensor]:
        """Set the scale to 1 and R, whose skew part generates the rotation, to 0."""
        return {"boft_s": torch.ones_like(self.boft_s)}

    def folded(self, dropout: float, dtype: torch.dtype) -> Tensor:
        """Return the factors, folded into one if that is faster."""
        R = self.boft_R.to(dtype)
        return cayley_fold(R, dropped(R, dropout) if dropout else None)

    def turned(self, w: Tensor, base: BaseLayer, dropout: float) -> Tensor:
        """Return the merged weight s ⊙ (w · Rotᵀ), `[d_out, d_in]`, with experts in front."""
        with exactly(w.device):
            Q = cayley(self.boft_R.to(compute_dtype(w.dtype)))
            Q = without(Q, dropped(Q, dropout)) if dropout else Q
            merged = butterfly(w, Q, transposed=True)
        return (merged * self.boft_s).to(w.dtype)

    def merged_bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias `[d_out]`: the layer's own is kept, additions to it are scaled."""
        s, own = self.boft_s.squeeze(-1).to(b.dtype), base.bias  # [d_out] each
        return s * b if own is None else own + s * (b - own)


BOFTConfig.adapter_class = BOFT


_ARGUMENTS = PeftArguments(
    class_name="BOFTConfig",
    fields={
        **TARGETS,
        **EXCLUDED,
        **STORED,
        **bias("boft_only"),
        "boft_block_size": ours(4, "boft_block_size", Range(0, MAX_WIDTH)),
        "boft_n_butterfly_factor": ours(1, "boft_n_butterfly_factor", Range(1, 30)),
        **same_as(BOFTConfig, "boft_block_num", "boft_dropout"),
        "init_weights": ours(True, "init_weights"),
    },
)


# at a convolution, PEFT's BOFT reads the first numbers of these, or nothing
_IGNORED = ("kernel_size", "stride", "padding", "dilation", "padding_mode")


def _read_fields(layer: PeftLayer, fields: Fields) -> Fields:
    """Return the fields of our config at a layer; the tensor gives the number of factors."""
    refuse_ignored(layer.site, *_IGNORED)
    R = layer.tensors["boft_R"]
    # the comparison with the model finds other shapes
    m = R.shape[0] if R.dim() == 4 else fields["boft_n_butterfly_factor"]
    if m != fields["boft_n_butterfly_factor"]:
        warnings.warn(
            f"its config has boft_n_butterfly_factor={fields['boft_n_butterfly_factor']}, but its "
            f"tensors {m}, which are loaded: PEFT trains one factor without its CUDA extension.",
            stacklevel=2,
        )
    return {**fields, "boft_n_butterfly_factor": m}


def _unsayable(placement: Placement) -> str | None:
    """Return why PEFT's format cannot express an adapter; None if it can."""
    site = placement.site
    why = not_plain_2d(site, "a BOFTConfig") or ignored(site, *_IGNORED)
    return why or unsayable(placement, "a BOFTConfig", "PEFT has no BOFT")


def _write_layers(layers: Sequence[PeftOutput], said: Sequence[Fields]) -> list[Fields]:
    """Return PEFT's config fields for each layer: a size of 0 without a number becomes 4."""
    sizes = [layer.tensors["boft_R"].shape[-1] for layer in layers]
    return [
        {**fields, "boft_block_size": 0 if fields["boft_block_num"] else size}
        for size, fields in zip(sizes, said, strict=True)
    ]


spelled(
    lambda config: PeftSpelling(
        config=config,
        peft_type="BOFT",
        beside=frozenset({"bias"}),
        arguments=_ARGUMENTS,
        tensors={"boft_R": ("boft_R",), "boft_s": ("boft_s",)},
        convolution_shapes={"boft_s": ConvolutionShape(lambda t, _: t.mT, lambda t, _: t.mT)},
        read_fields=_read_fields,
        unsayable=_unsayable,
        write_layers=_write_layers,
    )
)(BOFTConfig)
