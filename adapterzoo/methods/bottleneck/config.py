"""The config of bottlenecks, of Compacter and of invertible bottlenecks.

The fields are those of AdapterHub's `adapters` 1.3, and `convention`, `site_convention`, `dtype`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from adapterzoo.activations import ActivationName
from adapterzoo.anatomy import Anatomy, Block, Site, SubLayer
from adapterzoo.config import (
    FACTOR,
    MAX_WIDTH,
    SEED,
    AdapterConfig,
    Check,
    Choice,
    Either,
    Layers,
    Maybe,
    Placement,
    Positive,
    Range,
    Share,
    architectures,
    config_class,
    field,
)
from adapterzoo.contracts import Adapter, SharedModules
from adapterzoo.errors import ConfigError, MissingEntryError
from adapterzoo.methods._copies import ConfigWithCopies
from adapterzoo.methods._init import DTYPE, dtype_named, generator

from .compacter import Drawing, HypercomplexProjection
from .invertible import InvertibleModules, NiceAdapter, NiceBlock
from .layers import (
    Bottleneck,
    BottleneckLayer,
    LanguageBottleneck,
    NormBottleneck,
    ParallelBottleneck,
    PlacedBottleneck,
    StreamBottleneck,
)
from .places import (
    LOCATIONS,
    PLACES,
    SITE_CONVENTION,
    entry_placement,
    placed_site,
    stream_site,
    sublayers,
)

_PHM = "phm_layer=True"


class Reduction(Check):
    """A number above 0, or such numbers by layer number, as strings, and "default"."""

    legal = "a number above 0, or a mapping from layer numbers or 'default' to such numbers"

    def convert(self, value: object) -> object:
        """Return a mapping with strings as keys, as JSON has them."""
        if not isinstance(value, Mapping):
            return value
        return {str(key): factor for key, factor in value.items()}

    def fits(self, value: object) -> bool:
        """Return whether all numbers are above 0 and all keys are layer numbers or "default"."""
        given = value if isinstance(value, dict) else {"default": value}
        numbers = all(map(Positive().fits, given.values()))
        return numbers and bool(given) and all(k == "default" or k.isdecimal() for k in given)

    def nearest(self, value: object, default: object) -> object:
        """Return an example of a valid value of the same kind."""
        return {"0": 8, "default": 16} if isinstance(value, Mapping) and value else 16


@architectures.register("bottleneck")
@config_class
class BnConfig(ConfigWithCopies):
    """Config of a bottleneck; two configs with equal fields are equal.

    h is a sub-layer's output, inp the residual stream before it, s = h + inp, LN the norm that
    follows the addition (post-LN blocks only). Compacter's matrices are H = Σᵢ Rᵢ ⊗ Wᵢ; all of its
    fields need `phm_layer=True`.

    Attributes:
        mh_adapter: adapters after self-attention.
        output_adapter: adapters after the feed-forward part.
        reduction_factor: the width is d_model // reduction_factor, at least 1; a number above 0,
            or a mapping from layer number to such numbers, with "default" for all others.
        non_linearity: name of the activation, see `adapterzoo.activations`.
        original_ln_before: the bottleneck reads LN(s), or s in pre-LN blocks, instead of h.
        original_ln_after: inp is added and LN applied after the bottleneck.
        ln_before: a new layer norm before the bottleneck.
        ln_after: a new layer norm after it.
        init_weights: "bert": N(0, 0.02), not the identity; "mam_adapter": up projection zero;
            "houlsby": N(0, 0.01) cut off at two deviations. With `phm_layer`, "bert" leaves the
            initialization to the fields of Compacter, and "houlsby" is invalid.
        init_weights_seed: makes the initial values reproducible; they differ from site to site.
        is_parallel: the bottleneck reads inp, and its result is added to h.
        scaling: factor of the bottleneck's result: a number, "learned", or "channel" for a
            learned one per feature.
        use_gating: a learned gate, one number per sequence, on the result.
        convention: convention of the gate. "paper": the mean over the real tokens of the prompt;
            "adapterhub": over all tokens of the call, padding included.
        residual_before_ln: what the result is added to when `original_ln_before`: True: h;
            "post_add": s; False: what the bottleneck reads.
        adapter_residual_before_ln: the norm of `ln_after` encloses that addition.
        inv_adapter: "nice" for an invertible function of the embeddings, whose inverse acts before
            the logits, see `bottleneck.invertible`; None for none.
        inv_adapter_reduction_factor: the width of that function's layers is
            (d_model / 2) // inv_adapter_reduction_factor.
        cross_adapter: adapters after cross-attention.
        mixers: in a block with a state-space model, recurrence or convolution instead of
            attention, `mh_adapter` applies to that; and a block with only one such part has an
            adapter there if either of the two fields is true.
        leave_out: numbers of blocks without adapters; encoder blocks come first.
        dropout: probability, 0 to below 1, of dropping a feature of the result.
        stochastic_depth: probability, 0 to below 1, of dropping the result of a whole row of
            the batch during training.
        site_convention: "paper"; or a model type for which `adapters` puts bottlenecks elsewhere
            than it documents (`bottleneck.places`), for files that it wrote.
        dtype: dtype of the parameters, by name ("float32"); None for that of the layer.
        phm_layer: whether the two matrices of a bottleneck are sums of Kronecker products.
        phm_dim: n, the number of products; it divides d_model and the bottleneck's width.
        factorized_phm_W: Wᵢ is a product of two matrices of rank `phm_rank`.
        shared_W_phm: all layers have the same Wᵢ.
        shared_phm_rule: all layers have the same Rᵢ.
        factorized_phm_rule: Rᵢ is a product of two vectors.
        phm_c_init: how Rᵢ is drawn: "normal" or "uniform".
        phm_init_range: the deviation of "normal" for shared Rᵢ, and for Wᵢ.
        learn_phm: whether Rᵢ is trained.
        hypercomplex_nonlinearity: how Wᵢ is drawn: "glorot-uniform", "glorot-normal" or "normal".
        phm_rank: the rank of Wᵢ.
        phm_bias: whether biases are added.
    """

    architecture: ClassVar[str] = "bottleneck"
    training_fields = AdapterConfig.training_fields | {"stochastic_depth"}

    averages_shared = True

    mh_adapter: bool
    output_adapter: bool
    reduction_factor: float | Mapping[str, float] = dataclasses.field(
        metadata={"check": Reduction()}
    )
    non_linearity: str = dataclasses.field(metadata={"check": ActivationName()})
    original_ln_before: bool = False
    original_ln_after: bool = True
    ln_before: bool = False
    ln_after: bool = False
    init_weights: str = field("bert", Choice("bert", "mam_adapter", "houlsby"))
    init_weights_seed: int | None = field(None, SEED)
    is_parallel: bool = False
    scaling: float | str = field(1.0, Either(FACTOR, Choice("learned", "channel")))
    use_gating: bool = False
    convention: str = field("paper", Choice("paper", "adapterhub"), needs="use_gating=True")
    residual_before_ln: bool | str = field(
        True, Choice(True, False, "post_add"), needs="original_ln_before=True"
    )
    adapter_residual_before_ln: bool = field(False, needs="ln_after=True")
    inv_adapter: str | None = field(None, Choice(None, "nice"))
    inv_adapter_reduction_factor: float | None = field(
        None, Maybe(Positive(), "none"), needs="inv_adapter='nice'"
    )
    cross_adapter: bool = False
    mixers: bool = field(True, ours=True)
    leave_out: tuple[int, ...] = field((), Layers())
    dropout: float = field(0.0, Share())
    stochastic_depth: float = field(0.0, Share())
    site_convention: str = field("paper", SITE_CONVENTION)
    dtype: str | None = field(None, DTYPE)
    phm_layer: bool = False
    phm_dim: int = field(4, Range(1, MAX_WIDTH), needs=_PHM)
    factorized_phm_W: bool = field(True, needs=_PHM)  # noqa: N815
    shared_W_phm: bool = field(False, needs=_PHM)  # noqa: N815
    shared_phm_rule: bool = field(True, needs=_PHM)
    factorized_phm_rule: bool = field(False, needs=_PHM)
    phm_c_init: str = field("normal", Choice("normal", "uniform"), needs=_PHM)
    phm_init_range: float = field(0.0001, Positive(), needs=_PHM)
    learn_phm: bool = field(True, needs=_PHM)
    hypercomplex_nonlinearity: str = field(
        "glorot-uniform", Choice("glorot-uniform", "glorot-normal", "normal"), needs=_PHM
    )
    phm_rank: int = field(1, Range(1, MAX_WIDTH), needs=f"{_PHM}, factorized_phm_W=True")
    phm_bias: bool = field(True, needs=_PHM)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is invalid, or does not go with the others.
        """
        super().__post_init__()
        parallel, reads_sum = self.is_parallel, self.original_ln_before
        keeps_stream = self.original_ln_after or (reads_sum and self.residual_before_ln is False)
        row = PLACES.get(self.site_convention)
        differs = row is None or bool(
            (row.moves_entry and self.inv_adapter)
            or any(getattr(self, LOCATIONS[kind]) for kind in row.sublayers)
        )
        checks = {
            "site_convention='paper'": not differs,
            "phm_layer=False": self.phm_layer and self.init_weights == "houlsby",
            "output_adapter=True": not (
                self.mh_adapter or self.output_adapter or self.cross_adapter
            ),
            "original_ln_before=False": parallel and reads_sum,
            "adapter_residual_before_ln=False": parallel and self.adapter_residual_before_ln,
            "original_ln_after=True": not keeps_stream,
        }
        if hint := next((hint for hint, is_wrong in checks.items() if is_wrong), None):
            raise ConfigError(
                f"{self!r}: there is no such bottleneck; {hint.partition('=')[0]} does not go with "
                f"the other fields. Write {hint}."
            )

    @property
    def slot_fields(self) -> frozenset[str]:
        """The fields of widths, unless the matrices are Kronecker products."""
        widths = {"inv_adapter_reduction_factor", "reduction_factor"}
        return frozenset(widths - ({"reduction_factor"} if self.phm_layer else set()))

    @property
    def starts_as_identity(self) -> bool:
        """Whether the up projection starts as zero and the result is added to the old output."""
        keeps = self.residual_before_ln is True or not (
            self.original_ln_before and self.original_ln_after
        )
        zero = self.init_weights == "mam_adapter"
        row = PLACES.get(self.site_convention)
        # the base model loses its language adapters
        removes = row is not None and any(place.languages for place in row.sublayers.values())
        alone = self.inv_adapter is None and not removes
        return zero and keeps and alone and not self.adapter_residual_before_ln

    @property
    def shares_matrices(self) -> bool:
        """Whether layers share Rᵢ or Wᵢ."""
        return self.phm_layer and (self.shared_phm_rule or self.shared_W_phm)

    # --- sites ---

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each sub-layer that the config names."""
        wanted = {kind: name for kind, name in LOCATIONS.items() if getattr(self, name)}
        if not self.mixers:
            wanted.pop("mixer", None)
        found = sublayers(anatomy, wanted, self.leave_out, type(self).__name__, self.mixers)
        entry = [] if self.inv_adapter is None else [entry_placement(self, anatomy)]
        return entry + [
            Placement(
                placed_site(anatomy, block, sub, self.site_convention) or self._site(block, sub),
                self,
                LOCATIONS[sub.kind],
            )
            for block, sub in found
        ]

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

    def width_at(self, layer: int, d_model: int) -> int:
        """Return the bottleneck's width in a block, at least 1, or `phm_dim` with `phm_layer`.

        Args:
            layer: number of the block.
            d_model: width of its residual stream.

        Raises:
            MissingEntryError: the mapping has no number for this block.
            ConfigError: the width is too large.
        """
        factor = self.reduction_factor
        if isinstance(factor, Mapping):
            factors, factor = factor, factor.get(str(layer), factor.get("default", 0))
            if not factor:
                raise MissingEntryError(
                    f"{type(self).__name__}: no entry for block {layer}. Write "
                    f"reduction_factor={ {**factors, 'default': 16}!r}."
                )
        width = d_model // factor
        if width > MAX_WIDTH:
            raise ConfigError(
                f"{type(self).__name__}(reduction_factor={factor!r}): a width of {width:.12g} "
                f"exceeds {MAX_WIDTH}. Write reduction_factor=16."
            )
        return max(self.phm_dim if self.phm_layer else 1, int(width))

    # --- modules ---

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Adapter:
        """Return a fresh bottleneck for the site, or the invertible function."""
        if site.kind == "entry":
            return NiceAdapter(is_unscaled=site.factor is not None)
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

    def shared(
        self, placements: Sequence[Placement], device: torch.device, dtype: torch.dtype
    ) -> nn.Module | None:
        """Return the shared modules, "invertible" and "phm", if there are any."""
        parts = SharedModules() if self.inv_adapter is None else InvertibleModules()
        if self.inv_adapter is not None:
            width = next(p.site.d_in for p in placements if p.site.kind == "entry")
            parts["invertible"] = NiceBlock(self, width, device, dtype)
        if self.shares_matrices:
            sites = [p.site for p in placements if p.site.kind != "entry"]
            widths = {(site.d_out, self.width_at(site.layer, site.d_out)) for site in sites}
            source = generator(self.init_weights_seed, "phm")
            drawing = Drawing(self, source, device, dtype_named(self.dtype, dtype))
            parts["phm"] = HypercomplexProjection.shared(drawing, widths)
        return parts if len(parts) else None
