"""OFT — Orthogonal Finetuning.

Papers: Qiu et al. 2023, arXiv:2306.07280; OFTv2: Qiu et al. 2025, arXiv:2506.19847.
y = (x · diag(Q_1, …, Q_r)) Wᵀ + bias with rotations Q of b features, from skew-symmetric S: the
Neumann series Q = I + 2 S + … + 2 Sⁿ⁻² + Sⁿ⁻¹ ≈ (I + S) (I − S)⁻¹, or (I − S) (I + S)⁻¹ exactly.
With `coft`, ‖S‖ ≤ eps / √r, or `eps` if the blocks share S. For an embedding, the output is
rotated.

Differs from the paper: S is constrained, not Q − I, as in PEFT. Differs from PEFT: `module_dropout`
acts (PEFT 0.21 ignores it); `coft` bounds S in each forward, with the gradient of PEFT, but the
parameters stay as the optimizer set them; a size that does not divide d_in is refused, while PEFT
takes another one; with `convention="peft"` a convolution cannot be merged, while PEFT merges
another function than its forward computes.
Cost per site: d_in · (b − 1) / 2 parameters; one batched product of max(b, 16) columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import fold, unfold

from adapterzoo.anatomy import Site
from adapterzoo.config import (
    MAX_WIDTH,
    SEED,
    Choice,
    Placement,
    Positive,
    Range,
    Share,
    field,
    method_config,
    without_idle,
)
from adapterzoo.contracts import BaseLayer, compute_dtype
from adapterzoo.errors import ConfigError, StateError
from adapterzoo.kernels.butterfly import butterfly, folded, in_layout_of, rotated, without
from adapterzoo.kernels.cayley import cayley, cayley_fold, cayley_neumann
from adapterzoo.kernels.grouped import RowGroups
from adapterzoo.kernels.ops import exactly, recomputed
from adapterzoo.methods._init import DTYPE, constant, drawn, dtype_named, generator, normal
from adapterzoo.methods._peft import (
    EXCLUDED,
    STORED,
    TARGETS,
    bias,
    ignored,
    not_plain_2d,
    ours,
    same_as,
    unsayable,
)
from adapterzoo.methods._targets import TargetedConfig, check_site, check_size
from adapterzoo.peft_arguments import PeftArguments
from adapterzoo.spelling import Fields, PeftLayer, PeftOutput, PeftSpelling, spelled

from .rotating import Rotating, block_sizes, dropped, turned_rows


def rotated_features(site: Site) -> int:
    """Return the number of features that the adapter rotates."""
    return site.d_out if site.kind == "embedding" else site.d_in


@method_config("oft")
class OFTConfig(TargetedConfig):
    """Config of OFT; `TargetedConfig` chooses the layers.

    Attributes:
        oft_block_size: features b that a block rotates, at least 2 and a divisor of d_in.
        r: instead of the size, with `oft_block_size=0`: number of blocks, d_in / b.
        block_share: whether all blocks of a layer are equal.
        use_cayley_neumann: whether Q is a Neumann series, orthogonal only for small S, instead of
            the exact Cayley transform.
        num_cayley_neumann_terms: number of terms of the series, 2 to 64.
        coft: whether the norms of S are bounded.
        eps: bound for the norm of all blocks of a layer together.
        module_dropout: share, 0 to below 1, of the blocks that each training step replaces with the
            identity.
        init_weights: True: no rotation; False: normal with deviation 0.1.
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        dtype: dtype of the parameters, by name ("float32"); None for that of the layer.
        convention: convention for convolutions with a kernel above 1. "paper": their weight is
            rotated; "peft": each patch of the input is, and the rotated patches are summed in
            PEFT's order before the convolution, so even a new adapter changes the output.
    """

    training_fields = TargetedConfig.training_fields | {"module_dropout"}

    r: int = field(0, Range(0, MAX_WIDTH))
    oft_block_size: int = field(32, Range(0, MAX_WIDTH))
    block_share: bool = False
    use_cayley_neumann: bool = True
    num_cayley_neumann_terms: int = field(5, Range(2, 64), needs="use_cayley_neumann=True")
    coft: bool = False
    eps: float = field(6e-5, Positive(), needs="coft=True")
    module_dropout: float = field(0.0, Share())
    init_weights: bool = True
    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)
    convention: str = field("paper", Choice("paper", "peft"))

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is invalid.
        """
        super().__post_init__()
        r, b, kind = self.r, self.oft_block_size, type(self).__name__
        if bool(r) == bool(b):
            hint = f"r={r}, oft_block_size=0" if r else "oft_block_size=32"
            raise ConfigError(
                f"{kind}(r={r}, oft_block_size={b}): exactly one of them must set the size of the "
                f"blocks. Write {kind}({hint})."
            )

    @property
    def gradients_are_exact(self) -> bool:
        """Whether gradients pass a constrained S unchanged."""
        return not self.coft

    def blocks_at(self, site: Site) -> tuple[int, int]:
        """Return the size b of the blocks at a site, and their number.

        Raises:
            ConfigError: the blocks cannot have the requested size.
        """
        width = rotated_features(site)
        asked, name = (self.r, "r") if self.r else (self.oft_block_size, "oft_block_size")
        legal = {width // b if self.r else b: b for b in block_sizes(width, 1)}
        check_size(self, site, name, asked, legal, ", oft_block_size=0" if self.r else "")
        return legal[asked], width // legal[asked]


def skew(vectors: Tensor, b: int) -> Tensor:
    """Return the skew-symmetric matrices with these upper triangles, row by row.

    Args:
        vectors: `[*experts, b (b − 1) / 2]`.
        b: number of rows and columns of each matrix.

    Returns:
        `[*experts, b, b]`.
    """
    row, column = torch.triu_indices(b, b, 1, device=vectors.device)
    flat = vectors.new_zeros(*vectors.shape[:-1], b * b).index_copy(-1, row * b + column, vectors)
    upper: Tensor = flat.unflatten(-1, (b, b))  # [*experts, b, b]
    return upper - upper.mT


def constrained(S: Tensor, eps: float) -> Tensor:
    """Return S with no block's Frobenius norm above eps / √blocks.

    The gradient is that of the constrained S, as if S itself had been set to that value.

    Args:
        S: `[*experts, blocks, b, b]`.
        eps: bound for the norm of all blocks together.
    """
    limit = eps / S.shape[-3] ** 0.5
    fixed = S.detach()
    norm = fixed.square().sum((-2, -1), keepdim=True).sqrt()  # [*experts, blocks, 1, 1]
    inside = norm <= limit
    scale = torch.where(inside, 1.0, limit / norm.masked_fill(inside, 1.0))
    # S − fixed is exactly zero: it only passes the gradient on
    return fixed * scale + (S - fixed)


class OFT(Rotating):
    """y = (x · Rot) Wᵀ + bias; `Stack(a, b)` turns W into W · Rot_aᵀ · Rot_bᵀ.

    Attributes:
        oft_R: upper triangles of S, row by row, `[r, b (b − 1) / 2]`, with experts in front where
            the site has them; r = 1 for blocks that share S.
        block_size: features b of a block.
        block_number: number of blocks in the layer; they may share one vector.
        terms: number of terms of the Neumann series; 0: the exact Cayley transform.
        eps: bound for the norm; None without one.
        dropout: share of the blocks that training replaces with the identity.
        looks_up: whether the layer is an embedding, whose output is rotated.
        kernel: kernel of a convolution whose patches are summed; else empty.
    """

    def __init__(
        self, config: OFTConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Args:
            config: the adapter's config.
            site: the site, which sets the widths.
            device: device for the parameters.
            dtype: the layer's dtype.

        Raises:
            ConfigError: the blocks do not fit the features, or there is nothing to drop.
        """
        super().__init__()
        self.dropout = config.module_dropout
        self.looks_up = site.kind == "embedding"
        if site.is_only_read or not self.looks_up:
            check_site(config, site, "module_dropout", embeddings=True)
        adds_up = config.convention == "peft" and math.prod(site.kernel) > 1
        self.kernel = site.kernel if adds_up else ()
        if adds_up and (len(site.kernel) != 2 or site.groups > 1):
            raise ConfigError(
                f"OFTConfig(convention='peft') at {site.path!r}: PEFT has only plain 2-D "
                f"convolutions. Write convention='paper'."
            )
        self.block_size, self.block_number = b, number = config.blocks_at(site)
        self.terms = config.num_cayley_neumann_terms if config.use_cayley_neumann else 0
        self.eps = config.eps if config.coft else None
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        fresh = constant(0.0) if config.init_weights else normal(0.1, source)
        rows = 1 if config.block_share else number
        shape = (*site.lead, rows, b * (b - 1) // 2)
        self.oft_R = drawn(shape, fresh, device, dtype_named(config.dtype, dtype))

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer on rotated features; in an embedding `x` is token ids `[*batch]`.

        `x` `[*batch, d_in]` → `[*batch, d_out]`.
        """
        if self.looks_up:
            y = base(x)  # [*batch, d_out]
            # autocast narrows products, but not look-ups
            return rotated(y, self.rotation(y.dtype)).to(y.dtype)
        Q = self.rotation(x.dtype)
        return base(in_layout_of(rotated(x, Q), x, Q))

    @property
    def row_options(self) -> Hashable | None:
        """Sizes and dtype of the blocks, and dropout; None with experts."""
        if self.oft_R.dim() > 2:
            return None
        return self.block_size, self.block_number, self.oft_R.dtype, self.dropout

    def row_tensors(self, base: BaseLayer, dtype: torch.dtype) -> Mapping[str, Tensor | float]:
        """Return the rotation."""
        return {"rotation": self.rotation(dtype)}

    def forward_rows(
        self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row with its own rotation. `x` `[rows, *tokens, d_in]`."""
        if not self.looks_up:
            return base(turned_rows(stacks["rotation"], groups, x))
        y = base(x)  # [rows, *tokens, d_out]
        return turned_rows(stacks["rotation"], groups, y).to(y.dtype)

    def rotations(self, dtype: torch.dtype) -> Tensor:
        """Return Q, in float64 for a float64 layer, else in float32.

        Args:
            dtype: the layer's dtype.

        Returns:
            `[*experts, 1, number, b, b]`: one factor of a butterfly.
        """
        wide = self.oft_R.to(compute_dtype(dtype))
        if not self.terms:
            return self._all(cayley(self._skew(wide)))
        return self._all(recomputed(lambda v: cayley_neumann(self._skew(v), self.terms), wide))

    def folded(self, dropout: float, dtype: torch.dtype) -> Tensor:
        """Return the rotations of the blocks, folded if that is faster."""
        if self.terms or self.oft_R.shape[-2] < self.block_number:
            Q = self.rotations(dtype)
            return folded(without(Q, dropped(Q, dropout)) if dropout else Q)
        S = self._all(self._skew(self.oft_R.to(compute_dtype(dtype))))
        return cayley_fold(S, dropped(S, dropout) if dropout else None)

    def _skew(self, vectors: Tensor) -> Tensor:
        """Return S `[*experts, number or 1, b, b]`."""
        S = skew(vectors, self.block_size)
        return S if self.eps is None else constrained(S, self.eps)

    def _all(self, Q: Tensor) -> Tensor:
        """Return `Q` `[*experts, number or 1, b, b]` as one factor of all blocks."""
        b = self.block_size
        return Q.unsqueeze(-4).expand(*Q.shape[:-3], 1, self.block_number, b, b)

    def convolved(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the rotated convolution, or that of rotated patches, `[*rows, d_out, *places]`."""
        if not self.kernel:
            return super().convolved(x, base)
        patches = unfold(x, self.kernel).mT  # [*rows, places, d_in]
        turned = rotated(patches, self.rotation(patches.dtype)).to(x.dtype)
        # PEFT takes the numbers [channels, places, kernel] for [channels · kernel, places]
        by_channel = turned.unflatten(-1, (x.shape[-3], -1)).transpose(-3, -2)
        return base(fold(by_channel.reshape(patches.mT.shape), x.shape[-2:], self.kernel))

    def turned(self, w: Tensor, base: BaseLayer, dropout: float) -> Tensor:
        """Return the merged weight w · Rotᵀ `[d_out, d_in]`, with experts in front.

        In an embedding, whose columns are the tokens, it is Rotᵀ · w.

        Raises:
            StateError: patches are summed.
        """
        if self.kernel:
            raise StateError(
                "OFTConfig(convention='peft') sums patches of the input, which no weight can do. "
                "Keep the adapter active."
            )
        Q = self.rotations(w.dtype)
        Q = without(Q, dropped(Q, dropout)) if dropout else Q
        with exactly(w.device):
            if self.looks_up:
                return butterfly(w.mT, Q).mT.to(w.dtype)  # [d_out, d_in]
            return butterfly(w, Q, transposed=True).to(w.dtype)


OFTConfig.adapter_class = OFT


_ARGUMENTS = PeftArguments(
    class_name="OFTConfig",
    fields={
        **TARGETS,
        **EXCLUDED,
        **STORED,
        **bias("oft_only"),
        **same_as(
            OFTConfig, "r", "module_dropout", "block_share", "use_cayley_neumann",
            "num_cayley_neumann_terms", "coft", "eps", "oft_block_size",
        ),
        "init_weights": ours(True, "init_weights"),
    },
    implied={"convention": "peft"},
)  # fmt: skip
# the first release of PEFT with the current Neumann series
_RELEASE = "0.18.0"


def _refuse(fields: Mapping[str, Any]) -> str | None:
    """Return why a config of PEFT's OFT cannot be reproduced."""
    said = fields.get("peft_version")
    match = re.match(r"(\d{1,9})\.(\d{1,9})", said) if isinstance(said, str) else None
    is_old = match is None or (int(match[1]), int(match[2])) < (0, 18)
    if not is_old or not fields.get("use_cayley_neumann", True):
        return None
    return (
        f"it says use_cayley_neumann=True, and peft_version={str(said)[:40]!r}: before {_RELEASE} "
        f"PEFT's Neumann series had another last term, so the adapter would compute something "
        f"else. Merge it with the release that trained it. If that was {_RELEASE} or later, write "
        f'"peft_version": "{_RELEASE}" there.'
    )


def _read_fields(layer: PeftLayer, fields: Fields) -> Fields:
    """Return the fields of our config at a layer.

    The tensor determines the blocks: PEFT takes the nearest size or number that divides the width.
    """
    fields = {**without_idle(OFTConfig, fields), "convention": "peft"}
    # a tensor has b (b - 1) / 2 numbers for each block of b features
    b = (1 + math.isqrt(1 + 8 * layer.tensors["oft_R"].shape[-1])) // 2
    number, rest = divmod(rotated_features(layer.site), b)
    if rest:
        # the comparison with the model finds the difference
        return fields
    return {**fields, **({"r": number} if fields["r"] else {"oft_block_size": b})}


def _unsayable(placement: Placement) -> str | None:
    site = placement.site
    if math.prod(site.kernel) > 1 and placement.config["convention"] != "peft":
        return f"OFTConfig(convention='paper') at {site.path!r}, where PEFT sums patches"
    why = not_plain_2d(site, "an OFTConfig") or ignored(site, "kernel_size", "dilation")
    return why or unsayable(placement, "an OFTConfig", "PEFT has no OFT")


def _write_layers(layers: Sequence[PeftOutput], said: Sequence[Fields]) -> list[Fields]:
    """Return PEFT's config fields for each layer: blocks by number if only sizes differ."""
    widths = [rotated_features(layer.parts[0].placement.site) for layer in layers]
    numbers = [f["r"] or d // f["oft_block_size"] for f, d in zip(said, widths, strict=True)]
    by_number = len({*numbers}) == 1 and len({f["oft_block_size"] for f in said}) > 1
    blocks = {"r": numbers[0], "oft_block_size": 0} if by_number else {}
    return [{**fields, **blocks, "peft_version": _RELEASE} for fields in said]


spelled(
    lambda config: PeftSpelling(
        config=config,
        peft_type="OFT",
        beside=frozenset({"bias"}),
        arguments=_ARGUMENTS,
        tensors={"oft_R": ("oft_R.weight",)},
        embedding_tensors={"oft_R": ("oft_embedding_R.weight",)},
        refuse=_refuse,
        read_fields=_read_fields,
        unsayable=_unsayable,
        write_layers=_write_layers,
    )
)(OFTConfig)
