"""Compacter — bottlenecks whose matrices are sums of Kronecker products, and Compacter++.

Papers: Mahabadi et al. 2021, arXiv:2106.04647; the sums are the hypercomplex multiplications of
Zhang et al. 2021, arXiv:2102.08597.
Both matrices of the bottleneck of `bottleneck` are

    y = x H + b        H = Σᵢ Rᵢ ⊗ Wᵢ        Wᵢ = Lᵢ Tᵢ

over n = `phm_dim` products, with Rᵢ `[n, n]` shared by all layers, Lᵢ `[d_in / n, rank]` and Tᵢ
`[rank, d_out / n]`. H is never built. As x H = Σᵢ Rᵢᵀ X Lᵢ Tᵢ with X `[n, d_in / n]` the parts of
x, the down projection multiplies each part by all Lᵢ at once and then by all Rᵢ ⊗ Tᵢ; the up
projection multiplies by all Rᵢ ⊗ Lᵢ and then each part by all Tᵢ.

Differs from the papers: nothing. Differs from adapters: `hypercomplex_nonlinearity` chooses how W
is drawn, which adapters always draws glorot-normal; `learn_phm=False` also freezes shared rules;
the width is at least phm_dim; shared W without factors, and init_weights="mam_adapter" (T of the
up projection zero), work. A seed gives each site its own values. Not in PEFT.
Cost per site: 2 · rank · (d_model + width) + width + d_model parameters, and n³ numbers once for
all layers. Per token n · rank · (d_model + n · width) multiplications for each projection, where
a bottleneck has d_model · width. If W is not factorized, or its rank is above about width / n, it
takes n · d_model · width multiplications per call to build H, then those of a bottleneck: with
that many numbers in W there is no cheaper product.
Cannot do: merging; init_weights="houlsby".
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adapterzoo.errors import ConfigError
from adapterzoo.methods._init import constant, drawn, normal, uniform


class MatrixProduct(NamedTuple):
    """x Mᵀ + b with M a product of matrices, some repeated along a block diagonal.

    Attributes:
        matrices: each `[out, in]`, in the order of application.
        blocks: for each, the number of equal parts of the features that it multiplies.
        bias: `[d_out]`, or None.
    """

    matrices: tuple[Tensor, ...]
    blocks: tuple[int, ...]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[*batch, d_in]`, in the dtype of the matrices → `[*batch, d_out]`."""
        if len(self.matrices) == 1:
            return linear(x, self.matrices[0], self.bias)
        for matrix, blocks in zip(self.matrices, self.blocks, strict=True):
            if blocks == 1:
                x = linear(x, matrix)
            else:
                x = linear(x.unflatten(-1, (blocks, -1)), matrix).flatten(-2)  # [*batch, out]
        return x if self.bias is None else x + self.bias


class HypercomplexProjection(nn.Module):
    """y = x Σᵢ Rᵢ ⊗ Wᵢ + b.

    Attributes:
        phm_rule: R `[n, n, n]`; or `phm_rule_left` `[n, n, 1]` and `phm_rule_right` `[n, 1, n]`.
        W: `[n, d_in / n, d_out / n]`; or `W_left` `[n, d_in / n, rank]` and `W_right`
            `[n, rank, d_out / n]`.
        b: `[d_out]`, or None.
    """

    b: nn.Parameter | None

    def __init__(
        self, drawing: Drawing, part: Literal["down", "up"], d_in: int, d_out: int
    ) -> None:
        """Create the parameters that the layer does not share; the bias starts as zero.

        Args:
            drawing: drawing of its parameters.
            part: "down" or "up".
            d_in: input width.
            d_out: output width.
        """
        super().__init__()
        config = drawing.config
        check_widths(config, d_in, d_out)
        self.d_in, self.d_out, self.n = d_in, d_out, config.phm_dim
        self.shares_rule, self.shares_w = config.shared_phm_rule, config.shared_W_phm
        self.rule_names = names("phm_rule", config.factorized_phm_rule)
        own_w = names("W", config.factorized_phm_W)
        self.w_names = names(f"W_{part}", config.factorized_phm_W) if self.shares_w else own_w
        narrow, wide = sorted((d_in, d_out))
        products = self.n * config.phm_rank * (wide + self.n * narrow)
        self.is_low_rank = config.factorized_phm_W and products < d_in * d_out
        if not self.shares_rule:
            # the peer's deviations; for a shared rule they are a field
            drawing.rule(self, 0.01, 0.01)
        if not self.shares_w:
            drawing.w(self, own_w, d_in, d_out, is_up=part == "up")
        zeros = drawn((d_out,), constant(0.0), drawing.device, drawing.dtype)
        self.register_parameter("b", zeros if config.phm_bias else None)
        self.phm_rank = config.phm_rank

    @classmethod
    def shared(cls, drawing: Drawing, widths: Collection[tuple[int, int]]) -> nn.Module:
        """Return the module that all layers share: R, and W as `W_down` and `W_up`.

        Args:
            drawing: drawing of the parameters.
            widths: all pairs (d_model, bottleneck width) of the layers.

        Raises:
            ConfigError: layers of different widths cannot share.
        """
        made, config = nn.Module(), drawing.config
        if config.shared_phm_rule:
            drawing.rule(made, config.phm_init_range, 1.0)
        if config.shared_W_phm:
            if len(widths) > 1:
                raise ConfigError(
                    f"{type(config).__name__}(shared_W_phm=True): bottlenecks of the widths "
                    f"{sorted(widths)} cannot share W. Write shared_W_phm=False."
                )
            ((d_model, width),) = widths
            check_widths(config, d_model, width)
            for part, sizes in (("down", (d_model, width)), ("up", (width, d_model))):
                own = names(f"W_{part}", config.factorized_phm_W)
                drawing.w(made, own, *sizes, is_up=part == "up")
        return made

    def product(self, shared: nn.Module | None, device: torch.device) -> MatrixProduct:
        """Return H as two matrices, or one, each `[out, in]`.

        Args:
            shared: from `shared`; None if layers share nothing.
            device: device of the input.
        """
        w = held(shared if self.shares_w else self, self.w_names)
        w = tuple(t.to(device) for t in w)
        rule = whole(held(shared if self.shares_rule else self, self.rule_names))
        rule = rule.to(device, w[0].dtype)  # [n, n, n]
        bias = None if self.b is None else self.b.to(w[0].dtype)
        if not self.is_low_rank:
            h = torch.einsum("iac,ibd->cdab", rule, whole(w))
            return MatrixProduct((h.reshape(self.d_out, self.d_in),), (1,), bias)
        left, right = w
        n, rank = self.n, left.shape[2]
        # apply the rule on the narrower side
        if self.d_in >= self.d_out:
            first = left.transpose(1, 2).reshape(n * rank, -1)  # [n · rank, d_in / n]
            last = torch.einsum("iac,ikd->cdaik", rule, right).reshape(self.d_out, -1)
            return MatrixProduct((first, last), (n, 1), bias)
        first = torch.einsum("iac,ibk->cikab", rule, left).reshape(-1, self.d_in)
        last = right.permute(2, 0, 1).reshape(-1, n * rank)  # [d_out / n, n · rank]
        return MatrixProduct((first, last), (1, n), bias)

    def extra_repr(self) -> str:
        """Return widths and sizes."""
        return f"d_in={self.d_in}, d_out={self.d_out}, phm_dim={self.n}"


@dataclass(frozen=True)
class Drawing:
    """Initializer that draws R and W, and registers them in modules.

    Attributes:
        config: a `BnConfig`.
        source: source of random numbers.
        device: device for the parameters.
        dtype: dtype of the parameters.
    """

    config: Any
    source: torch.Generator | None
    device: torch.device
    dtype: torch.dtype

    def rule(self, module: nn.Module, std: float, bound: float) -> None:
        """Draw R from a normal or uniform distribution; it is a buffer unless it is trained."""
        n, is_normal = self.config.phm_dim, self.config.phm_c_init == "normal"
        fill = normal(std, self.source) if is_normal else uniform(bound, self.source)
        factorized = self.config.factorized_phm_rule
        shapes = ((n, n, 1), (n, 1, n)) if factorized else ((n, n, n),)
        for name, shape in zip(names("phm_rule", factorized), shapes, strict=True):
            made = drawn(shape, fill, self.device, self.dtype)
            if self.config.learn_phm:
                module.register_parameter(name, made)
            else:
                module.register_buffer(name, made.detach())

    def w(
        self, module: nn.Module, called: tuple[str, ...], d_in: int, d_out: int, *, is_up: bool
    ) -> None:
        """Draw W; with "mam_adapter" the last factor of the up projection is zero."""
        zero = is_up and self.config.init_weights == "mam_adapter"
        n, rank = self.config.phm_dim, self.config.phm_rank
        rows, columns = d_in // n, d_out // n
        shapes = ((n, rows, rank), (n, rank, columns)) if len(called) > 1 else ((n, rows, columns),)
        for name, shape in zip(called, shapes, strict=True):
            fill = constant(0.0) if zero and name == called[-1] else self._fill(shape)
            module.register_parameter(name, drawn(shape, fill, self.device, self.dtype))

    def _fill(self, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        # Glorot & Bengio 2010, eq. 16, for each of the n matrices
        std = (2.0 / (shape[1] + shape[2])) ** 0.5
        return {
            "glorot-uniform": uniform(3.0**0.5 * std, self.source),
            "glorot-normal": normal(std, self.source),
            "normal": normal(self.config.phm_init_range, self.source),
        }[self.config.hypercomplex_nonlinearity]


def names(name: str, factorized: bool) -> tuple[str, ...]:
    """Return the names of a tensor's factors, or its own."""
    return (f"{name}_left", f"{name}_right") if factorized else (name,)


def held(module: nn.Module | None, called: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Return tensors of a module by name."""
    return tuple(cast("Tensor", getattr(module, name)) for name in called)


def whole(factors: tuple[Tensor, ...]) -> Tensor:
    """Return the product of two factors, or the only one."""
    return factors[0] if len(factors) == 1 else torch.matmul(*factors)


def check_widths(config: Any, d_in: int, d_out: int) -> None:
    """Check that a matrix consists of phm_dim × phm_dim parts.

    Raises:
        ConfigError: it does not divide the widths.
    """
    n = config.phm_dim
    for width in (d_in, d_out):
        if width % n:
            d_model = max(d_in, d_out)
            legal = [k for k in range(1, d_model + 1) if not (d_in % k or d_out % k)]
            raise ConfigError(
                f"{type(config).__name__}(phm_dim={n}): it does not divide {width} in {d_in} → "
                f"{d_out}. Write phm_dim={legal[-1]}, or another reduction_factor."
            )
