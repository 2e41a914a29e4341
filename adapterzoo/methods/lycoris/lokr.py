"""LoKr — Low-Rank Kronecker Product.

Papers: Edalati et al. 2022 (KronA), arXiv:2212.10650, eq. 4; with low-rank factors: Yeh et al.
2023 (LyCORIS), arXiv:2309.14859.

    y = W x + b + s · ΔW x        ΔW = w1 ⊗ w2        s = alpha / r

with w1 `[p, m]` and w2 `[q, n]`, where d_out = p q and d_in = m n: p and m are the largest divisors
up to the square root, or `decompose_factor` if it divides. w2 = w2_a w2_b of rank r if
r < max(q, n) / 2, and with `decompose_both` w1 = w1_a w1_b if r < max(p, m) / 2. ΔW is not built:
(w1 ⊗ w2) x = w1 X w2ᵀ with X `[m, n]` the parts of x, in the cheaper order.

Differs from the papers: nothing. Differs from PEFT: ΔW is not built; a layer that `module_dropout`
drops gets gradients of zero; `rank_dropout` of all rows leaves zeros instead of NaN. Not in
adapters.
Cost per site: p m + q n parameters, or r (p + m) and r (q + n) for decomposed ones; as many
multiplications per token, those of w2 m times and those of w1 q times.
Cannot do: embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from adapterzoo.anatomy import Site
from adapterzoo.config import MAX_WIDTH, Choice, Either, Range, field, method_config
from adapterzoo.contracts import BaseLayer
from adapterzoo.methods._init import constant, drawn, dtype_named, generator, kaiming
from adapterzoo.methods._peft import same_as
from adapterzoo.spelling import KERNEL, spelled

from .lycoris import THIRD, Lycoris, LycorisConfig, peft_spelling, tucker


@method_config("lokr")
class LoKrConfig(LycorisConfig):
    """Config of LoKr; `TargetedConfig` chooses the layers, `LycorisConfig` how large they are.

    Attributes:
        decompose_both: whether w1 is also a product of rank r.
        decompose_factor: p and m if it divides, else their upper bound; −1 for no bound but the
            square root.
        rank_dropout_scale: whether `rank_dropout` divides the rows that it keeps by their share.
        init_weights: True: w1 (or w1_a) is zero, so a new adapter changes nothing; "lycoris":
            w2 (or w2_b) is zero instead; False: all matrices are random.
    """

    training_fields = LycorisConfig.training_fields | {"rank_dropout_scale"}

    decompose_both: bool = False
    decompose_factor: int = field(-1, Either(Choice(-1), Range(1, MAX_WIDTH)))
    rank_dropout_scale: bool = False
    init_weights: bool | str = field(True, Choice(True, False, "lycoris"))


class LoKr(Lycoris):
    """y = base(x) + s · (w1 ⊗ w2) x.

    Attributes:
        names: names of the parameters: `lokr_w1` `[p, m]`, or `lokr_w1_a` `[p, r]` and `lokr_w1_b`
            `[r, m]`; `lokr_w2` `[q, n]`, or `lokr_w2_a` `[q, r]` and `lokr_w2_b` `[r, n]`; with
            experts in front where the site has them. At a convolution n counts the inputs of all
            places, or a third factor `lokr_t2` `[r, r, kernel]` has the places, with w2_a `[r, q]`
            and w2_b `[r, n]`.
        places: positions of a 1-D convolution, 0 elsewhere: with a whole w2, ΔW has the numbers of
            w1 `[1, p, m]` ⊗ w2 `[q, n, places]` in their order, as in PEFT.
    """

    scaled = ("lokr_w1", "lokr_w1_a")

    def __init__(
        self, config: LoKrConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Args:
            config: the adapter's config.
            site: the site, which sets the widths.
            device: device for the parameters.
            dtype: the layer's dtype.

        Raises:
            ConfigError: the site cannot have the adapter, or its dropout.
        """
        super().__init__(config, site)
        self.rescales = config.rank_dropout_scale
        r, dtype = config.rank_at(site.name), dtype_named(config.dtype, dtype)
        field = math.prod(site.kernel)
        # PEFT takes w1 as one of a 1-D convolution's output channels
        self.places = site.kernel[0] if len(site.kernel) == 1 else 0
        (p, q), (m, n) = (
            divided(width, config.decompose_factor) for width in (self.d_out, self.d_in // field)
        )
        is_narrow = config.decompose_both and r < max(p, m) / 2, r < max(q, n) / 2
        shapes: dict[str, tuple[int, ...]] = {}
        # w2 has all inputs at one position of a convolution
        sizes = (p, m), (q, n * field)
        for name, (rows, columns), narrow in zip(
            ("lokr_w1", "lokr_w2"), sizes, is_narrow, strict=True
        ):
            parts: dict[str, tuple[int, ...]]
            parts = {f"{name}_a": (rows, r), f"{name}_b": (r, columns)}
            if name == "lokr_w2" and self.has_third(config, site):
                parts = {"lokr_w2_a": (r, q), "lokr_w2_b": (r, n), "lokr_t2": (r, r, field)}
            shapes |= parts if narrow else {name: (rows, columns)}
        zero = {True: ("lokr_w1", "lokr_w1_a"), "lycoris": ("lokr_w2", "lokr_w2_b"), False: ()}
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        for name, shape in shapes.items():
            fill = constant(0.0) if name in zero[config.init_weights] else kaiming(source)
            self.register_parameter(name, drawn((*site.lead, *shape), fill, device, dtype))
        self.names = tuple(shapes)

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the tensors; a slot with w1 or w2 as one matrix gets the product of two."""
        tensors = dict(super().in_slot(slot))
        for name in ("lokr_w1", "lokr_w2"):
            if name in slot.names and name not in tensors:
                tensors[name] = tensors.pop(f"{name}_a") @ tensors.pop(f"{name}_b")
        return tensors

    def sides(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return w1 and w2, each as one matrix or as two."""
        # a replica holds plain tensors, which `get_parameter` refuses
        own: list[Tensor] = [getattr(self, name) for name in self.names]
        count = sum(name.startswith("lokr_w1") for name in self.names)
        if "lokr_t2" in self.names:
            *sides, a, b, t = own
            return sides, [tucker(t, a, b)]
        return own[:count], own[count:]

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor] | None:
        """Return A = b₁ ⊗ b₂ and s · B = s · a₁ ⊗ a₂ with wᵢ = aᵢ bᵢ, if they exist."""
        sides = [[t.to(w) for t in side] for side in self.sides()]
        if self.places or all(len(side) == 1 for side in sides):
            return None
        for side in sides:
            if len(side) == 1:
                side.append(torch.eye(side[0].shape[-1], device=w.device, dtype=w.dtype))
        (a1, b1), (a2, b2) = sides
        return kronecker(b1, b2), self.scaling * kronecker(a1, a2)

    def delta(self, dtype: torch.dtype) -> Tensor:
        """Return ΔW `[*experts, d_out, d_in]` without s, in the dtype."""
        w1, w2 = (product([t.to(dtype) for t in side]) for side in self.sides())
        if self.places and "lokr_w2" in self.names:
            w2 = w2.unflatten(1, (-1, self.places))  # [q, n, places]
            return torch.kron(w1[None], w2).reshape(self.d_out, self.d_in)
        return kronecker(w1, w2)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output with the update. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y = base(x)
        w1, w2 = self.sides()
        wide = x.to(w1[0].dtype).reshape(-1, self.d_in)  # [tokens, d_in]
        update = times_kronecker(wide, w1, w2).reshape(y.shape)  # [*batch, d_out]
        kept = self.kept_rows(update)
        update = update if kept is None else update * kept
        return torch.add(y, update.to(y.dtype), alpha=self.scaling)


LoKrConfig.adapter_class = LoKr


def divided(width: int, factor: int) -> tuple[int, int]:
    """Return two numbers with the product `width`: the factor if it divides, or the next below.

    Args:
        width: to divide.
        factor: from 1; or −1: the first number is the largest divisor up to the square root.
    """
    if factor > 0 and not width % factor:
        return factor, width // factor
    most = math.isqrt(width) if factor < 0 else min(factor, math.isqrt(width))
    first = next(d for d in range(most, 0, -1) if not width % d)
    return first, width // first


def product(matrices: Sequence[Tensor]) -> Tensor:
    """Return one matrix, or the product of two."""
    return matrices[0] if len(matrices) == 1 else matrices[0] @ matrices[1]


def kronecker(w1: Tensor, w2: Tensor) -> Tensor:
    """Return w1 ⊗ w2 `[*batch, p q, m n]` of `[*batch, p, m]` and `[*batch, q, n]`."""
    parts = w1[..., :, None, :, None] * w2[..., None, :, None, :]  # [*batch, p, q, m, n]
    return parts.flatten(-4, -3).flatten(-2)  # [*batch, p q, m n]


def times_kronecker(x: Tensor, w1: Sequence[Tensor], w2: Sequence[Tensor]) -> Tensor:
    """Return (w1 ⊗ w2) x, by the cheaper of the two orders.

    Args:
        x: `[tokens, m n]`.
        w1: `[p, m]`, or two matrices with that product.
        w2: `[q, n]`, or two matrices with that product.

    Returns:
        `[tokens, p q]`.
    """
    p, q, m, n = w1[0].shape[0], w2[0].shape[0], w1[-1].shape[1], w2[-1].shape[1]
    left, right = (sum(t.numel() for t in matrices) for matrices in (w1, w2))
    parts = x.reshape(-1, m, n)
    if m * right + q * left <= n * left + p * right:
        parts = _times(parts, w2)  # [tokens, m, q]
        parts = _times(parts.mT, w1).mT  # [tokens, p, q]
    else:
        parts = _times(parts.mT, w1).mT  # [tokens, p, n]
        parts = _times(parts, w2)  # [tokens, p, q]
    return parts.reshape(-1, p * q)


def _times(parts: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return parts wᵀ, `[tokens, count, d]` → `[tokens, count, e]`."""
    # a product of two matrices: with more dimensions, torch computes frozen ones in another way
    flat = parts.reshape(-1, parts.shape[-1])  # [tokens · count, d]
    for matrix in reversed(matrices):
        flat = linear(flat, matrix)  # [tokens · count, r or e]
    return flat.reshape(*parts.shape[:2], flat.shape[-1])  # [tokens, count, e]


# w1 and w2 are each one matrix or two
_FORMS = [((f"lokr_{w}",), (f"lokr_{w}_a", f"lokr_{w}_b")) for w in ("w1", "w2")]
spelled(
    peft_spelling(
        "LOKR",
        "LoKrConfig",
        [*(name for side in _FORMS for form in side for name in form), "lokr_t2"],
        same_as(LoKrConfig, "decompose_both", "decompose_factor", "rank_dropout_scale"),
        convolution_shapes={"lokr_w2": KERNEL, "lokr_t2": THIRD},
    )
)(LoKrConfig)
