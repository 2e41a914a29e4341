"""Bottlenecks at a declared place, in the formula of `adapters` 1.3 (`_bottleneck_places`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeAlias

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy, Block, Site, SubLayer
from adapterzoo.contracts import BaseLayer, LanguageFreeAdapter
from adapterzoo.errors import SiteError, StateError

from ._bottleneck_fields import BottleneckFields
from ._bottleneck_layer import Added, BottleneckLayer, Instead
from ._bottleneck_places import PLACES
from ._languages import JOINING, check_languages, norm_of
from ._sublayers import stream_site

Norm: TypeAlias = Callable[[Tensor], Tensor] | None


def placed_site(anatomy: Anatomy, block: Block, sub: SubLayer, row: str) -> Site | None:
    """Return the site that a row declares for a sub-layer; None: the documented one.

    Args:
        anatomy: of the model.
        block: of the sub-layer.
        sub: the sub-layer.
        row: name of the row, or "paper".

    Raises:
        SiteError: the block has no such layer.
    """
    place = PLACES[row].sublayers.get(sub.kind) if row in PLACES else None
    if place is None:
        return None
    last = next(b for b in reversed(anatomy.blocks) if b.stack == block.stack)

    def full(path: str) -> str | None:
        owner = last if path.startswith("last:") else block
        return f"{owner.path}.{path.removeprefix('last:')}" if path else None

    if place.languages:
        check_languages(anatomy, f"site_convention={row!r}")
    out = block.languages if place.languages else full(place.out) or sub.out
    if place.out and not any(site.path == out for site in block.sites):
        raise SiteError(
            f"site_convention={row!r}: the block at {block.path!r} has no layer {place.out!r}, "
            f"where adapters puts a bottleneck. Write site_convention='paper'."
        )
    return dataclasses.replace(
        stream_site(block, sub, "output", captures=True),
        path=out,
        source=full(place.inp) or sub.source,
        also=full(place.also),
        norm=full(place.norm),
        factor=full(place.factor),
        is_placed=True,
        is_swapped=place.swapped,
        is_language=place.languages,
    )


def moved_entry(anatomy: Anatomy, row: str) -> Site | None:
    """Return the site of the invertible function that a row declares; None: the documented one.

    Args:
        anatomy: of the model.
        row: name of the row, or "paper".
    """
    if row not in PLACES or not PLACES[row].moves_entry:
        return None
    path = PLACES[row].entry
    tokens = anatomy.tokens
    embeds = tokens is not None and path == tokens.embeddings
    width = tokens.width if tokens is not None and embeds else anatomy.blocks[0].d_model
    scale = "embed_scale" if PLACES[row].is_unscaled else None
    stack = anatomy.blocks[0].stack
    return Site(path, "other", -1, stack, "entry", width, width, is_placed=True, factor=scale)


class PlacedBottleneck(BottleneckLayer):
    """R in the place of h, with h, inp, n and R of `_bottleneck_places`."""

    def __init__(
        self, config: BottleneckFields, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters, and keep the place."""
        super().__init__(config, site, device, dtype)
        reads_sum = config.original_ln_before and not config.is_parallel
        self.norm = site.norm if reads_sum else None
        self.reads_sum, self.is_parallel = reads_sum, config.is_parallel
        self.factor_path, self.is_swapped = site.factor, site.is_swapped
        self.reads_call |= self.norm is not None or site.factor is not None

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether they read the same modules too."""
        places = {(a.norm, a.factor_path, a.reads_sum, a.is_parallel) for a in adapters}
        return len(places) == 1 and super().supports_batching(adapters)

    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, add: Added) -> Tensor:
        """Return the output. `x` is the input, `y` the plain output `[*batch, d_model]`."""
        # 1.0 where a config of the model has no such parameter
        factor = 1.0 if self.factor_path is None else base.part(self.factor_path)
        h, inp = factor * y, base.residual
        if self.is_swapped:
            h, inp = inp, h
        norm = None if self.norm is None else base.part(self.norm)
        r = self.result(h, inp, h + inp, norm, add)
        if not self.original_ln_after:
            r = r - inp
        if self.is_swapped:
            # the model adds its own inp, which is h here
            r = r + (inp - h)
        if isinstance(factor, Tensor):
            # nothing that a layer returns reaches a feature that the model multiplies by 0
            r = self._divided(r, torch.where(factor == 0, 1.0, factor), y.dtype)
        return r.to(y.dtype)

    def _divided(self, r: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return r over the factor by which the model multiplies it again.

        Raises:
            StateError: a value exceeds float16.
        """
        found = (r / factor).to(dtype)
        # a compiled model cannot look at values
        if dtype is not torch.float16 or torch.compiler.is_compiling():
            return found
        if r.isfinite().all() and not found.isfinite().all():
            raise StateError(
                f"site_convention={self.config.site_convention!r}: the model multiplies the result "
                f"of this bottleneck by {self.factor_path!r}, whose smallest value is "
                f"{factor.abs().min():.2g}, and the result over it exceeds float16, whose largest "
                f"value is 65504. Write model.to(torch.bfloat16), or torch.float32."
            )
        return found

    def result(self, h: Tensor, inp: Tensor, s: Tensor, norm: Norm, add: Added) -> Tensor:
        """Return R; all tensors `[*batch, d_model]`.

        Args:
            h: see `_bottleneck_places`.
            inp: see there.
            s: h + inp.
            norm: LN; None for none.
            add: see `changed`.
        """
        n = inp if self.is_parallel else h
        to = h
        if self.reads_sum:
            n = s if norm is None else norm(s)
            to = {True: h, False: n, "post_add": s}[self.residual_before_ln]
        return add(n, to)


class LanguageBottleneck(PlacedBottleneck, LanguageFreeAdapter):
    """LN(R + inp), or R without `original_ln_after`, in the place of language adapters.

    Before a later adapter of a stack R takes the place of h, as in `adapters`, where the last
    adapter decides about the norm.
    """

    joining = JOINING

    def __init__(
        self, config: BottleneckFields, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters, and keep the place."""
        super().__init__(config, site, device, dtype)
        self.path, self.reads_call = site.path, True

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return False: rows are computed one adapter after the other."""
        return False

    def forward(self, x: Tensor, base: BaseLayer, instead: Instead = None) -> Tensor:
        """Return the stream after the block's language adapters. `x` is s `[*batch, d_model]`."""
        inp, norm = base.residual, norm_of(self.path, base)
        add = partial(self.added, instead=instead, base=base)
        r = self.result(x - inp, inp, x, norm, add)
        if not base.is_original:
            return base(r + inp)
        return norm(r + inp) if self.original_ln_after else r
