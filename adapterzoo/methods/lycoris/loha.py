"""LoHa — Low-Rank Hadamard Product.

Papers: Hyeon-Woo et al. 2021 (FedPara), arXiv:2108.06098, §2.2; as an update of a frozen weight:
Yeh et al. 2023 (LyCORIS), arXiv:2309.14859. ⊙ is the product of entries:

    y = W x + b + s · ΔW x        ΔW = (w1_a w1_b) ⊙ (w2_a w2_b)        s = alpha / r

with w1_a, w2_a `[d_out, r]` and w1_b, w2_b `[r, d_in]`, so ΔW has rank r² at most. ΔW = B A with
the products of all pairs of columns, B `[d_out, r²]`, and of rows, A `[r², d_in]`: the forward is
that of a LoRA of rank r², unless r is so large that ΔW itself is cheaper.

Differs from the paper: no nonlinearity, as in all implementations. Differs from PEFT: ΔW is not
built at low ranks; a layer that `module_dropout` drops gets gradients of zero; `rank_dropout` of
all rows leaves zeros instead of NaN; with third factors the gradients of w1_a and w2_a are exact,
where PEFT's own backward is wrong. Not in adapters.
Cost per site: 2 r (d_in + d_out) parameters; two products of rank r² in the forward.
Cannot do: embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adapterzoo.anatomy import Site
from adapterzoo.config import method_config
from adapterzoo.contracts import BaseLayer
from adapterzoo.kernels.low_rank import low_rank
from adapterzoo.methods._init import constant, drawn, dtype_named, generator, kaiming
from adapterzoo.methods._peft import only_native, rows_of, whole_width
from adapterzoo.spelling import PeftPart, Tensors, spelled

from .lycoris import THIRD, Lycoris, LycorisConfig, peft_spelling, tucker


@method_config("loha")
class LoHaConfig(LycorisConfig):
    """Config of LoHa; `TargetedConfig` chooses the layers, `LycorisConfig` how large they are.

    Attributes:
        init_weights: True: w2_b is zero, so a new adapter changes nothing; False: all four
            matrices are random.
    """

    init_weights: bool = True


class LoHa(Lycoris):
    """y = base(x) + s · ((w1_a w1_b) ⊙ (w2_a w2_b)) x.

    Attributes:
        hada_w1_a: `[d_out, r]`, with experts first if the site has any; hada_w2_a too.
        hada_w1_b: `[r, d_in]`, likewise; hada_w2_b too.
        hada_t1: the third factor of the first product at a convolution, `[r, r, kernel]`; then
            hada_w1_a is `[r, d_out]` and hada_w1_b `[r, channels]`; hada_t2 likewise.
        thirds: the names of the third factors, if there are any.
        is_low_rank: whether the forward is that of rank r².
    """

    scaled = ("hada_w1_a",)

    def __init__(
        self, config: LoHaConfig, site: Site, device: torch.device, dtype: torch.dtype
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
        rank, dtype = config.rank_at(site.name), dtype_named(config.dtype, dtype)
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")

        def made(*shape: int, zero: bool = False) -> nn.Parameter:
            fill = constant(0.0) if zero else kaiming(source)
            return drawn((*site.lead, *shape), fill, device, dtype)

        self.is_low_rank = rank**2 * (site.d_in + site.d_out) < site.d_in * site.d_out
        rows, columns = (site.d_out, rank), (rank, site.d_in)
        self.thirds: tuple[str, ...] = ()
        if self.has_third(config, site):
            kernel, self.is_low_rank = math.prod(site.kernel), False
            rows, columns = (rank, site.d_out), (rank, site.d_in // kernel)
            self.hada_t1, self.hada_t2 = made(rank, rank, kernel), made(rank, rank, kernel)
            self.thirds = "hada_t1", "hada_t2"
        self.hada_w1_a, self.hada_w1_b = made(*rows), made(*columns)
        self.hada_w2_a = made(*rows)
        self.hada_w2_b = made(*columns, zero=config.init_weights)

    def factors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return A `[*experts, r², d_in]` and B `[*experts, d_out, r²]` with ΔW = B A."""
        # row i · r + j of A is the product of rows i and j, as is column i · r + j of B
        one, two = self.hada_w1_b.to(like), self.hada_w2_b.to(like)
        a = (one.unsqueeze(-2) * two.unsqueeze(-3)).flatten(-3, -2)  # [*experts, r², d_in]
        one, two = self.hada_w1_a.to(like), self.hada_w2_a.to(like)
        return a, (one.unsqueeze(-1) * two.unsqueeze(-2)).flatten(-2)

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor] | None:
        """Return A and s · B, without dropout; None with third factors."""
        if self.thirds:
            return None
        a, b = self.factors(w)
        return a, self.scaling * b

    def delta(self, dtype: torch.dtype) -> Tensor:
        """Return ΔW `[*experts, d_out, d_in]` without s, in the dtype."""
        a1, b1, a2, b2 = (
            t.to(dtype) for t in (self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b)
        )
        if not self.thirds:
            return (a1 @ b1) * (a2 @ b2)
        one = tucker(self.hada_t1.to(dtype), a1, b1)
        return one * tucker(self.hada_t2.to(dtype), a2, b2)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output with the update. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y = base(x)
        if self.is_low_rank:
            a, b = self.factors(self.hada_w1_a)
            kept = self.kept_rows(b)
            b = b if kept is None else b * kept[:, None]
            return low_rank(y, x, a, b, self.scaling)
        w = self.delta(self.hada_w1_a.dtype)
        kept = self.kept_rows(w)
        update = linear(x.to(w.dtype), w if kept is None else w * kept[:, None])  # [*batch, d_out]
        return torch.add(y, update.to(y.dtype), alpha=self.scaling)


LoHaConfig.adapter_class = LoHa


def _join(parts: Sequence[PeftPart], _weight: Callable[[], Tensor | None]) -> Tensors:
    """Return one LoHa of a whole layer that computes the same as those of its parts.

    Each part has its own rows and ranks: the other parts' products are zero there.

    Raises:
        CheckpointError: two parts share rows, or differ in scaling or dropout.
    """
    site = parts[0].placement.site
    configs = [cast("LoHaConfig", part.placement.config) for part in parts]
    said = {(c.scaling_at(site.path), c.rank_dropout, c.module_dropout) for c in configs}
    numbers = [rows_of(part.placement.site) for part in parts]
    used = torch.cat(numbers)
    if len(used.unique()) < len(used) or len(said) > 1:
        what = "LoHa adapters share rows or differ in scaling or dropout"
        raise only_native(f"at {site.path!r} {len(parts)} {what}")
    ranks = [part.tensors["hada_w1_a"].shape[1] for part in parts]
    joined: Tensors = {}
    for w in ("hada_w1", "hada_w2"):
        joined[f"{w}_b"] = torch.cat([part.tensors[f"{w}_b"] for part in parts])  # [ranks, d_in]
        joined[f"{w}_a"] = joined[f"{w}_b"].new_zeros(
            whole_width(site), sum(ranks)
        )  # [d_out, ranks]
        start = 0
        for part, rows, rank in zip(parts, numbers, ranks, strict=True):
            joined[f"{w}_a"][rows, start : start + rank] = part.tensors[f"{w}_a"]
            start += rank
    return joined


spelled(
    peft_spelling(
        "LOHA",
        "LoHaConfig",
        ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
        {},
        convolution_shapes={"hada_t1": THIRD, "hada_t2": THIRD},
        join=_join,
    )
)(LoHaConfig)
