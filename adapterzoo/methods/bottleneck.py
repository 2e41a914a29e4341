"""Bottleneck adapters, sequential and parallel.

Papers: Houlsby et al. 2019, arXiv:1902.00751 (`DoubleSeqBnConfig`); Pfeiffer et al. 2020,
arXiv:2005.00247 (`SeqBnConfig`); He et al. 2021, arXiv:2110.04366, eq. 7 (`ParBnConfig`);
Steitz & Roth 2024, arXiv:2406.06820 (`AdapterPlusConfig`).
f(x) = scaling · (W_up φ(W_down x + b_down) + b_up), with W_down `[width, d_model]`. With h a
sub-layer's output, inp the residual stream before it, and s = h + inp:

    sequential                  h ← h + f(h)
    original_ln_before, post-LN LN(s) ← LN(s + f(LN(s)))
    original_ln_before, pre-LN  s ← s + f(s)
    parallel                    h ← h + f(inp)

Differs from the papers: nothing. Differs from adapters: a seed gives each site values of its own;
`stochastic_depth` holds for parallel bottlenecks too, and "post_add" in pre-LN blocks, where it
means the same as elsewhere; a `Stack` of parallel bottlenecks adds all of them, not the last.
Cost per site: 2 · width · d_model + width + d_model parameters.
Cannot do: Compacter's shared matrices; configs that lose the model's own residual connection. Not
the identity at first, except with "mam_adapter". Where h is still scaled or dropped out on its way
to the sum, f acts before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy, Block, Site, SubLayer
from adapterzoo.configs import Placement, architectures, config_strings
from adapterzoo.contracts import Adapter, BaseLayer
from adapterzoo.spelling import spelled

from . import _bottleneck_spelling
from ._bottleneck_fields import BottleneckFields, invertible_adapters
from ._bottleneck_layer import Added, BottleneckLayer
from ._bottleneck_placed import PlacedBottleneck, moved_entry, placed_site
from ._sublayers import LOCATIONS, entry_placement, stream_site, sublayers


@architectures.register("bottleneck")
@spelled(_bottleneck_spelling.adapterhub)
@dataclass(frozen=True, kw_only=True)
class BnConfig(BottleneckFields):
    """Config of a bottleneck; see `BottleneckFields` for its fields."""

    architecture: ClassVar[str] = "bottleneck"

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each sub-layer that the config names."""
        wanted = {kind: field for kind, field in LOCATIONS.items() if getattr(self, field)}
        found = sublayers(anatomy, wanted, self.leave_out, type(self).__name__)
        self.warn_of_idle(len(anatomy.blocks))
        entry = [] if self.inv_adapter is None else [self._entry(anatomy)]
        return entry + [
            Placement(
                placed_site(anatomy, block, sub, self.placement) or self._site(block, sub),
                self,
                LOCATIONS[sub.kind],
            )
            for block, sub in found
        ]

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Adapter:
        """Return a fresh bottleneck for the site, or the invertible function."""
        if site.kind == "entry":
            adapter = invertible_adapters[str(self.inv_adapter)]()
            adapter.is_unscaled = site.factor is not None
            return adapter
        kind: type[BottleneckLayer] = Bottleneck
        if site.is_placed:
            kind = PlacedBottleneck
        elif self.is_parallel:
            kind = ParallelBottleneck
        elif site.kind == "norm" and self.original_ln_after:
            kind = NormBottleneck
        elif site.kind == "output" and self.original_ln_before:
            kind = StreamBottleneck
        return kind(self, site, device, dtype)

    def _entry(self, anatomy: Anatomy) -> Placement:
        moved = moved_entry(anatomy, self.placement)
        if moved is None:
            return entry_placement(self, anatomy)
        return Placement(moved, self, "invertible")

    def _site(self, block: Block, sub: SubLayer) -> Site:
        # whether the result is a function of s alone
        adds_to_h = self.residual_before_ln is True and not self.adapter_residual_before_ln
        of_stream = adds_to_h if self.original_ln_after else True
        if not self.original_ln_before:
            return stream_site(block, sub, "output", captures=self.is_parallel)
        if sub.norm is not None:
            return stream_site(block, sub, "norm", captures=not of_stream)
        # the output of a block is the stream, in another layout in some models
        is_stream = not block.states or sub.kind in block.apart
        if of_stream and is_stream and sub is block.sublayers[-1]:
            return stream_site(block, sub, "block", captures=False)
        return stream_site(block, sub, "output", captures=True)


@config_strings.register("seq_bn", "pfeiffer")
@dataclass(frozen=True, kw_only=True)
class SeqBnConfig(BnConfig):
    """Pfeiffer et al. 2020: one bottleneck per block, behind the feed-forward part."""

    mh_adapter: bool = False
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 16
    non_linearity: str = "relu"
    original_ln_before: bool = True


@config_strings.register("double_seq_bn", "houlsby")
@dataclass(frozen=True, kw_only=True)
class DoubleSeqBnConfig(BnConfig):
    """Houlsby et al. 2019: one bottleneck behind attention and one behind the feed-forward part."""

    mh_adapter: bool = True
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 16
    non_linearity: str = "swish"


@config_strings.register("seq_bn_inv", "pfeiffer+inv")
@dataclass(frozen=True, kw_only=True)
class SeqBnInvConfig(SeqBnConfig):
    """Pfeiffer et al. 2020 (MAD-X): one bottleneck per block, and an invertible function."""

    inv_adapter: str | None = "nice"
    inv_adapter_reduction_factor: float | None = 2


@config_strings.register("double_seq_bn_inv", "houlsby+inv")
@dataclass(frozen=True, kw_only=True)
class DoubleSeqBnInvConfig(DoubleSeqBnConfig):
    """Two bottlenecks per block, and an invertible function."""

    inv_adapter: str | None = "nice"
    inv_adapter_reduction_factor: float | None = 2


@config_strings.register("par_bn", "parallel")
@dataclass(frozen=True, kw_only=True)
class ParBnConfig(BnConfig):
    """He et al. 2021: a wide bottleneck beside the feed-forward part, the identity at first."""

    mh_adapter: bool = False
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 2
    non_linearity: str = "relu"
    init_weights: str = "mam_adapter"
    is_parallel: bool = True
    scaling: float | str = 4.0


@config_strings.register("scaled_par_bn", "scaled_parallel")
def scaled_par_bn() -> ParBnConfig:
    """He et al. 2021 with a learned scaling."""
    return ParBnConfig(scaling="learned")


@config_strings.register("adapter_plus")
@dataclass(frozen=True, kw_only=True)
class AdapterPlusConfig(BnConfig):
    """Steitz & Roth 2024: behind the block, a learned scaling per feature, stochastic depth."""

    mh_adapter: bool = False
    output_adapter: bool = True
    reduction_factor: float | Mapping[str, float] = 96
    non_linearity: str = "gelu"
    original_ln_before: bool = True
    original_ln_after: bool = False
    residual_before_ln: bool | str = False
    init_weights: str = "houlsby"
    scaling: float | str = "channel"
    stochastic_depth: float = 0.1


class Bottleneck(BottleneckLayer):
    """y ← y + f(y), with y the output of the module: h, the block's output, or the norm's."""

    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, add: Added) -> Tensor:
        """Return the output. `x` is the input, `y` the plain output `[*batch, d_model]`."""
        return add(y, y)


class ParallelBottleneck(BottleneckLayer):
    """h ← h + f(inp)."""

    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, add: Added) -> Tensor:
        """Return the output. `x` is the input, `y` is h `[*batch, d_model]`."""
        return add(base.residual, y)


class StreamBottleneck(BottleneckLayer):
    """h ← h + f(h + inp): the stream behind the sub-layer is changed where h is made.

    With `residual_before_ln` other than True the result is added to s, and without
    `original_ln_after` inp is not added to it again.
    """

    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, add: Added) -> Tensor:
        """Return the output. `x` is the input, `y` is h `[*batch, d_model]`."""
        inp = base.residual
        s = y + inp
        if self.residual_before_ln is True:
            return add(s, y)
        # under autocast h may be narrower than the stream
        if self.original_ln_after:
            return add(s, s).to(y.dtype)
        if self.adapter_residual_before_ln:
            return (add(s, s) - inp).to(y.dtype)
        # (s + f(s)) − inp without its rounding
        return add(s, y)


class NormBottleneck(BottleneckLayer):
    """LN(s) ← LN(s + f(LN(s))), or as the other values of `residual_before_ln` define it."""

    acts_on: ClassVar[str] = "input"

    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, add: Added) -> Tensor:
        """Return the norm's input. `x` is s, `y` is LN(s); all `[*batch, d_model]`."""
        if self.residual_before_ln is True and not self.adapter_residual_before_ln:
            return add(y, x)
        inp = base.residual
        if self.residual_before_ln is True:
            to = x - inp
        else:
            to = x if self.residual_before_ln == "post_add" else y
        return add(y, to) + inp
