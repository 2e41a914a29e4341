"""The sites of bottlenecks: their config, and a layer class for each kind of site.

The formulas are in `methods/bottleneck.py`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy, Block, Site, SubLayer
from adapterzoo.config_base import config_class
from adapterzoo.configs import Placement
from adapterzoo.contracts import Adapter, BaseLayer

from ._bottleneck_fields import BottleneckFields, invertible_adapters
from ._bottleneck_layer import Added, BottleneckLayer
from ._bottleneck_placed import LanguageBottleneck, PlacedBottleneck, moved_entry, placed_site
from ._sublayers import LOCATIONS, entry_placement, stream_site, sublayers


@config_class
class BnConfig(BottleneckFields):
    """Config of a bottleneck; `PlainFields` and `HypercomplexFields` document its fields."""

    architecture: ClassVar[str] = "bottleneck"

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each sub-layer that the config names."""
        wanted = {kind: field for kind, field in LOCATIONS.items() if getattr(self, field)}
        found = sublayers(anatomy, wanted, self.leave_out, type(self).__name__)
        self.warn_of_idle(len(anatomy.blocks))
        entry = [] if self.inv_adapter is None else [self._entry(anatomy)]
        return entry + [
            Placement(
                placed_site(anatomy, block, sub, self.site_convention) or self._site(block, sub),
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
            kind = LanguageBottleneck if site.is_language else PlacedBottleneck
        elif self.is_parallel:
            kind = ParallelBottleneck
        elif site.kind == "norm" and self.original_ln_after:
            kind = NormBottleneck
        elif site.kind == "output" and self.original_ln_before:
            kind = StreamBottleneck
        return kind(self, site, device, dtype)

    def _entry(self, anatomy: Anatomy) -> Placement:
        moved = moved_entry(anatomy, self.site_convention)
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
    """h ← h + f(h + inp): changes h so that the stream after the sub-layer changes.

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
