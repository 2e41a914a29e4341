"""Prefix tuning.

Paper: Li & Liang 2021, arXiv:2101.00190, eq. 3 and §4.3; gates as in UniPELT, Mao et al. 2022,
arXiv:2110.07577, §3.2.
A table T = W₂ φ(W₁ E + b₁) + b₂, trained directly if `flat`, holds P keys and values for each
attention: K' = [Tₖ; K], V' = [Tᵥ; V], after projection and rotation, visible to every query. With a
gate g, the mean of σ(W x + b) over the prompt, they are g Tₖ and g Tᵥ; x is the attention's input.

Differs from the paper: nothing. Differs from adapters: a gate reads the real tokens of the prompt,
so padding and a cache change nothing, and a relative position bias keeps the distances between
tokens; `convention="adapterhub"` computes the same as adapters. Differs from PEFT: an
encoder-decoder has prefixes in all attentions, and tokens keep their positions. PEFT's files load
with `positions="shifted"`: tokens are numbered from P on, as after a cache; and with
`convention="peft"`: layer i of an encoder-decoder's decoder takes keys and values 2i mod N.
Cost: P · 2 · N · H · e parameters for N attentions of H heads of width e; an MLP in training.
Cannot do: merging; unknown classes that compute attention scores, or shifted positions, themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from adapterzoo.activations import ActivationName, activation
from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.config import (
    MAX_WIDTH,
    SEED,
    Choice,
    Layers,
    Maybe,
    Placement,
    Range,
    Share,
    config_strings,
    field,
    method_config,
)
from adapterzoo.contracts import (
    Adapter,
    AttentionAdapter,
    BaseLayer,
    Ejectable,
    PositionAdapter,
    Prefix,
    SharedModules,
)
from adapterzoo.errors import SiteError
from adapterzoo.methods._copies import ConfigWithCopies
from adapterzoo.methods._init import (
    DTYPE,
    constant,
    drawn,
    dtype_named,
    generator,
    kaiming,
    normal,
    uniform,
)
from adapterzoo.methods._parts import Affine, Gate
from adapterzoo.spelling import spelled

from .formats import SELF, TIED, cartridge, prefix_adapterhub, prefix_peft


@spelled(prefix_adapterhub, prefix_peft, cartridge)
@method_config("prefix_tuning")
class PrefixTuningConfig(ConfigWithCopies):
    """Config of prefix tuning; the fields are those of adapters, `convention` and `positions`.

    Attributes:
        encoder_prefix: prefixes in the encoder of an encoder-decoder.
        cross_prefix: prefixes in its cross-attention.
        leave_out: numbers of blocks without a prefix; encoder blocks come first.
        flat: whether T is trained directly, without an MLP.
        prefix_length: P, 1 to 65,536.
        bottleneck_size: width inside the MLP.
        non_linearity: φ.
        dropout: probability, 0 to below 1, of dropping a value of T.
        use_gating: whether the keys and values of each attention have a gate.
        shared_gating: whether keys and values share the gate.
        init_weights: None: the values of the prefix are normal; "zero": they are zero.
        init_weights_seed: makes the initial values reproducible.
        convention: "paper"; "peft": layers of an encoder-decoder's decoder share keys and values;
            or "adapterhub": a gate reads all tokens of the call, padding included; a relative
            position bias counts keys from the first of the prefix, and rotary positions count
            padding.
        positions: "kept": tokens are numbered as without a prefix; "shifted": from P on.
        dtype: dtype of the parameters, by name ("float32"); None for that of the model.
    """

    # T if it is flat, else the parameters of the MLP
    averages_shared = True
    starts_as_identity = False

    encoder_prefix: bool = True
    cross_prefix: bool = True
    leave_out: tuple[int, ...] = field((), Layers())
    flat: bool = False
    prefix_length: int = field(30, Range(1, MAX_WIDTH))
    bottleneck_size: int = field(512, Range(1, MAX_WIDTH))
    non_linearity: str = field("tanh", ActivationName())
    dropout: float = field(0.0, Share())
    use_gating: bool = False
    shared_gating: bool = field(True, needs="use_gating=True")
    init_weights: str | None = field(None, Maybe(Choice("zero")))
    init_weights_seed: int | None = field(None, SEED)
    convention: str = field("paper", Choice("paper", "adapterhub", "peft"))
    positions: str = field("kept", Choice("kept", "shifted"))
    dtype: str | None = field(None, DTYPE)

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return placements at attention modules, and at modules with shifted positions.

        Raises:
            SiteError: an attention cannot take keys, none is left, or positions cannot be shifted.
        """
        if anatomy.unreachable or not anatomy.attentions:
            why = anatomy.unreachable or anatomy.reason or "it has no attention"
            raise SiteError(
                f"{type(self).__name__}: this model's attention takes no keys and values ({why}). "
                f"Write a method at layers, such as LoRAConfig()."
            )
        wanted = {"cross_prefix": self.cross_prefix, "encoder_prefix": self.encoder_prefix}
        found = list[Placement]()
        for attention in anatomy.attentions:
            at = location_of(attention, anatomy, self.convention == "peft")
            if wanted.get(at, True) and attention.layer not in self.leave_out:
                found.append(Placement(attention, self, at))
        found = by_tower(found)
        if not found:
            raise SiteError(
                f"{type(self).__name__}: leave_out leaves no attention in {len(anatomy.blocks)} "
                f"blocks. Write a shorter leave_out."
            )
        stacks = {p.site.stack for p in found if not p.site.cross and self.positions == "shifted"}
        for stack in stacks & anatomy.unmovable.keys():
            raise SiteError(
                f"{type(self).__name__}(positions='shifted'): the positions in {stack!r} cannot "
                f"change: {anatomy.unmovable[stack]}. Write positions='kept'."
            )
        moved = [site for site in anatomy.positions if site.stack in stacks]
        return found + [Placement(site, self, "positions") for site in moved]

    def shared(
        self, placements: Sequence[Placement], device: torch.device, dtype: torch.dtype
    ) -> PrefixTables:
        """Return the table of each location."""
        dtype = dtype_named(self.dtype, dtype)
        tables = PrefixTables()
        for at in dict.fromkeys(p.location for p in placements if p.site.heads):
            own = [p.site for p in placements if p.location == at]
            tables[at] = PrefixTable(self, own, at, device, dtype)
        return tables

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Adapter:
        """Return the adapter of an attention, or of a module with shifted positions."""
        if site.kind == "positions":
            return PositionShift(self.prefix_length)
        return PrefixTuning(self, site, device, dtype_named(self.dtype, dtype))


config_strings.register("prefix_tuning_flat")(partial(PrefixTuningConfig, flat=True))


class PrefixTuning(AttentionAdapter):
    """The keys and values of one attention, from the adapter's table."""

    container = "prefix_gates"

    def __init__(
        self, config: PrefixTuningConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the gate, if any, for an attention."""
        super().__init__()
        self.path, self.heads, self.widths = site.path, site.heads, site.head_widths
        self.in_window = config.positions == "shifted"
        self.counts_padding = config.convention == "adapterhub"
        self.distances: Literal["kept", "shifted"] | None = None
        if not site.cross:
            self.distances = "shifted" if config.convention == "adapterhub" else "kept"
        self.gate: Gate | None = None
        if config.use_gating:
            source = generator(config.init_weights_seed, f"{site.path}/gate")
            count = 1 if config.shared_gating else 2
            self.gate = Gate(site, config.convention, source, device, dtype, count)
            self.reads_call = self.gate.reads_call
            self.reads_prompt = self.gate.reads_sequence

    def forward(self, x: Tensor, base: BaseLayer) -> Prefix:  # type: ignore[override]
        """Return keys and values `[rows or 1, heads, P, width]`. `x` `[rows, tokens, d_model]`."""
        tables = cast("nn.ModuleDict", base.shared(self)).values()
        table = next(t for t in tables if self.path in cast("PrefixTable", t).places)
        sizes = [self.heads * width for width in self.widths]
        parts = table(self.path, sum(sizes)).split(sizes, 1)  # [P, heads · width] each
        heads = [part.unflatten(1, (self.heads, -1)) for part in parts]  # [P, heads, width] each
        keys, values = (part.transpose(0, 1)[None] for part in heads)  # [1, heads, P, width]
        if self.gate is not None:
            g = self.gate(x, base).to(keys.dtype)  # [rows, 1, 1 or 2]
            keys = g[..., :1, None] * keys  # [rows, heads, P, key width]
            values = g[..., -1:, None] * values
        return Prefix(keys, values, None, self.distances, self.in_window)


class PositionShift(PositionAdapter):
    """Token t has position t + P."""

    def __init__(self, length: int) -> None:
        """Store P."""
        super().__init__()
        self.length = length

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Call `base` with the positions after the prefix. `x` `[rows or 1, tokens]`."""
        return base(x + self.length)


# --- tables ---


def location_of(attention: Site, anatomy: Anatomy, tied: bool) -> str:
    """Return the location of an attention in a model without towers.

    Args:
        attention: the model's attention.
        anatomy: the model's anatomy.
        tied: whether layers of an encoder-decoder's decoder share keys and values.
    """
    if attention.cross:
        return "cross_prefix"
    decoders = {a.stack for a in anatomy.attentions if a.cross}
    if decoders and attention.stack not in decoders:
        return "encoder_prefix"
    return TIED if decoders and tied else SELF


def by_tower(placements: Sequence[Placement]) -> list[Placement]:
    """Return the placements with a location for each tower, such as "text_model_self_prefix".

    Towers of text and images get their own tables, since their widths differ.

    Args:
        placements: placements at attentions, with the locations of a model without towers.
    """
    towers = [p.site.stack.partition(".")[0] if p.location == SELF else "" for p in placements]
    if len({*towers} - {""}) < 2:
        return [*placements]
    pairs = zip(placements, towers, strict=True)
    return [replace(p, location=f"{tower}_{SELF}") if tower else p for p, tower in pairs]


class PrefixTable(nn.Module):
    """T `[P, Σ H (key width + value width)]` of the attentions of one location, in model order.

    Attributes:
        table: T itself if it is flat, else None.
        wte: E `[P, d_model]`, unless T is flat.
        down: W₁, b₁ `[m, d_model]`, unless T is flat.
        up: W₂, b₂ `[Σ H (key width + value width), m]`, unless T is flat.
        places: path of an attention → the first column of its keys.
    """

    def __init__(
        self,
        config: PrefixTuningConfig,
        sites: Sequence[Site],
        location: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make the parameters.

        Args:
            config: the adapter's config.
            sites: the attentions.
            location: where they act, such as "self_prefix".
            device: device for the parameters.
            dtype: dtype of the parameters.
        """
        super().__init__()
        source = generator(config.init_weights_seed, location)
        P, m, d = config.prefix_length, config.bottleneck_size, sites[0].d_in
        self.places: dict[str, int] = {}
        widths = [sum(site.head_widths) * site.heads for site in sites]
        starts, width = list(accumulate(widths, initial=0)), sum(widths)
        for i, site in enumerate(sites):
            # PEFT doubles its list of pairs and gives each layer two of them, one of which is read
            pair = 2 * i % len(sites) if location == TIED else i
            self.places[site.path] = starts[pair]
        self.dropout: float = config.dropout
        self.activation = activation(config.non_linearity)
        if config.flat:
            fill = constant(0.0) if config.init_weights == "zero" else normal(1.0, source)
            self.table = drawn((P, width), fill, device, dtype)
            return
        self.register_parameter("table", None)
        self.wte = drawn((P, d), normal(1.0, source), device, dtype)
        fresh = kaiming(source)

        def layer(d_out: int, d_in: int) -> Affine:
            near = uniform(d_in**-0.5, source)
            bias = drawn((d_out,), near, device, dtype)
            return Affine(drawn((d_out, d_in), fresh, device, dtype), bias)

        self.down, self.up = layer(m, d), layer(width, m)
        if config.init_weights == "zero":
            for parameter in self.up.parameters():
                nn.init.zeros_(parameter)

    def forward(self, path: str, size: int) -> Tensor:
        """Return the columns `[P, size]` of an attention's keys and values."""
        start = self.places[path]
        if self.table is not None:
            columns = self.table[:, start : start + size]
        else:
            inner = self.activation(self.down(self.wte))  # [P, m]
            weight, bias = self.up.weight, cast("Tensor", self.up.bias)
            columns = linear(inner, weight[start : start + size], bias[start : start + size])
        return dropout(columns, self.dropout, self.training)  # [P, size]

    @torch.no_grad()
    def eject(self) -> bool:
        """Replace the MLP by the T that it computes; return False without an MLP."""
        if self.table is not None:
            return False
        inner = self.activation(self.down(self.wte))  # [P, m]
        table = linear(inner, self.up.weight, self.up.bias)  # [P, width]
        trained = self.up.weight.requires_grad
        del self.wte, self.down, self.up
        self.table = nn.Parameter(table, trained)
        return True


class PrefixTables(SharedModules, Ejectable):
    """The table of each location."""

    container = "prefix_tunings"

    def eject(self) -> dict[str, bool]:
        """Make all tables flat."""
        done = [cast("PrefixTable", table).eject() for table in self.values()]
        return {"flat": True} if any(done) else {}
