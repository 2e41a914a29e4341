"""ReFT — Representation Finetuning: LoReFT, NoReFT and DiReFT.

Paper: Wu et al. 2024, arXiv:2404.03592, eq. 2 (LoReFT), eq. 3 (DiReFT), §D.1 (NoReFT: LoReFT with
any R). At chosen tokens of a block's output h, with A and R `[r, d_model]`:

    LoReFT, NoReFT    h ← h + (φ(A h + a) − R h) R
    DiReFT            h ← h + φ(A h + a) R

φ is the identity unless `non_linearity` names another. The first `prefix_positions` and the last
`suffix_positions` real tokens of the prompt are edited, the latter by a unit of its own unless
`tied_weights`; where the two overlap, the suffix wins.

Differs from the paper: nothing. Differs from adapters: positions are those of each row's own real
tokens, so that a short row edits no padding; decoders count in their own mask; `generate` edits the
prompt and never a new token; R is kept as `[r, d_model]`, made orthonormal again in each forward,
where adapters stores a `[d_model, d_model]` base that one step with weight decay sets to zero.
Cost per site: 2 r · d_model + r parameters for each unit, on a few tokens of each row.
Cannot do: merging, since the edit depends on the position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, pad

from adapterzoo.activations import ActivationName, activation
from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.call import StackCall
from adapterzoo.configs import AdapterConfig, Placement, architectures, config_strings
from adapterzoo.contracts import Adapter, BaseLayer, compute_dtype
from adapterzoo.errors import ConfigError
from adapterzoo.fields import MAX_WIDTH, SEED, Choice, Either, Layers, Range, Share, field
from adapterzoo.spelling import spelled

from . import _reft_spelling
from ._bottleneck_layer import Affine
from ._init import DTYPE, DTYPES, drawn, generator, kaiming, uniform
from ._sublayers import block_sites

_MAX_POSITIONS = 65_536


@architectures.register("reft")
@spelled(_reft_spelling.adapterhub)
@dataclass(frozen=True, kw_only=True)
class ReftConfig(AdapterConfig):
    """Config of ReFT; the fields are those of adapters.

    Attributes:
        layers: "all", or numbers of the blocks whose outputs are edited.
        prefix_positions: how many tokens at the start of the prompt are edited, from 0.
        suffix_positions: how many at its end, from 0.
        r: rank of the subspace, 1 to the model's width.
        orthogonality: whether the rows of R are orthonormal.
        tied_weights: whether prefix and suffix have one unit.
        subtract_projection: whether R h is subtracted; False for DiReFT.
        dropout: probability, 0 to below 1, of dropping a feature of an edited token.
        non_linearity: φ; None for the identity.
        output_reft: must be True.
        init_weights_seed: makes the initial values reproducible; they differ from site to site.
        dtype: of the parameters, by name ("float32"); None for that of the block.
    """

    architecture: ClassVar[str] = "reft"

    layers: str | tuple[int, ...] = field("all", Either(Choice("all"), Layers()))
    prefix_positions: int = field(3, Range(0, _MAX_POSITIONS))
    suffix_positions: int = field(0, Range(0, _MAX_POSITIONS))
    r: int = field(1, Range(1, MAX_WIDTH))
    orthogonality: bool = True
    tied_weights: bool = False
    subtract_projection: bool = True
    dropout: float = field(0.05, Share())
    non_linearity: str | None = field(None, ActivationName())
    output_reft: bool = field(True, Choice(True))
    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is not legal.
        """
        super().__post_init__()
        if not self.layers:
            raise ConfigError(
                f"{type(self).__name__}(layers=[]): no block is left to edit. Write layers='all'."
            )
        if not self.prefix_positions + self.suffix_positions:
            raise ConfigError(
                f"{type(self).__name__}(prefix_positions=0, suffix_positions=0): no position is "
                f"left to edit. Write prefix_positions=3."
            )

    @property
    def starts_as_identity(self) -> bool:
        """False: A and R are drawn."""
        return False

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """One placement for the output of each block.

        Raises:
            SiteError: the model has no blocks, or not those that are asked for.
        """
        wanted = None if isinstance(self.layers, str) else self.layers
        sites = block_sites(anatomy, wanted, f"{type(self).__name__}(layers={self.layers!r})")
        return [Placement(site, self, "reft_layer") for site in sites]

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Reft:
        """A fresh adapter for the site."""
        return Reft(self, site, device, dtype)


@config_strings.register("loreft")
@dataclass(frozen=True, kw_only=True)
class LoReftConfig(ReftConfig):
    """Wu et al. 2024, eq. 2: an edit inside of an orthonormal subspace."""

    orthogonality: bool = True


@config_strings.register("noreft")
@dataclass(frozen=True, kw_only=True)
class NoReftConfig(ReftConfig):
    """LoReFT without the orthonormal rows."""

    orthogonality: bool = False


@config_strings.register("direft")
@dataclass(frozen=True, kw_only=True)
class DiReftConfig(ReftConfig):
    """Wu et al. 2024, eq. 3: an edit without the difference of projections."""

    orthogonality: bool = False
    subtract_projection: bool = False


class ReftUnit(nn.Module):
    """One intervention: drop(h + (φ(A h + a) − R h) R).

    Attributes:
        source: A `[r, d_model]` and a `[r]`.
        projection: R `[r, d_model]`, before its rows are made orthonormal.
    """

    def __init__(
        self, config: ReftConfig, d: int, name: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Draw A and a as torch's linear layers do, and R with orthonormal rows if it has them."""
        super().__init__()
        draw = generator(config.init_weights_seed, name)
        fresh = kaiming(draw)
        self.source = Affine(
            drawn((config.r, d), fresh, device, dtype),
            drawn((config.r,), uniform(d**-0.5, draw), device, dtype),
        )
        rows = partial(nn.init.orthogonal_, generator=draw) if config.orthogonality else fresh
        self.projection = drawn((config.r, d), rows, device, dtype)
        self.orthogonality = config.orthogonality
        self.subtracts = config.subtract_projection
        self.dropout = config.dropout
        self.activation = activation(config.non_linearity)

    def forward(self, h: Tensor) -> Tensor:
        """The edited states. `h` `[rows, positions, d_model]`, same shape and dtype."""
        dtype, h = h.dtype, h.to(self.projection.dtype)
        R = self.rows()  # [r, d_model]
        change = self.activation(self.source(h))  # [rows, positions, r]
        if self.subtracts:
            change = change - linear(h, R)  # [rows, positions, r]
        return dropout(h + change @ R, self.dropout, self.training).to(dtype)

    def rows(self) -> Tensor:
        """R `[r, d_model]`, with orthonormal rows where the config says so."""
        R = self.projection
        if not self.orthogonality:
            return R
        wide = R.to(compute_dtype(R.dtype))
        # R Rᵀ = L Lᵀ, so that the rows of L⁻¹ R are orthonormal; L = I where those of R are
        L = torch.linalg.cholesky(wide @ wide.T)  # [r, r]
        rows: Tensor = torch.linalg.solve_triangular(L, wide, upper=False)  # [r, d_model]
        return rows.to(R.dtype)


class Reft(Adapter):
    """The edit of a block's output at both ends of the prompt.

    Attributes:
        units: "0" of the prefix and "1" of the suffix, those that edit anything; tied ones are "0".
    """

    reads_call = True

    def __init__(
        self, config: ReftConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the units for the output of a block.

        Raises:
            ConfigError: the rank is larger than the width of the model.
        """
        super().__init__()
        if config.r > site.d_out:
            raise ConfigError(
                f"{type(config).__name__}(r={config.r}) at {site.path!r}: the states have "
                f"{site.d_out} features. Write r={site.d_out} or less."
            )
        self.prefix, self.suffix = config.prefix_positions, config.suffix_positions
        dtype = DTYPES[config.dtype] if config.dtype else dtype
        # what edits nothing would get no gradient
        own = {"0": self.prefix, "1": self.suffix}
        names = ["0"] if config.tied_weights else [n for n, count in own.items() if count]
        self.units = nn.ModuleDict(
            {n: ReftUnit(config, site.d_out, f"{site.path}/{n}", device, dtype) for n in names}
        )

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """The block's output with the edit. `x` `[rows, tokens, d_model]`, same shape."""
        call = base.call
        # asked first: a mask that does not tell raises before the block runs
        ends = self._ends(call, x) if call.has_prompt(x) else None
        h = base(x)  # [rows, tokens, d_model]
        if ends is None:
            return h
        if h.shape[:-1] != x.shape[:-1]:
            ends = self._ends(call, h)
        # one more stands for the tokens that a short prompt lacks
        states = pad(h.flatten(0, -2), (0, 0, 0, 1))  # [rows · tokens + 1, d_model]
        edited = states
        for name, at in zip("01", ends, strict=True):
            if at.shape[1]:
                unit = cast("ReftUnit", self.units[name if name in self.units else "0"])
                edited = edited.index_put((at,), unit(states[at]))  # [rows · tokens + 1, d_model]
        return edited[:-1].view(h.shape)  # [rows, tokens, d_model]

    def _ends(self, call: StackCall, x: Tensor) -> tuple[Tensor, Tensor]:
        """The edited tokens of the states `x`, `[rows, prefix]` and `[rows, suffix]`."""
        tokens = x.flatten(0, -2).shape[0]
        first, last = min(self.prefix, tokens), min(self.suffix, tokens)
        prefix, suffix = call.prompt_ends(x, first, last).split((first, last), 1)
        return prefix, suffix
