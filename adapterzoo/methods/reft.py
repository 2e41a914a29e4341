"""ReFT — Representation Finetuning: LoReFT, NoReFT and DiReFT.

Paper: Wu et al. 2024, arXiv:2404.03592, eq. 2 (LoReFT; NoReFT for any R, §D.1), eq. 3 (DiReFT).
At the first and last real tokens of the prompt, in a block's output h, A and R `[r, d_model]`:

    LoReFT, NoReFT    h ← h + (φ(A h + a) − R h) R
    DiReFT            h ← h + φ(A h + a) R

Differs from the paper: nothing. Differs from adapters: padding of short rows is not edited;
decoders use their own mask; `generate` does not edit new tokens; R is orthonormalized in each
forward, while adapters keeps a `[d_model, d_model]` base that one step with weight decay zeroes.
Cost per site: 2 r · d_model + r parameters for each unit, on a few tokens. Cannot do: merging.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from adapterzoo.activations import ActivationName
from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.call import StackCall
from adapterzoo.config_base import config_class
from adapterzoo.configs import Placement, architectures, config_strings
from adapterzoo.contracts import Adapter, BaseLayer
from adapterzoo.errors import ConfigError
from adapterzoo.fields import MAX_WIDTH, SEED, Choice, Either, Layers, Range, Share, field
from adapterzoo.spelling import spelled

from . import _reft_spelling
from ._beside import BesideConfig
from ._init import DTYPE, DTYPES, drawn
from ._reft_unit import ReftUnit
from ._sublayers import block_sites

_COUNT = Range(0, 65_536)


@architectures.register("reft")
@spelled(_reft_spelling.adapterhub)
@config_class
class ReftConfig(BesideConfig):
    """Config of ReFT; the fields are those of adapters.

    Attributes:
        layers: "all", or numbers of the blocks whose outputs are edited.
        prefix_positions: how many tokens at the start of the prompt are edited, 0 to 65,536.
        suffix_positions: how many at its end, 0 to 65,536; these take precedence if both overlap.
        r: rank of the subspace, 1 to the model's width.
        orthogonality: whether the rows of R are orthonormal.
        tied_weights: whether prefix and suffix share one unit (A, a and R).
        subtract_projection: whether R h is subtracted; False for DiReFT.
        dropout: probability, 0 to below 1, of dropping a feature of an edited token.
        non_linearity: φ; None for the identity.
        output_reft: must be True.
        init_weights_seed: makes the initial values reproducible; they differ from site to site.
        dtype: of the parameters, by name ("float32"); None for that of the block.
    """

    architecture: ClassVar[str] = "reft"
    layers: str | tuple[int, ...] = field("all", Either(Choice("all"), Layers()))
    prefix_positions: int = field(3, _COUNT)
    suffix_positions: int = field(0, _COUNT)
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
        """Check every field, and that some position is edited."""
        super().__post_init__()
        name = type(self).__name__
        if not self.layers:
            raise ConfigError(f"{name}(layers=[]): no block is left to edit. Write layers='all'.")
        if not self.prefix_positions + self.suffix_positions:
            name = f"{name}(prefix_positions=0, suffix_positions=0)"
            raise ConfigError(f"{name}: no position is left to edit. Write prefix_positions=3.")

    @property
    def starts_as_identity(self) -> bool:
        """False: A and R start with random values."""
        return False

    @property
    def slot_fields(self) -> frozenset[str]:
        """The rank, unless orthonormal rows would add φ of something."""
        identity = self.non_linearity is None and self.subtract_projection
        return frozenset({"r"}) if identity or not self.orthogonality else frozenset()

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for the output of each block in `layers`."""
        wanted = None if isinstance(self.layers, str) else self.layers
        sites = block_sites(anatomy, wanted, f"{type(self).__name__}(layers={self.layers!r})")
        return [Placement(site, self, "reft_layer") for site in sites]

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Reft:
        """Return a new adapter for the site."""
        return Reft(self, site, device, dtype)


@config_strings.register("loreft")
@config_class
class LoReftConfig(ReftConfig):
    """Wu et al. 2024, eq. 2: an edit in a subspace with an orthonormal basis."""

    orthogonality: bool = True


@config_strings.register("noreft")
@config_class
class NoReftConfig(ReftConfig):
    """LoReFT without the orthonormal rows."""

    orthogonality: bool = False


@config_strings.register("direft")
@config_class
class DiReftConfig(ReftConfig):
    """Wu et al. 2024, eq. 3: an edit without the difference of projections."""

    orthogonality: bool = False
    subtract_projection: bool = False


class Reft(Adapter):
    """The edit of a block's output; `units` has "0" for the prefix or both ends, "1" otherwise."""

    container, reads_call, reads_prompt = "refts", True, True

    def __init__(
        self, config: ReftConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the units; raise a `ConfigError` if r is larger than the width of the model."""
        super().__init__()
        if config.r > (d := site.d_out):
            where = f"{type(config).__name__}(r={config.r}) at {site.path!r}"
            raise ConfigError(f"{where}: the states have {d} features. Write r={d} or less.")
        self.counts = {"0": config.prefix_positions, "1": config.suffix_positions}
        new = partial(drawn, device=device, dtype=DTYPES[config.dtype] if config.dtype else dtype)
        # a unit without positions would get no gradient
        names = ["0"] if config.tied_weights else [n for n, count in self.counts.items() if count]
        self.units = nn.ModuleDict({n: ReftUnit(config, d, f"{site.path}/{n}", new) for n in names})

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the tensors of the units, with more rows of R if the slot has them."""
        pairs = ((n, cast("ReftUnit", u), slot.units[n]) for n, u in self.units.items())
        wide = {n: u.widened(len(cast("ReftUnit", other).projection)) for n, u, other in pairs}
        return {f"units.{n}.{key}": t for n, tensors in wide.items() for key, t in tensors.items()}

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the block's output with the edit. `x` `[rows, tokens, d_model]`, same shape."""
        if not (call := base.call).has_prompt(x):
            return base(x)
        # first, so that an unreadable mask raises before the block runs
        ends, h = self._ends(call, x), base(x)  # h [rows, tokens, d_model]
        # some blocks return fewer tokens; an extra state receives the edits of missing tokens
        ends = ends if h.shape[:-1] == x.shape[:-1] else self._ends(call, h)
        states = edited = pad(h.flatten(0, -2), (0, 0, 0, 1))  # [rows · tokens + 1, d_model]
        for name, at in zip(self.counts, ends, strict=True):
            if at.shape[1]:
                unit = self.units[name if name in self.units else "0"]
                edited = edited.index_put((at,), unit(states[at]))  # [rows · tokens + 1, d_model]
        return edited[:-1].view(h.shape)  # [rows, tokens, d_model]

    def _ends(self, call: StackCall, x: Tensor) -> tuple[Tensor, ...]:
        """Return the edited tokens of the states `x`, `[rows, prefix]` and `[rows, suffix]`."""
        sizes = [min(count, x.shape[:-1].numel()) for count in self.counts.values()]
        return tuple(call.prompt_ends(x, *sizes).split(sizes, 1))
