"""The function f of a bottleneck, and how its result joins the stream at each kind of site."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm

from adapterzoo.activations import activation
from adapterzoo.anatomy import Site
from adapterzoo.contracts import BaseLayer, FusibleAdapter, LanguageFreeAdapter
from adapterzoo.kernels.bottleneck import bottleneck
from adapterzoo.kernels.grouped import RowGroups, grouped_expand, grouped_shrink
from adapterzoo.methods._init import constant, drawn, dtype_named, generator, kaiming, normal
from adapterzoo.methods._parts import Affine, Gate, affine

from .compacter import Drawing, HypercomplexProjection, MatrixProduct
from .languages import JOINING, norm_of

Instead: TypeAlias = Callable[[Tensor], Tensor] | None
"""A function that replaces a bottleneck's f; None: f itself."""

Norm: TypeAlias = Callable[[Tensor], Tensor] | None


class BottleneckLayer(FusibleAdapter):
    """f(x) = scaling · gate(x) · (W_up φ(W_down LN(x) + b_down) + b_up); norm and gate optional.

    Attributes:
        adapter_down: the norm of `ln_before`, if any, then the down projection.
        adapter_up: the up projection.
        shares: whether layers share tensors of the projections.
        adapter_norm_after: the norm of `ln_after`, or None.
        gate: gate of `use_gating`, or None.
        scaling: a number, or a parameter of shape `[1]` or `[d_model]`.
        reads_normed: whether `adapter_down` has such a norm.
        down_name: name of the projection in `adapter_down`.
        is_plain: whether the projections are matrices, and at most a number is multiplied between
            the second and the sum.
        drops: whether training drops anything.
    """

    scaling: Tensor | float
    # it reads the output of its layer, never the input
    splits = frozenset({"in"})

    def __init__(self, config: Any, site: Site, device: torch.device, dtype: torch.dtype) -> None:
        """Make the parameters.

        Args:
            config: a `BnConfig`.
            site: the site, with block number and width.
            device: device for the parameters.
            dtype: the layer's dtype.
        """
        super().__init__()
        dtype = dtype_named(config.dtype, dtype)
        # forwards do not read the config: torch.compile would compile a graph for each config class
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
        self.shares = config.shares_matrices
        self.is_plain = not (config.phm_layer or config.ln_after or config.use_gating or learned)
        d_model = site.d_out
        width = config.width_at(site.layer, d_model)
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        down, up = _projections(Drawing(config, source, device, dtype), d_model, width)
        norms = [nn.LayerNorm(d_model, device=device, dtype=dtype)] if config.ln_before else []
        self.adapter_down = nn.Sequential(*norms, down)
        self.adapter_up = up
        self.adapter_norm_after: nn.LayerNorm | None = None
        if config.ln_after:
            self.adapter_norm_after = nn.LayerNorm(d_model, device=device, dtype=dtype)
        self.gate: Gate | None = None
        if config.use_gating:
            self.gate = Gate(site, config.convention, source, device, dtype)
            self.reads_call = self.gate.reads_call
            self.reads_prompt = self.gate.reads_sequence
        # the final sum multiplies by a number without an extra operation
        self.factor = 1.0
        if isinstance(config.scaling, str):
            shape = (1,) if config.scaling == "learned" else (d_model,)
            self.scaling = drawn(shape, constant(1.0), device, dtype)
        else:
            self.scaling = self.factor = float(config.scaling)

    def forward(self, x: Tensor, base: BaseLayer, instead: Instead = None) -> Tensor:
        """Return the adapted module. `x` is its input; the result is `[*batch, d_model]`."""
        if self.acts_on == "input":
            return base(self.changed(x, base.original(x), base, instead))
        return self.changed(x, base(x), base, instead)

    @property
    def row_options(self) -> Hashable | None:
        """Options: place, φ and dropouts; None with Kronecker products, a gate, or a norm after it.

        A norm before is allowed.
        """
        if self.config.phm_layer or self.adapter_norm_after is not None or self.gate is not None:
            return None
        place = self.original_ln_after, self.residual_before_ln, self.adapter_residual_before_ln
        norm = cast("nn.LayerNorm", self.adapter_down[0]).eps if self.reads_normed else None
        drops = self.dropout, self.stochastic_depth
        return (
            *place,
            norm,
            *drops,
            self.non_linearity,
            cast("Affine", self.adapter_up).weight.dtype,
        )

    def row_tensors(self, base: BaseLayer, dtype: torch.dtype) -> Mapping[str, Tensor | float]:
        """Return the matrices, scaling and s · b_up, and the values of the norm if there is one.

        A learned scaling is folded into W_up.
        """
        down, up = getattr(self.adapter_down, self.down_name), cast("Any", self.adapter_up)
        weight = up.weight
        if isinstance(self.scaling, Tensor):
            weight = weight * self.scaling.unsqueeze(-1)
        found = {
            "down": down.weight, "down_bias": down.bias, "up": weight,
            "up_bias": up.bias * self.scaling, "scaling": self.factor,
        }  # fmt: skip
        if self.reads_normed:
            norm: Any = self.adapter_down[0]
            found |= {"norm": norm.weight, "norm_bias": norm.bias}
        return found

    def forward_rows(
        self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row with its own bottleneck; `x` is the module's input."""
        update = partial(self._update_of_rows, stacks, groups)
        if self.acts_on == "input":
            changed = self.changed(x, base.original(x), base, update)
            return base(groups.restored(changed, x))
        y = base(x)
        return groups.restored(self.changed(x, y, base, update), y)

    def _update_of_rows(self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor) -> Tensor:
        """Return f(x) of each row, `[rows, *tokens, d_model]`."""
        down, dim = stacks["down"], x.dim()
        x = x.to(down.dtype)
        if self.reads_normed:
            norm = cast("nn.LayerNorm", self.adapter_down[0])
            # inf and NaN of rows without an adapter would reach their gradient
            x = groups.restored(x, torch.zeros_like(x))
            x = layer_norm(x, norm.normalized_shape, eps=norm.eps)
            x = x * groups.features(stacks["norm"], dim)
            x = x + groups.features(stacks["norm_bias"], dim)
        inner = grouped_shrink(x, down, groups)  # [rows, *tokens, width]
        inner = self.activation(inner + groups.features(stacks["down_bias"], dim))
        bias = groups.features(stacks["up_bias"], dim).expand_as(x).contiguous()
        update = grouped_expand(bias, inner, stacks["up"], stacks["scaling"], groups)
        if self.training and self.stochastic_depth:
            update = drop_rows(update, self.stochastic_depth)
        return dropout(update, self.dropout, self.training)

    @abstractmethod
    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, instead: Instead) -> Tensor:
        """Return the module's output, or its input if the bottleneck acts on the input.

        Args:
            x: the module's input.
            y: its output `[*batch, d_model]`; untouched if the bottleneck acts on the input.
            base: the module.
            instead: a function that replaces f; None: f itself.
        """

    def transformed(self, x: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor]:
        """Return x in the dtype of the parameters, and W_up φ(W_down LN(x) + b_down) + b_up.

        Args:
            x: the bottleneck's input, `[*batch, d_model]`; both results have its shape.
            base: the module.
        """
        down: Any = getattr(self.adapter_down, self.down_name)
        up: Any = self.adapter_up
        if isinstance(up, HypercomplexProjection):
            shared = cast("nn.ModuleDict", base.shared(self))["phm"] if self.shares else None
            down, up = down.product(shared, x.device), up.product(shared, x.device)
        # the parameters may have another dtype than the model
        x = x.to(up.matrices[0].dtype if isinstance(up, MatrixProduct) else up.weight.dtype)
        inner = cast("nn.LayerNorm", self.adapter_down[0])(x) if self.reads_normed else x
        return x, up(self.activation(down(inner)))  # inside: [*batch, width]

    def update(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Scaling · (W_up φ(W_down LN(x) + b_down) + b_up); `x` `[*batch, d_model]`."""
        return self.transformed(x, base)[1] * self.scaling

    def added(self, x: Tensor, to: Tensor, base: BaseLayer, instead: Instead = None) -> Tensor:
        """`to` + f(x), or with the norm of `ln_after` around f(x) or around the sum.

        Args:
            x: the bottleneck's input, `[*batch, d_model]`.
            to: the tensor to which the result is added, same shape; determines the dtype.
            base: the module.
            instead: a function that replaces f; None: f itself.
        """
        if instead is not None:
            return to + instead(x).to(to.dtype)
        if self.is_plain and not (self.drops and self.training):
            inside, up = self.adapter_down, cast("Affine", self.adapter_up)
            # access by name: several times as fast as by number
            down, weight = getattr(inside, self.down_name), up.weight
            if self.reads_normed:
                x = inside[0](x.to(weight.dtype))
            return bottleneck(
                to, x, down.weight, down.bias, weight, cast("Tensor", up.bias), self.factor,
                self.non_linearity,
            )  # fmt: skip
        x, update = self.transformed(x, base)
        if self.training and self.stochastic_depth:
            update = drop_rows(update, self.stochastic_depth)
        if isinstance(self.scaling, Tensor):
            update = update * self.scaling
        if self.training and self.dropout:
            update = dropout(update, self.dropout)
        if self.gate is not None:
            update = update * self.gate(x, base)
        norm = self.adapter_norm_after
        if norm is None:
            return torch.add(to, update.to(to.dtype), alpha=self.factor)
        if self.factor != 1.0:
            update = update * self.factor
        if self.adapter_residual_before_ln:
            return norm(to.to(x.dtype) + update).to(to.dtype)  # type: ignore[no-any-return]
        return to + norm(update).to(to.dtype)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the activation and the scaling."""
        scaling = self.config.scaling
        return f"non_linearity={self.config.non_linearity!r}, scaling={scaling!r}"


def _projections(
    drawing: Drawing, d_model: int, width: int
) -> tuple[Affine | HypercomplexProjection, Affine | HypercomplexProjection]:
    """Return the new down and up projection of a layer."""
    config, source = drawing.config, drawing.source
    if config.phm_layer:
        made = partial(HypercomplexProjection, drawing)
        return made("down", d_model, width), made("up", width, d_model)
    bert = normal(0.02, source)
    # cut off at two deviations
    houlsby = partial(nn.init.trunc_normal_, std=0.01, a=-0.02, b=0.02, generator=source)
    starts: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "bert": (bert, bert),
        "mam_adapter": (kaiming(source), constant(0.0)),
        "houlsby": (houlsby, houlsby),
    }
    fresh_down, fresh_up = starts[config.init_weights]
    down = affine((width, d_model), fresh_down, drawing.device, drawing.dtype)
    return down, affine((d_model, width), fresh_up, drawing.device, drawing.dtype)


def drop_rows(x: Tensor, p: float) -> Tensor:
    """Stochastic depth: whole rows of the batch become zero, the others are divided by 1 − p.

    Huang et al. 2016, arXiv:1603.09382, eq. 2, at training time.

    Args:
        x: `[batch, …]`.
        p: probability of dropping a row, 0 to below 1.
    """
    kept = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1.0 - p)
    return x * kept.div_(1.0 - p)


# --- the documented places ---


class Bottleneck(BottleneckLayer):
    """y ← y + f(y), with y the output of the module: h, the block's output, or the norm's."""

    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, instead: Instead) -> Tensor:
        """Return the output. `x` is the input, `y` the plain output `[*batch, d_model]`."""
        return self.added(y, y, base, instead)


class ParallelBottleneck(BottleneckLayer):
    """h ← h + f(inp)."""

    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, instead: Instead) -> Tensor:
        """Return the output. `x` is the input, `y` is h `[*batch, d_model]`."""
        return self.added(base.residual, y, base, instead)


class StreamBottleneck(BottleneckLayer):
    """h ← h + f(h + inp): changes h so that f is added to the stream after the sub-layer.

    Unless `residual_before_ln` is True the result is added to s, and without
    `original_ln_after` inp is not added to it again.
    """

    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, instead: Instead) -> Tensor:
        """Return the output. `x` is the input, `y` is h `[*batch, d_model]`."""
        inp = base.residual
        s = y + inp
        if self.residual_before_ln is True:
            return self.added(s, y, base, instead)
        # under autocast h may be narrower than the stream
        if self.original_ln_after:
            return self.added(s, s, base, instead).to(y.dtype)
        if self.adapter_residual_before_ln:
            return (self.added(s, s, base, instead) - inp).to(y.dtype)
        # (s + f(s)) − inp without its rounding
        return self.added(s, y, base, instead)


class NormBottleneck(BottleneckLayer):
    """LN(s) ← LN(s + f(LN(s))), or as defined by other values of `residual_before_ln`."""

    acts_on: ClassVar[str] = "input"

    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, instead: Instead) -> Tensor:
        """Return the norm's input. `x` is s, `y` is LN(s); all `[*batch, d_model]`."""
        if self.residual_before_ln is True and not self.adapter_residual_before_ln:
            return self.added(y, x, base, instead)
        inp = base.residual
        if self.residual_before_ln is True:
            to = x - inp
        else:
            to = x if self.residual_before_ln == "post_add" else y
        return self.added(y, to, base, instead) + inp


# --- the places of `adapters` ---


class PlacedBottleneck(BottleneckLayer):
    """R in place of h, with h, inp, n and R of `places`."""

    def __init__(self, config: Any, site: Site, device: torch.device, dtype: torch.dtype) -> None:
        """Create the parameters, and store the place."""
        super().__init__(config, site, device, dtype)
        reads_sum = config.original_ln_before and not config.is_parallel
        self.norm = site.norm if reads_sum else None
        self.reads_sum, self.is_parallel = reads_sum, config.is_parallel
        self.factor_path, self.is_swapped = site.factor, site.is_swapped
        self.reads_call |= self.norm is not None or site.factor is not None

    def changed(self, x: Tensor, y: Tensor, base: BaseLayer, instead: Instead) -> Tensor:
        """Return the output. `x` is the input, `y` the plain output `[*batch, d_model]`."""
        # 1.0 if a config of the model has no such parameter
        factor = 1.0 if self.factor_path is None else base.part(self.factor_path)
        h, inp = factor * y, base.residual
        if self.is_swapped:
            h, inp = inp, h
        norm = None if self.norm is None else base.part(self.norm)
        r = self.result(h, inp, h + inp, norm, base, instead)
        if not self.original_ln_after:
            r = r - inp
        if self.is_swapped:
            # the model adds its own inp, which is h here
            r = r + (inp - h)
        if isinstance(factor, Tensor):
            # the layer's output cannot affect a feature that the model multiplies by 0
            r = r / torch.where(factor == 0, 1.0, factor)
        return r.to(y.dtype)

    def result(
        self, h: Tensor, inp: Tensor, s: Tensor, norm: Norm, base: BaseLayer, instead: Instead
    ) -> Tensor:
        """Return R; all tensors `[*batch, d_model]`.

        Args:
            h: see `places`.
            inp: see `places`.
            s: h + inp.
            norm: LN, or None.
            base: the module.
            instead: a function that replaces f; None: f itself.
        """
        n = inp if self.is_parallel else h
        to = h
        if self.reads_sum:
            n = s if norm is None else norm(s)
            to = {True: h, False: n, "post_add": s}[self.residual_before_ln]
        return self.added(n, to, base, instead)


class LanguageBottleneck(PlacedBottleneck, LanguageFreeAdapter):
    """LN(R + inp), or R without `original_ln_after`, in place of language adapters.

    If a later adapter of a stack follows, R replaces h, as in `adapters`, where the last
    adapter decides about the norm.
    """

    joining = JOINING

    def __init__(self, config: Any, site: Site, device: torch.device, dtype: torch.dtype) -> None:
        """Create the parameters, and store the place."""
        super().__init__(config, site, device, dtype)
        self.path, self.reads_call = site.path, True

    def forward(self, x: Tensor, base: BaseLayer, instead: Instead = None) -> Tensor:
        """Return the stream after the block's language adapters. `x` is s `[*batch, d_model]`."""
        inp, norm = base.residual, norm_of(self.path, base)
        r = self.result(x - inp, inp, x, norm, base, instead)
        if not base.is_original:
            return base(r + inp)
        return norm(r + inp) if self.original_ln_after else r
