"""The inside of a bottleneck, f, and the sum that it ends in; where it acts is said elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from adapterzoo.activations import activation
from adapterzoo.anatomy import Site
from adapterzoo.contracts import FusibleAdapter
from adapterzoo.kernels.bottleneck import bottleneck

from ._bottleneck_fields import BottleneckFields
from ._gate import Gate
from ._init import DTYPES, constant, drawn, generator, kaiming, normal

Instead: TypeAlias = Callable[[Tensor], Tensor] | None
"""What acts in the place of a bottleneck's function, if anything."""


class Affine(nn.Module):
    """x Wᵀ + b; no `nn.Linear`, so that nothing that walks a model's layers takes it for one."""

    bias: nn.Parameter

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        # None for none: a fusion has such, a bottleneck has not
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[*batch, d_in]` → `[*batch, d_out]`."""
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """The widths."""
        return f"d_in={self.weight.shape[1]}, d_out={self.weight.shape[0]}"


class BottleneckLayer(FusibleAdapter):
    """f(x) = scaling · gate(x) · (W_up φ(W_down LN(x) + b_down) + b_up); norm and gate optional.

    Attributes:
        adapter_down: the norm of `ln_before` where there is one, then the down projection.
        adapter_up: the up projection.
        adapter_norm_after: the norm of `ln_after`, or None.
        gate: of `use_gating`, or None.
        scaling: a number, or a parameter of shape `[1]` or `[d_model]`.
        reads_normed: whether there is such a norm in `adapter_down`.
        down_name: of the projection in `adapter_down`.
        is_plain: whether nothing but a number stands between the up projection and the sum.
        drops: whether training drops anything.
    """

    scaling: Tensor | float

    def __init__(
        self, config: BottleneckFields, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Args:
            config: of the adapter.
            site: gives block number and width.
            device: of the parameters.
            dtype: of the layer.
        """
        super().__init__()
        dtype = DTYPES[config.dtype] if config.dtype else dtype
        # a forward reads no config: of two classes with equal fields a compiler makes two graphs
        self.config = config
        self.activation = activation(config.non_linearity)
        self.non_linearity = str(config.non_linearity or "linear").lower()
        self.dropout, self.stochastic_depth = config.dropout, config.stochastic_depth
        self.reads_normed = config.ln_before
        self.down_name = str(int(config.ln_before))
        self.drops = bool(config.dropout or config.stochastic_depth)
        self.original_ln_after = config.original_ln_after
        self.residual_before_ln = config.residual_before_ln
        self.adapter_residual_before_ln = config.adapter_residual_before_ln
        learned = isinstance(config.scaling, str)
        self.is_plain = not (config.ln_after or config.use_gating or learned)
        d_model = site.d_out
        width = config.width_at(site.layer, d_model)
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        bert, houlsby, zero = normal(0.02, source), _truncated_normal(0.01, source), constant(0.0)
        fresh_down, fresh_up = {
            "bert": (bert, bert),
            "mam_adapter": (kaiming(source), zero),
            "houlsby": (houlsby, houlsby),
        }[config.init_weights]
        down = Affine(
            drawn((width, d_model), fresh_down, device, dtype),
            drawn((width,), zero, device, dtype),
        )
        norms = [nn.LayerNorm(d_model, device=device, dtype=dtype)] if config.ln_before else []
        self.adapter_down = nn.Sequential(*norms, down)
        self.adapter_up = Affine(
            drawn((d_model, width), fresh_up, device, dtype),
            drawn((d_model,), zero, device, dtype),
        )
        self.adapter_norm_after: nn.LayerNorm | None = None
        if config.ln_after:
            self.adapter_norm_after = nn.LayerNorm(d_model, device=device, dtype=dtype)
        self.gate = Gate(d_model, source, device, dtype) if config.use_gating else None
        # a number is left to the sum at the end, which multiplies without an operation of its own
        self.factor = 1.0
        if isinstance(config.scaling, str):
            shape = (1,) if config.scaling == "learned" else (d_model,)
            self.scaling = drawn(shape, constant(1.0), device, dtype)
        else:
            self.scaling = self.factor = float(config.scaling)

    def update(self, x: Tensor) -> Tensor:
        """Scaling · (W_up φ(W_down LN(x) + b_down) + b_up); `x` `[*batch, d_model]`."""
        up = self.adapter_up
        inner = self.activation(self.adapter_down(x.to(up.weight.dtype)))  # [*batch, width]
        return linear(inner, up.weight, up.bias) * self.scaling

    def added(self, x: Tensor, to: Tensor, instead: Instead = None) -> Tensor:
        """`to` + f(x), or with the norm of `ln_after` around f(x) or around the sum.

        Args:
            x: what the bottleneck reads, `[*batch, d_model]`.
            to: what its result is added to, same shape; its dtype is that of the result.
            instead: acts in the place of f.
        """
        if instead is not None:
            return to + instead(x).to(to.dtype)
        up = self.adapter_up
        weight = up.weight
        if self.is_plain and not (self.drops and self.training):
            inside = self.adapter_down
            # by name: several times as fast as by number
            down = getattr(inside, self.down_name)
            if self.reads_normed:
                x = inside[0](x.to(weight.dtype))
            return bottleneck(
                to, x, down.weight, down.bias, weight, cast("Tensor", up.bias), self.factor,
                self.non_linearity,
            )  # fmt: skip
        # the parameters may have another dtype than the model
        x = x.to(weight.dtype)
        update = linear(self.activation(self.adapter_down(x)), weight, up.bias)
        update = self._shaped(update, x)
        norm = self.adapter_norm_after
        if norm is None:
            return torch.add(to, update.to(to.dtype), alpha=self.factor)
        if self.factor != 1.0:
            update = update * self.factor
        if self.adapter_residual_before_ln:
            whole: Tensor = norm(to.to(x.dtype) + update)
            return whole.to(to.dtype)
        normed: Tensor = norm(update)
        return to + normed.to(to.dtype)

    def _shaped(self, update: Tensor, x: Tensor) -> Tensor:
        """The update after its options, but for a constant scaling; all `[*batch, d_model]`."""
        if self.training and self.stochastic_depth:
            update = drop_rows(update, self.stochastic_depth)
        if isinstance(self.scaling, Tensor):
            update = update * self.scaling
        if self.training and self.dropout:
            update = dropout(update, self.dropout)
        return update if self.gate is None else update * self.gate(x)

    def extra_repr(self) -> str:
        """What the parameters below do not show."""
        scaling = self.config.scaling
        return f"non_linearity={self.config.non_linearity!r}, scaling={scaling!r}"


def drop_rows(x: Tensor, p: float) -> Tensor:
    """Stochastic depth: whole rows of the batch become zero, the others are divided by 1 − p.

    Huang et al. 2016, arXiv:1603.09382, eq. 2, at training time.

    Args:
        x: `[batch, …]`.
        p: probability of dropping a row, 0 to below 1.
    """
    kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1.0 - p)
    return x * kept.div_(1.0 - p)


def _truncated_normal(std: float, source: torch.Generator | None) -> Callable[[Tensor], Tensor]:
    """Normal with mean 0, cut off at two deviations."""
    return lambda t: nn.init.trunc_normal_(t, 0.0, std, -2 * std, 2 * std, generator=source)
