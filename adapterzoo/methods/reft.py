"""ReFT — Representation Finetuning: LoReFT, NoReFT and DiReFT.

Paper: Wu et al. 2024, arXiv:2404.03592, eq. 2 (LoReFT), eq. 3 (DiReFT); NoReFT is LoReFT without
orthonormal rows (§D.1).
At chosen positions of a block's output h, with A and R `[r, d_model]`:

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
from torch.nn.functional import dropout, linear

from adapterzoo.activations import ActivationName, activation
from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.configs import (
    AdapterConfig,
    Placement,
    architectures,
    config_strings,
)
from adapterzoo.contracts import Adapter, BaseLayer, compute_dtype
from adapterzoo.errors import ConfigError, StateError
from adapterzoo.fields import (
    MAX_WIDTH,
    SEED,
    Choice,
    Either,
    Layers,
    Range,
    Share,
    field,
)
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
        projection: R `[r, d_model]`; where the config says so, its rows are made orthonormal
            before they are used.
    """

    def __init__(
        self, config: ReftConfig, site: Site, number: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters: A and a as torch's linear layers do, R with orthonormal rows.

        Args:
            config: of the adapter.
            site: gives the width.
            number: 0 for the prefix, 1 for the suffix.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        d, draw = site.d_out, generator(config.init_weights_seed, f"{site.path}/{number}")
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
        """The edited states. `h` `[rows, positions, d_model]`, same shape."""
        R = self.rows()  # [r, d_model]
        change = self.activation(self.source(h))  # [rows, positions, r]
        if self.subtracts:
            change = change - linear(h, R)  # [rows, positions, r]
        return dropout(h + change @ R, self.dropout, self.training)

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
        """Make the units.

        Args:
            config: of the adapter.
            site: the output of a block.
            device: of the parameters.
            dtype: of the block.

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
        numbers = ["0"] if config.tied_weights else [n for n, count in own.items() if count]
        self.units = nn.ModuleDict(
            {n: ReftUnit(config, site, int(n), device, dtype) for n in numbers}
        )

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """The block's output with the edit. `x` `[rows, tokens, d_model]`, same shape."""
        h = base(x)  # [rows, tokens, d_model]
        if h.dim() != 3:
            raise StateError(
                f"ReFT: a block returned {list(h.shape)}, and positions are counted in "
                f"[rows, tokens, d_model]. Write another method for this model."
            )
        call = base.call
        if not call.has_prompt(h):
            return h
        prompt, tokens = call.prompt(h), h.shape[1]
        first, count = prompt.int().argmax(1), prompt.sum(1)  # [rows] each
        # the suffix is the later edit, and starts from the old states
        out = self._edited(h, h, "0", first, count, min(self.prefix, tokens))
        size = min(self.suffix, tokens)
        return self._edited(h, out, "1", first + count - size, count - size, size)

    def _edited(
        self, h: Tensor, out: Tensor, unit: str, start: Tensor, valid: Tensor, size: int
    ) -> Tensor:
        """`out` with the edit of `h` from the positions `start` `[rows]` on.

        Args:
            h: the old states, `[rows, tokens, d_model]`.
            out: where the edit is entered, same shape.
            unit: "0" for the prefix, "1" for the suffix.
            start: of the edited positions, `[rows]`; may lie outside of the row.
            valid: how many of the positions exist, `[rows]`; for a suffix less its size.
            size: how many positions are looked at.
        """
        if not size:
            return out
        steps = torch.arange(size, device=h.device)  # [size]
        # positions of no token wrap around to others, where they change nothing
        at = ((start.unsqueeze(1) + steps) % h.shape[1]).unsqueeze(-1)  # [rows, size, 1]
        exists = steps < valid.unsqueeze(1) if unit == "0" else steps >= -valid.unsqueeze(1)
        at = at.expand(-1, -1, h.shape[2])  # [rows, size, d_model]
        old = h.gather(1, at)  # [rows, size, d_model]
        module = cast("ReftUnit", self.units[unit if unit in self.units else "0"])
        new = module(old.to(module.projection.dtype)).to(h.dtype)  # [rows, size, d_model]
        return out.scatter(1, at, torch.where(exists.unsqueeze(-1), new, out.gather(1, at)))
