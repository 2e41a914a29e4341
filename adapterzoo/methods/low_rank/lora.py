"""LoRA — Low-Rank Adaptation.

Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3; rsLoRA: Kalajdzievski 2023, arXiv:2312.03732.
y = W x + b + s · B A x with A `[rank, d_in]`, B `[d_out, rank]` and s = alpha / rank, or
alpha / √rank with `use_rslora`. With `alora_invocation_tokens` it is aLoRA (`_invocation`).

Differs from the paper: dropout before A, as in all implementations. Differs from PEFT: parameters
live in the dtype of their layer unless `dtype` says otherwise; PiSSA and OLoRA do not change the
base weight (`_started`). Differs from adapters: a `Stack` adds the updates; a gated update is
scaled by s as well; without `convention="adapterhub"` a gate does not read padding.
Cost per site: rank · (d_in + d_out) parameters, two products of that size, four with a start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from adapterzoo.anatomy import Site
from adapterzoo.averaging import Combination
from adapterzoo.config_base import config_class
from adapterzoo.configs import architectures, change_forms, config_strings
from adapterzoo.contracts import BaseLayer
from adapterzoo.errors import ConfigError, StateError
from adapterzoo.fields import Choice, field
from adapterzoo.kernels.grouped import Groups, grouped_low_rank
from adapterzoo.kernels.low_rank import low_rank
from adapterzoo.spelling import spelled

from . import _adalora_spelling, _lora_spelling
from ._gate import Gate
from ._init import constant, drawn, generator
from ._invocation import InvokedConfig, invoked
from ._low_rank_rows import updated_with_options
from ._started import Started
from ._starts import starts_from_weight


@architectures.register("lora")
@config_strings.register("lora")
@change_forms.register("lora")
@spelled(_lora_spelling.adapterhub, _lora_spelling.peft, _adalora_spelling.peft)
@config_class
class LoRAConfig(InvokedConfig):
    """Config of LoRA; `TargetedConfig` chooses the layers, `InvokedConfig` the rest.

    Attributes:
        use_gating: scale the update by a learned gate, one number per sequence (UniPELT).
        convention: the gate averages the prompt's real tokens ("paper") or all ("adapterhub").
        lora_bias: give B a bias.
    """

    architecture: ClassVar[str] = "lora"

    use_gating: bool = False
    convention: str = field("paper", Choice("paper", "adapterhub"))
    lora_bias: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.convention != "paper" and not self.use_gating:
            raise ConfigError(
                f"{type(self).__name__}(convention={self.convention!r}): has an effect only with "
                f"use_gating=True. Write convention='paper'."
            )
        if self.use_gating and starts_from_weight(self.init_weights):
            raise ConfigError(
                f"{type(self).__name__}(use_gating=True, init_weights={self.init_weights!r}): the "
                f"gate would scale a part of the weight. Write init_weights='lora'."
            )

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> LoRA:
        """Return a fresh adapter for the site."""
        return LoRA(self, site, device, dtype)


class LoRA(Started):
    """y = base(x) + s · B A dropout(x) (+ s · B's bias)."""

    is_additive = True

    def __init__(
        self, config: LoRAConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Raises:
            ConfigError: the site cannot have the bias, the gate or the dropout.
        """
        super().__init__(config, site, device, dtype)
        if (site.is_only_read or self.looks_up) and (config.use_gating or config.lora_bias):
            raise ConfigError(
                f"LoRAConfig(use_gating={config.use_gating}, lora_bias={config.lora_bias}) at "
                f"{site.path!r}: only its weight can be adapted. Write False for both."
            )
        dtype = config.dtype_at(dtype)
        bias = drawn((site.d_out,), constant(0.0), device, dtype) if config.lora_bias else None
        self.lora_B_bias = bias
        self.invocation = config.invocation
        self.reads_call = self.reads_prompt = self.invocation is not None
        self.gate: Gate | None = None
        if config.use_gating:
            source = generator(config.init_weights_seed, f"{site.path}{site.role}/gate")
            self.gate = Gate(site, config.convention, source, device, dtype)
            self.reads_call |= self.gate.reads_call
            self.reads_prompt |= self.gate.reads_sequence
        options = self.gate, self.lora_B_bias, self.start, self.invocation
        self._is_plain = not self.looks_up and all(option is None for option in options)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output `[*batch, d_out]` for `x` `[*batch, d_in]`, or tokens `[*batch]`."""
        y, a, b = base(x), self.lora_A, self.lora_B
        if self._is_plain:
            return low_rank(y, x, a, b, self.scaling, self.dropout, self.training)
        if self.looks_up:
            t = invoked(self.looked_up(x, base), self.invocation, x, base)  # [*batch, rank]
            return y + (t @ b.T * (self.scaling * base.scale)).to(y.dtype)
        start = 0.0 if self.start is None else self.start(x)
        update = (linear(self.down(x), b, self.lora_B_bias) - start) * self.scaling
        update = invoked(update, self.invocation, x, base)
        if self.gate is not None:
            update = update * self.gate(x, base)
        return y + update.to(y.dtype)

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether they are of the same dtype, dropout and options, on features."""
        kinds = {(a.lora_A.dtype, a.lora_B.dtype, a.dropout, a.reads_call) for a in adapters}
        options = {(a.gate is None, a.lora_B_bias is None, a.invocation is None) for a in adapters}
        return len(kinds) == len(options) == 1 and not any(a.looks_up or a.start for a in adapters)

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row of the batch with its own update. `x` `[rows, *tokens, d_in]`."""
        y = base(x)  # [rows, *tokens, d_out]
        gates = [each.gate for each in adapters if each.gate is not None]
        biases = [each.lora_B_bias for each in adapters if each.lora_B_bias is not None]
        invocations = [each.invocation for each in adapters]
        if not (gates or biases or any(invocations)) or not groups.rows:
            one, scaling = adapters[0], [each.scaling for each in adapters]
            a, b = [each.lora_A for each in adapters], [each.lora_B for each in adapters]
            return grouped_low_rank(y, x, a, b, scaling, groups, one.dropout, one.training)
        return updated_with_options(y, adapters, groups, x, base, biases, gates, invocations)

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Combine several adapters; s · B's bias is combined linearly."""
        if self.gate is not None and strategy.target != "parameters":
            raise strategy.refusal("the gate of a LoRA adapter with use_gating=True is none")
        super().combine(adapters, weights, strategy, base)
        if self.gate is not None:
            self.combine_linearly(["gate.weight", "gate.bias"], adapters, weights, strategy, base)
        if self.lora_B_bias is not None:
            if not strategy.keeps_scaling:
                pairs = zip(adapters, weights, strict=True)
                weights = [w * a.scaling / self.scaling for a, w in pairs]
            self.combine_linearly(["lora_B_bias"], adapters, weights, strategy, base)

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + s · B A, `[d_out, d_in]`."""
        if self.invocation is not None or self.gate is not None:
            name = "alora_invocation_tokens=[…]" if self.invocation else "use_gating=True"
            raise StateError(f"{name} depends on its input. Keep it active instead.")
        return self.added(w)

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias b + s · B's bias, `[d_out]`."""
        return b if self.lora_B_bias is None else b + self.scaling * self.lora_B_bias.to(b.dtype)
