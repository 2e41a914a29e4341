"""The table of prefix tuning: keys and values of all attentions of one location."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from adapterzoo.activations import activation
from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import Ejectable, SharedModules

from ._init import drawn, generator, kaiming, normal, uniform
from ._products import Affine

SELF = "self_prefix"
"""Location of self-attentions."""
TIED = "tied_self_prefix"
"""Location of the self-attentions of a decoder that share keys and values as in PEFT."""


def location_of(attention: Site, anatomy: Anatomy, tied: bool) -> str:
    """Return the location of an attention in a model without towers.

    Args:
        attention: of the model.
        anatomy: of the model.
        tied: whether layers of a decoder beside an encoder share keys and values.
    """
    if attention.cross:
        return "cross_prefix"
    decoders = {a.stack for a in anatomy.attentions if a.cross}
    if decoders and attention.stack not in decoders:
        return "encoder_prefix"
    return TIED if decoders and tied else SELF


def by_tower(placements: Sequence[Placement]) -> list[Placement]:
    """Return the placements with a location for each tower, such as "text_model_self_prefix".

    Towers of text and images get tables of their own, since their widths differ.

    Args:
        placements: at attentions, with the locations of a model without towers.
    """
    towers = [p.site.stack.partition(".")[0] if p.location == SELF else "" for p in placements]
    if len({*towers} - {""}) < 2:
        return [*placements]
    pairs = zip(placements, towers, strict=True)
    return [replace(p, location=f"{tower}_{SELF}") if tower else p for p, tower in pairs]


class PrefixTable(nn.Module):
    """T `[P, Σ H (key width + value width)]` of the attentions of one location, in model order.

    Attributes:
        table: T itself if it is flat; otherwise None.
        wte: E `[P, d_model]`, unless T is flat.
        down: W₁, b₁ `[m, d_model]`, unless T is flat.
        up: W₂, b₂ `[Σ H (key width + value width), m]`, unless T is flat.
        places: path of an attention → the first column of its keys.
    """

    def __init__(
        self,
        config: AdapterConfig,
        sites: Sequence[Site],
        location: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make the parameters.

        Args:
            config: of the adapter.
            sites: the attentions.
            location: of them, such as "self_prefix".
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        source = generator(config["init_weights_seed"], location)
        P, m, d = config["prefix_length"], config["bottleneck_size"], sites[0].d_in
        self.places: dict[str, int] = {}
        widths = [sum(site.head_widths) * site.heads for site in sites]
        starts, width = list(accumulate(widths, initial=0)), sum(widths)
        for i, site in enumerate(sites):
            # PEFT doubles its list of pairs and gives each layer two of them, of which one is read
            pair = 2 * i % len(sites) if location == TIED else i
            self.places[site.path] = starts[pair]
        self.dropout: float = config["dropout"]
        self.activation = activation(config["non_linearity"])
        if config["flat"]:
            self.table = drawn((P, width), normal(1.0, source), device, dtype)
            return
        self.register_parameter("table", None)
        self.wte = drawn((P, d), normal(1.0, source), device, dtype)
        fresh = kaiming(source)

        def layer(d_out: int, d_in: int) -> Affine:
            near = uniform(d_in**-0.5, source)
            bias = drawn((d_out,), near, device, dtype)
            return Affine(drawn((d_out, d_in), fresh, device, dtype), bias)

        self.down, self.up = layer(m, d), layer(width, m)

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
        """Keep T instead of the MLP that computes it; False if there is none."""
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
