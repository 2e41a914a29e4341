"""The fields of a bottleneck's config, those of AdapterHub's `adapters` 1.3 and `dtype`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from adapterzoo.activations import ActivationName
from adapterzoo.config_base import config_class
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import InvertibleAdapter, SharedModules
from adapterzoo.errors import ConfigError, MissingEntryError, listing
from adapterzoo.fields import (
    FACTOR,
    MAX_WIDTH,
    SEED,
    Check,
    Choice,
    Either,
    Layers,
    Maybe,
    Positive,
    Share,
    declared,
    field,
)
from adapterzoo.registry import Registry

from ._beside import BesideConfig
from ._bottleneck_places import PLACES, SITE_CONVENTION
from ._hypercomplex import HypercomplexFields, projections
from ._init import DTYPE, DTYPES, generator
from ._sublayers import LOCATIONS


class InvertibleKind(InvertibleAdapter):
    """Base of the invertible functions that `inv_adapter` names.

    Attributes:
        block: the module with their parameters, built from a config, width, device and dtype;
            `forward(x, rev=False)` is the function, or with `rev` its inverse.
        is_unscaled: whether the function reads the output of a table without its scale.
    """

    container = "invertible_adapters"
    block: ClassVar[type[nn.Module]]
    is_unscaled: bool = False


class InvertibleModules(SharedModules):
    """Shared modules with an invertible function; as a module it is this function."""

    container = InvertibleKind.container

    def forward(self, x: Tensor, rev: bool = False) -> Tensor:
        """Return the function of `x` `[*batch, d]`, or its inverse with `rev`; same shape."""
        return cast("Tensor", self["invertible"](x, rev=rev))


invertible_adapters: Registry[type[InvertibleKind]] = Registry("invertible adapter")
"""`inv_adapter` → the class of the adapter at the input of the first block."""

# fields that have an effect only with another one
_NEEDS = {
    "adapter_residual_before_ln": "ln_after=True",
    "convention": "use_gating=True",
    "inv_adapter_reduction_factor": "inv_adapter='nice'",
    **{
        name: "phm_layer=True" for name in HypercomplexFields.__annotations__ if name != "phm_layer"
    },
}


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
        """Return an example of the same kind."""
        return {"0": 8, "default": 16} if isinstance(value, Mapping) and value else 16


@config_class
class PlainFields(BesideConfig):
    """The fields of a bottleneck with plain matrices.

    h is a sub-layer's output, inp the residual stream before it, s = h + inp, LN the norm that
    follows the addition (post-LN blocks only).

    Attributes:
        mh_adapter: adapters after self-attention.
        output_adapter: adapters after the feed-forward part.
        reduction_factor: the width is d_model // reduction_factor, at least 1; a number above 0,
            or a mapping from layer number to such numbers, with "default" for the others.
        non_linearity: name of the activation, see `adapterzoo.activations`.
        original_ln_before: the bottleneck reads LN(s), or s in pre-LN blocks, instead of h.
        original_ln_after: inp is added and LN applied after the bottleneck.
        ln_before: a new layer norm before the bottleneck.
        ln_after: a new layer norm after it.
        init_weights: "bert": N(0, 0.02), not the identity; "mam_adapter": up projection zero;
            "houlsby": N(0, 0.01) cut off at two deviations. With `phm_layer` "bert" leaves the
            drawing to the fields of Compacter, and "houlsby" is not legal.
        init_weights_seed: makes the initial values reproducible; they differ from site to site.
        is_parallel: the bottleneck reads inp, and its result is added to h.
        scaling: factor of the bottleneck's result: a number, "learned", or "channel" for a
            learned one per feature.
        use_gating: a learned gate, one number per sequence, on the result.
        convention: of the gate. "paper": the mean over the real tokens of the prompt;
            "adapterhub": over all tokens of the call, padding included.
        residual_before_ln: what the result is added to when `original_ln_before`: True: h;
            "post_add": s; False: what the bottleneck reads.
        adapter_residual_before_ln: the norm of `ln_after` encloses that addition.
        inv_adapter: "nice" for an invertible function of the embeddings, whose inverse acts in
            front of the logits, see `adapterzoo.methods.invertible`; None for none.
        inv_adapter_reduction_factor: the width of that function's layers is
            (d_model / 2) // inv_adapter_reduction_factor.
        cross_adapter: adapters after cross-attention.
        leave_out: numbers of blocks without adapters; encoder blocks first, then decoder.
        dropout: probability, 0 to below 1, of dropping a feature of the result.
        site_convention: "paper"; or a model type of `adapters` (`_bottleneck_places`), for its
            files: there it puts bottlenecks elsewhere than it documents.
        stochastic_depth: probability, 0 to below 1, of dropping the result of a whole row of
            the batch during training.
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    mh_adapter: bool
    output_adapter: bool
    reduction_factor: float | Mapping[str, float] = dataclasses.field(
        metadata=declared(Reduction())
    )
    non_linearity: str = dataclasses.field(metadata=declared(ActivationName()))
    original_ln_before: bool = False
    original_ln_after: bool = True
    ln_before: bool = False
    ln_after: bool = False
    init_weights: str = field("bert", Choice("bert", "mam_adapter", "houlsby"))
    init_weights_seed: int | None = field(None, SEED)
    is_parallel: bool = False
    scaling: float | str = field(1.0, Either(FACTOR, Choice("learned", "channel")))
    use_gating: bool = False
    convention: str = field("paper", Choice("paper", "adapterhub"))
    residual_before_ln: bool | str = field(True, Choice(True, False, "post_add"))
    adapter_residual_before_ln: bool = False
    inv_adapter: str | None = None
    inv_adapter_reduction_factor: float | None = field(None, Maybe(Positive(), "none"))
    cross_adapter: bool = False
    leave_out: tuple[int, ...] = field((), Layers())
    dropout: float = field(0.0, Share())
    stochastic_depth: float = field(0.0, Share())
    site_convention: str = field("paper", SITE_CONVENTION)
    dtype: str | None = field(None, DTYPE)


@config_class
class BottleneckFields(HypercomplexFields, PlainFields):
    """Every field of a bottleneck; two configs with equal fields are equal."""

    training_fields = AdapterConfig.training_fields | {"stochastic_depth"}

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is not legal, or has no effect together with the others.
        """
        super().__post_init__()
        self._check_together()

    @property
    def slot_fields(self) -> frozenset[str]:
        """The widths, unless Kronecker products make up the matrices."""
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
        alone = self.inv_adapter is None and (row is None or row.has_languages)
        return zero and keeps and alone and not self.adapter_residual_before_ln

    def shared(
        self, placements: Sequence[Placement], device: torch.device, dtype: torch.dtype
    ) -> nn.Module | None:
        """Return the shared modules: "invertible" and "phm", if there are such."""
        parts = SharedModules() if self.inv_adapter is None else InvertibleModules()
        if self.inv_adapter is not None:
            width = next(p.site.d_in for p in placements if p.site.kind == "entry")
            made = invertible_adapters[self.inv_adapter].block
            parts["invertible"] = made(self, width, device, dtype)
        if self.shares_matrices:
            sites = [p.site for p in placements if p.site.kind != "entry"]
            parts["phm"] = projections["phm"].shared(
                self,
                {(site.d_out, self.width_at(site.layer, site.d_out)) for site in sites},
                zero=self.init_weights == "mam_adapter",
                source=generator(self.init_weights_seed, "phm"),
                device=device,
                dtype=DTYPES[self.dtype] if self.dtype else dtype,
            )
        return parts if len(parts) else None

    @property
    def averages_shared(self) -> bool:
        """True, as for the bottlenecks themselves."""
        return True

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
                    f"{type(self).__name__}(reduction_factor={dict(factors)!r}): there is no "
                    f"number for block {layer} and no default. Write "
                    f"reduction_factor={ {**factors, 'default': 16}!r}."
                )
        width = d_model // factor
        if width > MAX_WIDTH:
            raise self._error(
                f"reduction_factor={factor!r}",
                f"makes a bottleneck of width {width:.12g} out of {d_model} features; at most "
                f"{MAX_WIDTH} are legal",
                "reduction_factor=16",
            )
        return max(self.phm_dim if self.phm_layer else 1, int(width))

    def warn_of_idle(self, blocks: int) -> None:
        """Warn of layer numbers in the mapping that the model lacks; adapters accepts them.

        Args:
            blocks: number of the model's blocks.
        """
        factors = self.reduction_factor
        if not isinstance(factors, Mapping):
            return
        here = {k: v for k, v in factors.items() if k == "default" or int(k) < blocks}
        if idle := [k for k in factors if k not in here]:
            hint = here if len(here) > 1 else here.get("default", 16)
            warnings.warn(
                f"{type(self).__name__}(reduction_factor={dict(factors)!r}): there are no blocks "
                f"{', '.join(idle)}: the model's are 0 to {blocks - 1}. Write "
                f"reduction_factor={hint!r}.",
                stacklevel=2,
            )

    def _check_together(self) -> None:
        self._check_invertible()
        self._check_sites()
        self._check_hypercomplex()
        if self.phm_layer and self.init_weights == "houlsby":
            raise self._error(
                "phm_layer=True, init_weights='houlsby'",
                "the numbers of hypercomplex matrices are drawn as hypercomplex_nonlinearity says",
                "hypercomplex_nonlinearity='normal', init_weights='bert'",
            )
        defaults = {f.name: f.default for f in dataclasses.fields(BottleneckFields)}
        without = {
            "ln_after=True": not self.ln_after,
            "use_gating=True": not self.use_gating,
            "inv_adapter='nice'": self.inv_adapter is None,
            "phm_layer=True": not self.phm_layer,
        }
        for name, need in _NEEDS.items():
            value = getattr(self, name)
            if value == defaults[name] or not without[need]:
                continue
            idle = self._error(
                f"{name}={value!r}", f"has an effect only with {need}", f"{name}={defaults[name]!r}"
            )
            if name not in HypercomplexFields.__annotations__:
                raise idle
            # configs written for adapters give these to any bottleneck
            warnings.warn(str(idle), stacklevel=5)
        if not (self.mh_adapter or self.output_adapter or self.cross_adapter):
            raise self._error(
                "mh_adapter=False, output_adapter=False, cross_adapter=False",
                "nothing is left to adapt",
                "output_adapter=True",
            )
        self._check_residuals()

    def _check_sites(self) -> None:
        row = PLACES.get(self.site_convention)
        if row is None:
            return
        names = [LOCATIONS[kind] for kind in row.sublayers]
        if not any(getattr(self, name) for name in names) and not (
            row.moves_entry and self.inv_adapter
        ):
            needs = " or ".join(f"{name}=True" for name in names) or "inv_adapter='nice'"
            raise self._error(
                f"site_convention={self.site_convention!r}",
                f"has an effect only with {needs}",
                "site_convention='paper'",
            )

    def _check_invertible(self) -> None:
        asked = f"inv_adapter={self.inv_adapter!r}"
        if self.inv_adapter == "glow":
            raise self._error(
                asked,
                "adapters computes it of tokens instead of features and fails in every forward, "
                "so that there is nothing to be compatible with",
                "inv_adapter='nice'",
            )
        if self.inv_adapter is not None and self.inv_adapter not in invertible_adapters:
            known = listing([*sorted(invertible_adapters), None])
            raise self._error(asked, f"inv_adapter is one of {known}", "inv_adapter=None")
        if self.inv_adapter is not None and self.inv_adapter_reduction_factor is None:
            raise self._error(
                f"{asked}, inv_adapter_reduction_factor=None",
                "nothing says how wide its layers are",
                "inv_adapter_reduction_factor=2",
            )

    def _check_residuals(self) -> None:
        if self.is_parallel and self.original_ln_before:
            raise self._error(
                "is_parallel=True, original_ln_before=True",
                "a parallel bottleneck reads the residual stream before the sub-layer, where "
                "nothing is normalized",
                "original_ln_before=False",
            )
        if self.is_parallel and self.stochastic_depth:
            raise self._error(
                f"is_parallel=True, stochastic_depth={self.stochastic_depth}",
                "stochastic depth drops what a sub-layer adds, and a parallel bottleneck is a part "
                "of the sub-layer; adapters ignores it there",
                "stochastic_depth=0.0",
            )
        if self.is_parallel and self.adapter_residual_before_ln:
            raise self._error(
                "is_parallel=True, adapter_residual_before_ln=True",
                "a parallel bottleneck has no residual connection of its own",
                "adapter_residual_before_ln=False",
            )
        if self.residual_before_ln is not True and not self.original_ln_before:
            raise self._error(
                f"residual_before_ln={self.residual_before_ln!r}",
                "has an effect only with original_ln_before=True",
                "residual_before_ln=True",
            )
        keeps = self.original_ln_before and self.residual_before_ln is False
        if not self.original_ln_after and not keeps:
            raise self._error(
                f"original_ln_after=False, original_ln_before={self.original_ln_before}, "
                f"residual_before_ln={self.residual_before_ln!r}",
                "the model's own residual connection or norm would be lost",
                "original_ln_after=False, original_ln_before=True, residual_before_ln=False",
            )

    def _error(self, asked: str, wrong: str, hint: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__}({asked}): {wrong}. Write {hint}.")
