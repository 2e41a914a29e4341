"""Low-rank factors: the fields and parameters that LoRA and its relatives share.

The update is s · B A with A `[rank, d_in]`, B `[d_out, rank]` and s = alpha / rank, or
alpha / √rank with `use_rslora` (Kalajdzievski 2023, arXiv:2312.03732).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.averaging import Combination
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import BaseLayer, SharedInputAdapter, WeightAdapter, upcast
from adapterzoo.errors import ConfigError, SiteError, listing
from adapterzoo.fields import FACTOR, MAX_WIDTH, SEED, Check, Choice, Range, Share, field
from adapterzoo.kernels.exact import exactly
from adapterzoo.kernels.low_rank import shrink

from ._init import DTYPE, DTYPES, constant, drawn, generator, kaiming, normal
from ._low_rank_combining import combined_config, combined_factors
from ._targets import TargetedConfig, check_patterns

_T = TypeVar("_T")
_RANK = Range(1, MAX_WIDTH)


class Patterns(Check):
    """Layer names or regular expressions to values that another field takes too."""

    legal = "a mapping from layer names or regular expressions to numbers"

    def __init__(self, name: str, check: Check, default: object) -> None:
        """Take the other field's name, check and default."""
        self.name, self.check, self.default = name, check, default

    def convert(self, value: object) -> object:
        """Return a copy: the caller's dict may change later."""
        return dict(value) if isinstance(value, Mapping) else value

    def fits(self, value: object) -> bool:
        """Return whether it is a mapping with strings as keys."""
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)

    def nearest(self, value: object, default: object) -> object:
        """Return an example."""
        return {"query": 4}

    def __call__(self, config: str, name: str, value: object, default: object = None) -> object:
        """Return the value to keep.

        Raises:
            ConfigError: it is not legal, or the expressions could search for hours.
        """
        kept = cast("dict[str, object]", super().__call__(config, name, value, default))
        check_patterns(config, name, kept, self.nearest(value, default))
        for number in kept.values():
            self.check(config, self.name, number, self.default)
        return kept


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(TargetedConfig):
    """Base of the configs with low-rank factors.

    Attributes:
        r: rank, 1 to 65,536.
        alpha: numerator of the scaling.
        dropout: probability, 0 to below 1, of dropping an input feature on the way to A.
        init_weights: "lora": B is zero, so that a fresh adapter changes nothing; "bert": both
            normal with deviation 0.02.
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        use_rslora: scale by alpha / √r.
        rank_pattern: path endings or regular expressions to the rank of the layers they match.
        alpha_pattern: the same for alpha.
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    r: int = field(8, _RANK)
    alpha: float = field(8, FACTOR)
    dropout: float = field(0.0, Share())
    init_weights: str = field("lora", Choice("lora", "bert"))
    init_weights_seed: int | None = field(None, SEED)
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field({}, Patterns("r", _RANK, 8))
    alpha_pattern: Mapping[str, float] = field({}, Patterns("alpha", FACTOR, 8))
    dtype: str | None = field(None, DTYPE)

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """One placement for each layer that the config names.

        Raises:
            SiteError: nothing matches, also no layer a key of `rank_pattern` or `alpha_pattern`.
        """
        placements = super().placements(anatomy)
        # a key may mean a layer of a block that is left out
        by_layer = self.leave_out or self.layers_to_transform is not None
        sites = list(anatomy) if by_layer else [p.site for p in placements]
        for field_name in ("rank_pattern", "alpha_pattern"):
            for key in getattr(self, field_name):
                if not any(_fits(key, site.path) for site in sites):
                    ends = sorted({site.path.rpartition(".")[2] for site in sites})
                    raise SiteError(
                        f"{type(self).__name__}({field_name}={{{key!r}: …}}): no adapted layer "
                        f"matches {key!r}. Adapted are layers named {listing(ends)}. Write one of "
                        f"these names, or leave the key out."
                    )
        return placements

    @property
    def starts_as_identity(self) -> bool:
        """Whether B starts as zero."""
        return self.init_weights == "lora"

    def rank_at(self, path: str) -> int:
        """The rank of the adapter at a path."""
        return _matching(self.rank_pattern, path, self.r)

    def alpha_at(self, path: str) -> float:
        """The numerator of the scaling of the adapter at a path."""
        return _matching(self.alpha_pattern, path, self.alpha)

    def scaling_at(self, path: str) -> float:
        """The factor s of the adapter at a path."""
        rank = self.rank_at(path)
        return self.alpha_at(path) / (math.sqrt(rank) if self.use_rslora else rank)

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> LowRankConfig:
        """The config of what several become; ranks, scalings and places may differ for some."""
        own = [config for config in configs if isinstance(config, LowRankConfig)]
        return combined_config(own, strategy, anatomy)

    def dtype_at(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the parameters at a layer of the given dtype."""
        return DTYPES[self.dtype] if self.dtype else dtype


class LowRank(SharedInputAdapter, WeightAdapter):
    """An adapter with the factors A and B; what it makes of them, subclasses say.

    Attributes:
        lora_A: `[rank, d_in]`, with experts in front where the site has them.
        lora_B: `[d_out, rank]`, likewise.
        scaling: the factor s.
        dropout: probability on the way to A.
        looks_up: whether the layer is an embedding, whose input is token numbers.
    """

    def __init__(
        self, config: LowRankConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the factors.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the parameters.
            dtype: of the layer.

        Raises:
            ConfigError: there is dropout, and the site has no features to drop.
        """
        super().__init__()
        self.scaling = config.scaling_at(site.path)
        self.dropout = config.dropout
        self.looks_up = site.kind == "embedding"
        if config.dropout and (self.looks_up or site.parameter):
            what = "reads token numbers" if self.looks_up else "computes with its parameters"
            raise ConfigError(
                f"{type(config).__name__}(dropout={config.dropout}) at {site.path!r}: the module "
                f"{what}, so there are no features to drop on the way to A. Write dropout=0.0."
            )
        rank = config.rank_at(site.path)
        lead = (site.experts,) if site.experts else ()
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        small = normal(0.02, source)
        zero_b = config.init_weights == "lora"
        fresh = (kaiming(source), constant(0.0)) if zero_b else (small, small)
        dtype = config.dtype_at(dtype)
        self.lora_A = drawn((*lead, rank, site.d_in), fresh[0], device, dtype)
        self.lora_B = drawn((*lead, site.d_out, rank), fresh[1], device, dtype)

    @property
    def shared_input_key(self) -> tuple[object, ...]:
        """What one product with x asks for: A of one kind and width, and the same dropout."""
        a = self.lora_A
        return type(a), a.device, a.dtype, a.shape[1:], self.dropout, self.training

    @classmethod
    def from_input(cls, adapters: Sequence[Self], x: Tensor) -> Sequence[Tensor]:
        """The x Aᵀ `[*batch, rank]` of each; they share the dropout mask of x."""
        factors = [a.lora_A for a in adapters]
        t = shrink(x, factors, adapters[0].dropout, adapters[0].training)
        if len(factors) == 1:
            return (t,)
        parts: tuple[Tensor, ...] = t.split([a.shape[0] for a in factors], -1)
        return parts

    def looked_up(self, x: Tensor, base: BaseLayer) -> Tensor:
        """A of the tokens of an embedding, `[*batch]` → `[*batch, rank]`.

        That of padding gets no gradient, as the row of the embedding itself gets none.
        """
        return embedding(x, self.lora_A.T, base.padding_idx)

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Take the factors of what several adapters become, by any strategy."""
        self.combine_factors(adapters, weights, strategy)

    def combine_factors(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        gains: Sequence[Tensor] | None = None,
    ) -> None:
        """A and B of what several adapters become.

        Args:
            adapters: of the same layer.
            weights: one for each.
            strategy: the strategy and its options.
            gains: factors of the rows of each B, `[*experts, d_out]`; None: 1.
        """
        factors = [(upcast(x.lora_A, self.lora_A), upcast(x.lora_B, self.lora_B)) for x in adapters]
        if gains is not None:
            pairs = zip(factors, gains, strict=True)
            factors = [(a, b * gain.unsqueeze(-1)) for (a, b), gain in pairs]
        scalings = [adapter.scaling for adapter in adapters]
        rank = self.lora_A.shape[-2]
        a, b = combined_factors(factors, scalings, weights, strategy, rank)
        strategy.fill(self.lora_A, a, "lora_A")
        strategy.fill(self.lora_B, b, "lora_B")

    def delta(self, dtype: torch.dtype) -> Tensor:
        """The update s · B A, `[d_out, d_in]`, computed in the dtype, also under autocast."""
        with exactly(self.lora_A.device):
            return self.scaling * (self.lora_B.to(dtype) @ self.lora_A.to(dtype))

    def extra_repr(self) -> str:
        """Widths, rank and scaling."""
        rank, d_in = self.lora_A.shape[-2:]
        return f"d_in={d_in}, d_out={self.lora_B.shape[-2]}, rank={rank}, scaling={self.scaling:g}"


def _matching(patterns: Mapping[str, _T], path: str, otherwise: _T) -> _T:
    for pattern, value in patterns.items():
        if _fits(pattern, path):
            return value
    return otherwise


def _fits(pattern: str, path: str) -> bool:
    """PEFT's rule for the keys of patterns: a regular expression for the end of a path."""
    # from each name on, not behind a prefix: `(?i)` has to stand first, and groups keep numbers
    expression, starts = re.compile(pattern), [0, *(i + 1 for i, c in enumerate(path) if c == ".")]
    return any(expression.fullmatch(path, start) is not None for start in starts)
