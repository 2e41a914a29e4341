"""DoRA — Weight-Decomposed Low-Rank Adaptation.

Paper: Liu et al. 2024, arXiv:2402.09353, eq. 5 and §4.3.
W' = m · (W + s · B A) / ‖W + s · B A‖, the norm taken over d_in for each output row, so that
y = g (W x + s · B A x) + bias with g = m / ‖W + s · B A‖; gradients treat the norm as a constant.
In the convention of adapters the norm is that of W + B A, gradients pass through it, and the bias
is also multiplied by g.

Differs from the paper: dropout before A, as in all implementations. Differs from PEFT: m starts as
a float32 norm and stays in float32 over half-precision layers, even when these are cast; dropout
does not affect W x, so there is no second product with W; a row of zeros keeps its output instead
of turning into NaN. Differs from adapters: in all of this, except with `convention="adapterhub"`,
which computes the same.
Cost per site: rank · (d_in + d_out) + d_out parameters; LoRA's two products, one pass over the
output, and one over the weight for the norm in each forward; `model.cached_adapters()` keeps it.
Cannot do: layers without a floating-point weight, which has norms.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.averaging import Combination, weighted_sum
from adapterzoo.caches import cached
from adapterzoo.config import Choice, field, method_config
from adapterzoo.contracts import BaseLayer, compute_dtype
from adapterzoo.errors import StateError
from adapterzoo.kernels.compose import compose
from adapterzoo.kernels.dora import direction_reference, divided, row_gain, row_norm, weight_norm
from adapterzoo.kernels.grouped import RowGroups, grouped_expand, grouped_shrink
from adapterzoo.methods._init import constant, drawn
from adapterzoo.methods._targets import PLACES

from .factors import SIDES, Factors, LowRank, LowRankConfig, LowRankUpdate


@method_config("dora")
class DoRAConfig(LowRankConfig):
    """Config of DoRA; `TargetedConfig` chooses the layers, `LowRankConfig` how large they are.

    Attributes:
        convention: "paper", as in PEFT; or "adapterhub": the norm is that of W + B A without the
            factor s, gradients pass through it, and the bias is also multiplied by g.
    """

    convention: str = field("paper", Choice("paper", "adapterhub"))

    @property
    def slot_fields(self) -> frozenset[str]:
        """No other scaling if the norm omits it."""
        return PLACES if self.convention == "adapterhub" else super().slot_fields

    def of_rank(self, rank: int) -> Self:
        """Return the config with this rank; the config itself if the norm omits the scaling."""
        return self if self.convention == "adapterhub" else super().of_rank(rank)

    @property
    def gradients_are_exact(self) -> bool:
        """False in the paper's convention, which treats the norm as a constant (§4.3)."""
        return self.convention == "adapterhub"


class Magnitudes(LowRankUpdate):
    """Base of the adapters y = g (W x + s · B A x) + bias with g = m / ‖W + s · B A‖.

    In a `Stack` each adapter adds its change of the untouched layer, (g − 1) W x + g s · B A x.

    Attributes:
        m: the magnitudes, `[d_out]`, with experts first if the site has any; they are never cast to
            half precision.
        adapterhub: whether to use the convention of adapters.
        at_groups: whether the layer is a convolution with groups, see `LowRank`: the norm is then
            that of W plus s times the numbers of B A as PEFT orders them.
        factor: name of a parameter with the common dtype of all but the magnitudes.
    """

    factor: ClassVar[str] = "lora_A"

    def __init__(self, config: Any, site: Site, device: torch.device, dtype: torch.dtype) -> None:
        """Create the parameters; the magnitudes are ones until `init_from_layer`.

        Args:
            config: the adapter's config, with a `convention`.
            site: the site, which sets the widths.
            device: device for the parameters.
            dtype: the layer's dtype.

        Raises:
            ConfigError: the site cannot have such an adapter.
        """
        super().__init__(config, site, device, dtype)
        self.at_groups = site.groups > 1
        self.adapterhub = config.convention == "adapterhub"
        # a rounded magnitude would not equal the norm, and a new adapter would not be the identity
        self.m = drawn((*site.lead, site.d_out), constant(1.0), device, compute_dtype(dtype))
        if self.adapterhub:
            # the gradients that pass through its norm would also have to be summed
            self.splits = frozenset()

    @abstractmethod
    def update_factors(self, base: BaseLayer) -> Factors:
        """Return A `[*experts, rank, d_in]` and B `[*experts, d_out, rank]` of the update."""

    def gain(self, base: BaseLayer, factors: Factors | None = None) -> Tensor:
        """Return g `[*experts, d_out]`, in float32 or float64; `factors`: those of the update."""
        a, b = self.update_factors(base) if factors is None else factors
        compute, sources = partial(self._gain, base, a, b), partial(self.sources_of_gain, base)
        return cached(self, compute, sources, self.scaling)

    def _gain(self, base: BaseLayer, a: Tensor, b: Tensor) -> Tensor:
        if self.at_groups:
            # as in PEFT, whose norm takes the numbers of B in memory order
            change = (b.reshape(-1, len(a)) @ a).view_as(base.weight)
            scaling = 1.0 if self.adapterhub else self.scaling
            norm = (base.weight + scaling * change).to(self.m.dtype).norm(dim=1)
            return divided(self.m, norm if self.adapterhub else norm.detach())
        if self.adapterhub:
            return divided(self.m, self.norm(base, a, b))
        if base.split is None:
            return row_gain(base.weight, a, b, self.m, self.scaling)
        with torch.no_grad():
            norm = base.split.summed(self.norm(base, a, b).square()).sqrt()
        return divided(self.m, norm)

    def norm(self, base: BaseLayer, a: Tensor, b: Tensor) -> Tensor:
        """Return the norms of the changed rows `[*experts, d_out]`; for adapters, without s."""
        return row_norm(base.weight, a, b, 1.0 if self.adapterhub else self.scaling)

    def sources_of_gain(self, base: BaseLayer) -> list[Tensor]:
        """Return the tensors that g is computed from."""
        return [base.weight, *self.parameters()]

    def init_from_layer(self, base: BaseLayer) -> None:
        """Initialize the magnitudes to the norms of the layer's rows, ‖W‖."""
        self.m.copy_(weight_norm(base.weight))

    def identity_values(self, base: BaseLayer) -> Mapping[str, Tensor]:
        """Return the magnitudes that change nothing, ‖W‖."""
        return {"m": weight_norm(base.weight)}

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer with the change. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y, plain = base(x), base.original(x)  # [*batch, d_out]
        a, b = self.update_factors(base)
        t = self.down(x, a, base)  # [*batch, rank]
        gain, bias = self.gain(base, (a, b)), None if self.adapterhub else base.bias
        if plain is y:
            return compose(y, gain, bias, t, b, self.scaling)
        whole = compose(plain.to(gain.dtype), gain, bias, t, b, self.scaling)
        return (y + (whole - plain)).to(y.dtype)

    def convolved(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output of the convolution, `[*rows, d_out, *places]`."""
        y, plain = base(x), base.original(x)
        a, b = self.update_factors(base)
        gain = base.by_channel(self.gain(base, (a, b)))  # [d_out, 1, …]
        whole = plain.to(gain.dtype) + self.scaling * self.across(x, a, b, base)
        bias = None if self.adapterhub or base.bias is None else base.by_channel(base.bias)
        whole = gain * whole if bias is None else gain * (whole - bias) + bias
        return (y + (whole - plain)).to(y.dtype)

    @property
    def row_options(self) -> Hashable | None:
        """Dtypes, dropout and convention; None at an embedding, and with experts."""
        if self.at_embedding or self.m.dim() > 1:
            return None
        return self.dropout, self.adapterhub, self.m.dtype, getattr(self, self.factor).dtype

    def row_tensors(self, base: BaseLayer, dtype: torch.dtype) -> Mapping[str, Tensor | float]:
        """Return A, B, s and g."""
        a, b = self.update_factors(base)
        gain = self.gain(base, (a, b))
        return {"lora_A": a, "lora_B": b, "scaling": self.scaling, "gain": gain}

    def forward_rows(
        self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row of the batch with its own change. `x` `[rows, *tokens, d_in]`."""
        y, plain = base(x), base.original(x)  # [rows, *tokens, d_out]
        a, b, gain = stacks["lora_A"], stacks["lora_B"], stacks["gain"]
        t = grouped_shrink(x, a, groups, self.dropout, self.training)  # [rows, *tokens, rank]
        wide = plain.to(gain.dtype)
        whole = grouped_expand(wide, t, b, stacks["scaling"], groups)  # [rows, *tokens, d_out]
        change = groups.features(gain, y.dim()) - 1  # [rows, 1, …, d_out]
        bias = None if self.adapterhub else base.bias
        whole = whole + change * (whole if bias is None else whole - bias)
        out = whole if plain is y else y + (whole - plain)
        return groups.restored(out.to(y.dtype), y)

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + (g (W + s · B A) − W), `[d_out, d_in]`, experts first.

        Raises:
            StateError: the layer is a convolution with groups.
        """
        if self.at_groups:
            raise StateError(
                "B A reads the channels of all groups of the convolution, and its weight cannot. "
                "Keep the adapter active."
            )
        factors = self.update_factors(base)
        direction = direction_reference(base.weight, *factors, self.scaling)
        return w + (self.gain(base, factors).unsqueeze(-1) * direction - base.weight)

    def merged_bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias `[d_out]`: the layer's, times g in the convention of adapters."""
        if not self.adapterhub or base.bias is None:
            return b
        return b + (self.gain(base) - 1) * base.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module; casts to half precision keep the magnitudes in float32."""

        def kept_wide(t: Tensor) -> Tensor:
            made = fn(t)
            m = self._parameters["m"]
            if m is None or not (t is m or t is m.grad):
                return made
            # a move keeps values that an engine has rounded, in addition to its float32 copy
            is_cast = made.dtype is not t.dtype
            # the result of the cast is already rounded
            return t.to(made.device, compute_dtype(made.dtype)) if is_cast else made

        super()._apply(kept_wide, recurse)  # type: ignore[no-untyped-call]
        return self


class DoRA(Magnitudes, LowRank):
    """y = g (W x + s · B A dropout(x)) + bias with g = m / ‖W + s · B A‖."""

    adapts_convolutions = True
    splits = frozenset({"in", "out"})
    split_dims: Mapping[str, tuple[str, ...]] = MappingProxyType({**SIDES, "m": ("out",)})

    def update_factors(self, base: BaseLayer) -> Factors:
        """Return A and B."""
        return self.lora_A, self.lora_B

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Combine several adapters.

        "cat" and the strategies with SVD add up changes of the weight, Σ wᵢ (Wᵢ' − W); each other
        strategy combines m linearly. With c = 1 + Σ wᵢ (gᵢ − 1) the sum is the change to
        c (W + Σ wᵢ s gᵢ/c · Bᵢ Aᵢ): each Bᵢ is multiplied by gᵢ/c, and m = c ‖W + B A‖.
        """
        if strategy.target not in ("ranks", "change"):
            super().combine(adapters, weights, strategy, base)
            self.combine_linearly(["m"], adapters, weights, strategy, base)
            return
        gains = [adapter.gain(base) for adapter in adapters]  # [*experts, d_out] each
        c = 1 + weighted_sum([gain - 1 for gain in gains], weights)
        self.combine_factors(adapters, weights, strategy, [gain / c for gain in gains])
        strategy.fill(self.m, c * self.norm(base, self.lora_A, self.lora_B), "m")


DoRAConfig.adapter_class = DoRA
