"""ReFT — Representation Finetuning: LoReFT, NoReFT and DiReFT.

Paper: Wu et al. 2024, arXiv:2404.03592, eq. 2 (LoReFT; NoReFT for any R, §D.1), eq. 3 (DiReFT).
At the first and last real tokens of the prompt, in a block's output h, A and R `[r, d_model]`:

    LoReFT, NoReFT    h ← h + (φ(A h + a) − R h) R
    DiReFT            h ← h + φ(A h + a) R

Differs from the paper: nothing. Differs from adapters: the padding of short rows is not edited;
decoders use their own mask; `generate` does not edit new tokens; R is orthonormalized in each
forward, while adapters keeps a `[d_model, d_model]` base that one step with weight decay zeroes.
Cost per site: 2 r · d_model + r parameters for each unit, on a few tokens. Cannot do: merging.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Self, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, pad

from adapterzoo.activations import ActivationName, activation
from adapterzoo.anatomy import Anatomy, Kind, Site
from adapterzoo.call import StackCall
from adapterzoo.config import (
    MAX_WIDTH,
    SEED,
    AdapterConfig,
    Choice,
    Either,
    Layers,
    Placement,
    Range,
    Share,
    architectures,
    check_blocks,
    config_class,
    config_strings,
    field,
)
from adapterzoo.contracts import Adapter, BaseLayer, compute_dtype, widest
from adapterzoo.errors import CheckpointError, ConfigError, SiteError
from adapterzoo.spelling import (
    AdapterHubFile,
    AdapterHubSpelling,
    Container,
    Fields,
    Tensors,
    same,
    spelled,
)

from ._copies import ConfigWithCopies
from ._init import DTYPE, drawn, dtype_named, generator, kaiming, uniform
from ._parts import Affine

_New: TypeAlias = Callable[[tuple[int, ...], Callable[[Tensor], Tensor]], nn.Parameter]

_COUNT = Range(0, 65_536)


@architectures.register("reft")
@config_class
class ReftConfig(ConfigWithCopies):
    """Config of ReFT; the fields are those of adapters.

    Attributes:
        layers: "all", or numbers of the blocks whose outputs are edited.
        prefix_positions: number of edited tokens at the start of the prompt, 0 to 65,536.
        suffix_positions: the same at its end, 0 to 65,536; they take precedence if both overlap.
        r: rank of the subspace, 1 to the model's width.
        orthogonality: whether the rows of R are orthonormal.
        tied_weights: whether prefix and suffix share one unit (A, a and R).
        subtract_projection: whether R h is subtracted; False for DiReFT.
        dropout: probability, 0 to below 1, of dropping a feature of an edited token.
        non_linearity: φ; None for the identity.
        output_reft: must be True.
        init_weights_seed: makes the initial values reproducible; they differ from site to site.
        dtype: dtype of the parameters, by name ("float32"); None for that of the block.
    """

    architecture: ClassVar[str] = "reft"
    starts_as_identity = False

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
        if not self.layers or not self.prefix_positions + self.suffix_positions:
            hint = "prefix_positions=3" if self.layers else "layers='all'"
            raise ConfigError(f"{type(self).__name__}: nothing is left to edit. Write {hint}.")

    @property
    def slot_fields(self) -> frozenset[str]:
        """The rank, unless added orthonormal rows would change the result through φ."""
        identity = self.non_linearity is None and self.subtract_projection
        return frozenset({"r"}) if identity or not self.orthogonality else frozenset()

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for the output of each block in `layers`.

        Raises:
            SiteError: the model has no blocks, or a block whose output is not one state of known
                width for each token.
        """
        check_blocks(anatomy, type(self).__name__)
        found = []
        for block in anatomy.blocks:
            if not isinstance(self.layers, str) and block.layer not in self.layers:
                continue
            path, d = block.output or "", block.d_model
            if block.states or not (path and d):
                why = block.states or "not known, or of unknown width"
                raise SiteError(
                    f"{type(self).__name__}(layers={self.layers!r}): the output of {block.path!r} "
                    f"is {why}. Write layers=[…] with other blocks, if any differ."
                )
            kind: Kind = "block" if path == block.path else "norm"
            site = Site(path, "other", block.layer, block.stack, kind, d, d)
            found.append(Placement(site, self, "reft_layer"))
        return found


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
    """The edit of a block's output; `units` has "0" for the prefix or both, "1" for the suffix."""

    container, reads_call, reads_prompt = "refts", True, True

    def __init__(
        self, config: ReftConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Create the units; raise a `ConfigError` if r is larger than the model's width."""
        super().__init__()
        if config.r > (d := site.d_out):
            where = f"{type(config).__name__}(r={config.r}) at {site.path!r}"
            raise ConfigError(f"{where}: the states have {d} features. Write r={d} or less.")
        self.counts = {"0": config.prefix_positions, "1": config.suffix_positions}
        new = partial(drawn, device=device, dtype=dtype_named(config.dtype, dtype))
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


ReftConfig.adapter_class = Reft


class ReftUnit(nn.Module):
    """One intervention: drop(h + (φ(A h + a) − R h) R), with A and a in `source`."""

    def __init__(self, config: ReftConfig, d: int, name: str, new: _New) -> None:
        """Initialize A and a like torch's linear layers; R with orthonormal rows if required."""
        super().__init__()
        draw, shape = generator(config.init_weights_seed, name), (config.r, d)
        self.source = Affine(new(shape, kaiming(draw)), new(shape[:1], uniform(d**-0.5, draw)))
        orthogonal = partial(nn.init.orthogonal_, generator=draw)
        self.projection = new(shape, orthogonal if config.orthogonality else kaiming(draw))
        self.config = config
        self.activation = activation(config.non_linearity)

    def forward(self, h: Tensor) -> Tensor:
        """Return the edited states. `h` `[rows, positions, d_model]`, same shape and dtype."""
        dtype, h = h.dtype, h.to(self.projection.dtype)
        R = self.rows()  # [r, d_model]
        change = self.activation(self.source(h))  # [rows, positions, r]
        if self.config.subtract_projection:
            change = change - linear(h, R)  # [rows, positions, r]
        return dropout(h + change @ R, self.config.dropout, self.training).to(dtype)

    def rows(self) -> Tensor:
        """Return R `[r, d_model]`, with orthonormal rows if the config requires them."""
        if not self.config.orthogonality:
            return self.projection
        wide = self.projection.to(compute_dtype(self.projection.dtype))
        return orthonormal(wide).to(self.projection.dtype)

    def widened(self, rank: int) -> dict[str, Tensor]:
        """Return the tensors of an equal unit with more rows of R.

        Rows at the end of R do not change the orthonormal rows before them. The new ones are also
        orthonormal, and equal the new ones of A, with a = 0: without φ, A h + a − R h is zero.

        Args:
            rank: the new rank; at most r returns the tensors unchanged.
        """
        tensors, r = dict(self.state_dict()), len(self.projection)
        if not self.config.orthogonality or rank <= r:
            return tensors
        wide = self.projection.detach().to(compute_dtype(self.projection.dtype))
        q = torch.linalg.qr(wide.T, mode="complete").Q  # [d_model, d_model]
        more = q[:, r:rank].T.to(self.projection.dtype)  # [rank − r, d_model]
        for key in ("projection", "source.weight"):
            tensors[key] = torch.cat([tensors[key], more])  # [rank, d_model]
        return tensors


def orthonormal(R: Tensor) -> Tensor:
    """Return an orthonormal basis of the rows of R, both `[r, d_model]`; R itself if it is one."""
    # R Rᵀ = L Lᵀ, so the rows of L⁻¹ R are orthonormal; L = I if those of R already are
    L = torch.linalg.cholesky(R @ R.T)  # [r, r]
    rows: Tensor = torch.linalg.solve_triangular(L, R, upper=False)  # [r, d_model]
    return rows


# --- in AdapterHub's files ---

_ORIGINAL = "projection.parametrizations.weight.original"
_PREFIX, _SUFFIX = "units.0.", "units.1."
_BASE = "projection.parametrizations.weight.0.base"


def _adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells ReFT."""
    return AdapterHubSpelling(
        config=config,
        architecture=("reft",),
        fields=same(
            "layers", "prefix_positions", "suffix_positions", "r", "orthogonality", "tied_weights",
            "dropout", "non_linearity", "dtype", "output_reft", "init_weights_seed",
        ),
        # read if a file has it
        omitted=("subtract_projection",),
        unsayable=_unsayable,
        read_fields=_read_fields,
        containers=(Container("refts", "block", below="reft_layer", read=_read, write=_write),),
    )  # fmt: skip


def _used(config: AdapterConfig) -> tuple[str, ...]:
    """Return the names of the units that edit any tokens."""
    values = config.to_dict()
    if values["tied_weights"]:
        return (_PREFIX,)
    counts = {_PREFIX: values["prefix_positions"], _SUFFIX: values["suffix_positions"]}
    return tuple(unit for unit, count in counts.items() if count)


def _read_fields(fields: Fields, _file: AdapterHubFile) -> Fields:
    """Return the fields of a file; warn if they fit both NoReFT and DiReFT."""
    if not fields.get("orthogonality", True) and "subtract_projection" not in fields:
        warnings.warn(
            "adapter_config.json fits NoReFT and DiReFT, which adapters cannot tell apart: NoReFT "
            "is loaded. For DiReFT write 'subtract_projection': false in 'config' in the file.",
            stacklevel=2,
        )
    return fields


def _unsayable(config: AdapterConfig) -> str | None:
    """Return the reason why a file would be read as one of another method."""
    if config.get("subtract_projection"):
        return None
    return "it has no subtract_projection=False, so DiReFT would be loaded as NoReFT"


def _units(tensors: Tensors) -> dict[str, Tensors]:
    """Return the tensors by unit, e.g. "units.0."."""
    found: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        unit, number, parameter = name.split(".", 2)
        found.setdefault(f"{unit}.{number}.", {})[parameter] = tensor
    return found


def _read(tensors: Tensors, config: AdapterConfig) -> Tensors:
    found: Tensors = {}
    for unit, own in _units(tensors).items():
        if unit not in _used(config):
            continue
        for end in ("weight", "bias"):
            found[f"{unit}source.{end}"] = own.pop(f"learned_source.{end}")
        if _ORIGINAL in own:
            original, base = own.pop(_ORIGINAL), own.pop(_BASE)
            rows = _rows(*(t.to(widest(t.device)) for t in (original, base))).to(original.dtype)
        else:
            rows = own.pop("projection.weight")
        found[f"{unit}projection"] = rows
        # the comparison with the model finds surplus tensors
        found |= {f"{unit}{name}": tensor for name, tensor in own.items()}
    return found


def _rows(original: Tensor, base: Tensor) -> Tensor:
    """Return R `[r, d]` from torch's orthogonal parametrization.

    Raises:
        CheckpointError: the tensors do not match.
    """
    if original.dim() != 2 or base.shape != (original.shape[1],) * 2:
        raise CheckpointError(
            f"the file has a projection {[*original.shape]} and its base {[*base.shape]}, not "
            f"[r, d] and [d, d]. Copy the file again."
        )
    below = original.T.tril(-1)  # [d, r]
    scale = original.T.diagonal().int().to(below)  # [r]
    tau = 2 / (1 + below.square().sum(0))  # [r]
    Q = torch.linalg.householder_product(below, tau) * scale  # [d, r]
    rows: Tensor = (base @ Q).T  # [r, d]
    return rows


def _write(tensors: Tensors, config: AdapterConfig) -> Tensors:
    found: Tensors = {}
    units = _units(tensors)
    values = config.to_dict()
    if not values["tied_weights"]:
        # adapters also saves unused units
        any_unit = next(iter(units.values()))
        units = {unit: units.get(unit, any_unit) for unit in (_PREFIX, _SUFFIX)}
    for unit, own in units.items():
        for end in ("weight", "bias"):
            found[f"{unit}learned_source.{end}"] = own[f"source.{end}"]
        if not values["orthogonality"]:
            found[f"{unit}projection.weight"] = own["projection"]
            continue
        R = own["projection"]
        # orthonormal rows as in the forward pass, completed to a basis
        rows = orthonormal(R.to(widest(R.device)))  # [r, d]
        base = torch.linalg.qr(rows.T, mode="complete").Q  # [d, d]
        base[:, : len(R)] = rows.T
        found[f"{unit}{_ORIGINAL}"] = -torch.eye(*R.shape, dtype=R.dtype)
        found[f"{unit}{_BASE}"] = base.to(R.dtype)
    return found


spelled(_adapterhub)(ReftConfig)
