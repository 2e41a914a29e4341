"""The function f of a bottleneck and the sum with its result; see `bottleneck` for its sites."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Self, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from adapterzoo.activations import activation
from adapterzoo.anatomy import Site
from adapterzoo.contracts import BaseLayer, FusibleAdapter
from adapterzoo.kernels.bottleneck import bottleneck
from adapterzoo.kernels.grouped import Groups, grouped_expand, grouped_shrink, stacked

from ._bottleneck_fields import BottleneckFields
from ._gate import Gate
from ._init import DTYPES, constant, drawn, generator, kaiming, normal
from ._rows import features, gated, normed, restored

Instead: TypeAlias = Callable[[Tensor], Tensor] | None
"""A function that replaces a bottleneck's f; None: f itself."""

Added: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""The sum of a bottleneck, from its input and the tensor that its result is added to."""


class Finish(NamedTuple):
    """The operations between the up projection and the sum, of a bottleneck or of each row's.

    Attributes:
        scaling: a tensor; or a number, equal to `factor`.
        factor: of the sum.
        gate: of `use_gating`, or None.
        norm: of `ln_after`, or None.
    """

    scaling: Tensor | float
    factor: float
    gate: Callable[[Tensor], Tensor] | None
    norm: Callable[[Tensor], Tensor] | None


class Affine(nn.Module):
    """x Wᵀ + b; not an `nn.Linear`, so that code that walks a model's layers skips it."""

    bias: nn.Parameter

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        # None only in fusions
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[*batch, d_in]` → `[*batch, d_out]`."""
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the widths."""
        return f"d_in={self.weight.shape[1]}, d_out={self.weight.shape[0]}"


class BottleneckLayer(FusibleAdapter):
    """f(x) = scaling · gate(x) · (W_up φ(W_down LN(x) + b_down) + b_up); norm and gate optional.

    Attributes:
        adapter_down: the norm of `ln_before` if there is one, then the down projection.
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
        # forwards do not read the config: torch.compile would make a graph for each config class
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
        self.gate: Gate | None = None
        if config.use_gating:
            self.gate = Gate(site, config.convention, source, device, dtype)
            self.reads_call = self.gate.reads_call
        # the final sum multiplies by a number without an extra operation
        self.factor = 1.0
        if isinstance(config.scaling, str):
            shape = (1,) if config.scaling == "learned" else (d_model,)
            self.scaling = drawn(shape, constant(1.0), device, dtype)
        else:
            self.scaling = self.factor = float(config.scaling)

    def forward(self, x: Tensor, base: BaseLayer, instead: Instead = None) -> Tensor:
        """Return the adapted module. `x` is its input, the result `[*batch, d_model]`."""
        add: Added = self.added
        if instead is not None or self.gate is not None:
            add = partial(self.added, instead=instead, base=base)
        if self.acts_on == "input":
            return base(self.changed(x, base.original(x), base, add))
        return self.changed(x, base(x), base, add)

    @abstractmethod
    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, add: Added) -> Tensor:
        """Return the module's output, or its input if the bottleneck acts on the input.

        Args:
            x: the module's input.
            y: its output `[*batch, d_model]`; untouched if the bottleneck acts on the input.
            base: the module.
            add: `added` without its last argument.
        """

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether they differ only in widths, factors and values."""
        kinds = set()
        for a in adapters:
            scaling = a.scaling.shape if isinstance(a.scaling, Tensor) else None
            norms = (
                a.reads_normed,
                a.adapter_norm_after is None,
                a.gate is None,
                a.reads_call,
                a.original_ln_after,
            )
            drops = a.dropout, a.stochastic_depth, a.non_linearity, a.adapter_up.weight.dtype
            sums = a.residual_before_ln, a.adapter_residual_before_ln
            kinds.add((scaling, *norms, *drops, *sums))
        return len(kinds) == 1

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return the adapted module, each row of the batch with its own bottleneck."""
        if not groups.rows:
            return base(x)
        add = partial(cls._added_by_rows, adapters, groups, base)
        if cls.acts_on == "input":
            return base(restored(adapters[0].changed(x, base.original(x), base, add), x, groups))
        y = base(x)
        return restored(adapters[0].changed(x, y, base, add), y, groups)

    @staticmethod
    def _added_by_rows(
        adapters: Sequence[BottleneckLayer],
        groups: Groups,
        base: BaseLayer,
        x: Tensor,
        to: Tensor,
    ) -> Tensor:
        """Return `added` for each row with its own bottleneck; rows without one are undefined."""
        one, dim = adapters[0], x.dim()
        ups = [a.adapter_up for a in adapters]
        downs = [cast("Affine", getattr(a.adapter_down, a.down_name)) for a in adapters]
        ones = [1.0] * len(adapters)
        stack = stacked([down.weight for down in downs], [up.weight for up in ups], ones)
        x = x.to(stack.a.dtype)
        inner = x
        if one.reads_normed:
            inner = normed([cast("nn.LayerNorm", a.adapter_down[0]) for a in adapters], groups, x)
        inner = grouped_shrink(inner, stack.a, groups)  # [rows, *tokens, width]
        inner = inner + features([down.bias for down in downs], groups, dim).to(inner.dtype)
        inner = one.activation(inner)
        bias = features([up.bias for up in ups], groups, dim).to(inner.dtype).expand(x.shape)
        update = grouped_expand(bias, inner, stack.b, ones, groups)  # [rows, *tokens, d_model]
        scaling, factor = one.scaling, one.factor
        learned = [a.scaling for a in adapters if isinstance(a.scaling, Tensor)]
        if learned or any(a.factor != factor for a in adapters):
            factors = learned or [update.new_tensor([a.factor]) for a in adapters]
            scaling, factor = features(factors, groups, dim), 1.0
        gates = [a.gate for a in adapters if a.gate is not None]
        norms = [a.adapter_norm_after for a in adapters if a.adapter_norm_after is not None]
        gate = partial(gated, gates, groups, base=base) if gates else None
        norm = partial(normed, norms, groups) if norms else None
        return one._finished(update, x, to, Finish(scaling, factor, gate, norm))

    def update(self, x: Tensor) -> Tensor:
        """Scaling · (W_up φ(W_down LN(x) + b_down) + b_up); `x` `[*batch, d_model]`."""
        up = self.adapter_up
        inner = self.activation(self.adapter_down(x.to(up.weight.dtype)))  # [*batch, width]
        return linear(inner, up.weight, up.bias) * self.scaling

    def added(
        self, x: Tensor, to: Tensor, instead: Instead = None, base: BaseLayer | None = None
    ) -> Tensor:
        """`to` + f(x), or with the norm of `ln_after` around f(x) or around the sum.

        Args:
            x: what the bottleneck reads, `[*batch, d_model]`.
            to: the tensor that the result is added to, same shape; determines the dtype.
            instead: replaces f.
            base: the module, which a gate asks for the call.
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
        gate = None if self.gate is None else partial(self.gate, base=cast("BaseLayer", base))
        parts = Finish(self.scaling, self.factor, gate, self.adapter_norm_after)
        return self._finished(update, x, to, parts)

    def _finished(self, update: Tensor, x: Tensor, to: Tensor, parts: Finish) -> Tensor:
        """Return the sum with the update after its options; all `[*batch, d_model]`."""
        if self.training and self.stochastic_depth:
            update = drop_rows(update, self.stochastic_depth)
        if isinstance(parts.scaling, Tensor):
            update = update * parts.scaling
        if self.training and self.dropout:
            update = dropout(update, self.dropout)
        if parts.gate is not None:
            update = update * parts.gate(x)
        if parts.norm is None:
            return torch.add(to, update.to(to.dtype), alpha=parts.factor)
        if parts.factor != 1.0:
            update = update * parts.factor
        if self.adapter_residual_before_ln:
            return parts.norm(to.to(x.dtype) + update).to(to.dtype)
        return to + parts.norm(update).to(to.dtype)

    def extra_repr(self) -> str:
        """Return the activation and the scaling."""
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
