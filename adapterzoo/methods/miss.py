"""MiSS — Matrix Shard Sharing.

Paper: Kang & Yin 2024, arXiv:2409.15371 (first called Bone).
The features are cut into shards of r, the last one filled with zeros, which share one matrix:
y = W x + bias + Dᵀ Σ_k x_k with D `[r, d_out]`. "mini" repeats D `[r, mini_r]` along d_out. "bat"
has D `[d_out / r, r, r]`, one for each shard W_g of rows: W'_gk = W_gk + W_gk D_g + D_g.

Differs from the paper: the forms are those of PEFT, whose default is the paper's efficient variant.
Differs from PEFT: in a `Stack`, "bat" changes the untouched W, so that the order does not matter;
it refuses dropout, which PEFT ignores there.
Cost per site: r · d_out parameters (mini: r · mini_r), a sum over the shards and one thin product;
"bat" needs a product of W with D and a copy of W in each forward, unless it is merged.
Cannot do: embeddings; "bat" at layers without a floating-point weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear, pad

from adapterzoo.anatomy import Site
from adapterzoo.config_base import config_class
from adapterzoo.configs import architectures, config_strings
from adapterzoo.contracts import BaseLayer, WeightAdapter
from adapterzoo.errors import ConfigError
from adapterzoo.fields import SEED, field
from adapterzoo.kernels.grouped import Groups, grouped_expand
from adapterzoo.kernels.low_rank import expand
from adapterzoo.kernels.ops import exactly
from adapterzoo.spelling import spelled

from . import _miss_spelling
from ._init import DTYPE, DTYPES, constant, drawn, generator, kaiming
from ._shards import ShardConfig


@architectures.register("miss")
@config_strings.register("miss")
@spelled(_miss_spelling.peft)
@config_class
class MissConfig(ShardConfig):
    """Config of MiSS; `TargetedConfig` chooses the layers, `ShardConfig` the form.

    Attributes:
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    architecture: ClassVar[str] = "miss"

    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Miss:
        """Return a fresh adapter for the site."""
        return Miss(self, site, device, dtype)


class Miss(WeightAdapter):
    """y = base(x) + Dᵀ Σ_k dropout(x)_k, or base(x) + (W_g D_g + D_g) x for "bat".

    Attributes:
        miss_block: D `[r, d_out]`, `[r, mini_r]` or `[d_out / r, r, r]`, with experts in front
            where the site has them.
        is_bat: whether the form is "bat".
        dropout: probability on the way to D.
    """

    def __init__(
        self, config: MissConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make D.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the parameters.
            dtype: of the layer.

        Raises:
            ConfigError: the widths do not fit, or the site has no features.
        """
        super().__init__()
        self.dropout = config.miss_dropout
        if site.kind == "embedding" or (self.dropout and site.is_only_read):
            what = "computes with its parameters" if site.is_only_read else "reads token numbers"
            hint = "miss_dropout=0.0" if site.is_only_read else f"exclude_modules=[{site.path!r}]"
            raise ConfigError(
                f"MissConfig(miss_dropout={self.dropout}) at {site.path!r}: the module {what}, so "
                f"there are no features on the way to D. Write {hint}."
            )
        self.is_bat = config.init_weights == "bat"
        # "bat" depends on the weight
        self.is_additive = not self.is_bat
        self.d_in, self.d_out = site.d_in, site.d_out
        shape = (*((site.experts,) if site.experts else ()), *config.shape_at(site))
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        fresh = constant(0.0) if config.starts_as_identity else kaiming(source)
        own = DTYPES[config.dtype] if config.dtype else dtype
        self.miss_block = drawn(shape, fresh, device, own)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output with the update. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y = base(x)
        if not self.is_bat:
            return expand(y, self.summed(x), self.columns(), 1.0)
        change = self.change(base.weight, self.miss_block.dtype)  # [d_out, d_in]
        return y + linear(x.to(change.dtype), change).to(y.dtype)

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether they share one sum over the shards, and D has columns and no experts."""
        kinds = {(a.miss_block.dtype, a.is_bat, a.rank, a.dropout) for a in adapters}
        return len(kinds) == 1 and adapters[0].miss_block.dim() == 2 and not adapters[0].is_bat

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Apply to each row its own update. `x` `[rows, *tokens, d_in]`."""
        b = torch.stack([a.columns() for a in adapters])  # [adapters, d_out, r]
        t = adapters[0].summed(x)  # [rows, *tokens, r]
        return grouped_expand(base(x), t, b, [1.0] * len(adapters), groups)

    def summed(self, x: Tensor) -> Tensor:
        """Return Σ_k dropout(x)_k, `[*batch, d_in]` → `[*batch, r]`."""
        x = dropout(x.to(self.miss_block.dtype), self.dropout, self.training)
        # padding by nothing would copy x
        rest = -self.d_in % self.rank
        shards = (pad(x, (0, rest)) if rest else x).unflatten(-1, (-1, self.rank))
        summed: Tensor = shards.sum(-2)
        return summed

    @property
    def rank(self) -> int:
        """Features of a shard, r."""
        return self.miss_block.shape[-1 if self.is_bat else -2]

    def columns(self) -> Tensor:
        """Return Dᵀ `[*experts, d_out, r]`, repeated for "mini"."""
        D = self.miss_block
        times = self.d_out // D.shape[-1]
        # repeating once would copy D, and keep the copy for the backward
        return (D if times == 1 else D.repeat(*(1 for _ in D.shape[1:]), times)).mT

    def change(self, w: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the change of a weight by "bat", `[*experts, d_out, d_in]`, in a dtype."""
        D, r = self.miss_block.to(dtype), self.rank  # [*experts, shards, r, r]
        rows = w.to(dtype).reshape(*D.shape[:-1], -1, r)  # [*experts, shards, r, d_in / r, r]
        return (rows @ D.unsqueeze(-3) + D.unsqueeze(-2)).reshape(w.shape)  # W_gk D_g + D_g

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight `[d_out, d_in]`, with experts in front."""
        with exactly(w.device):
            if self.is_bat:
                return w + self.change(base.weight, w.dtype)
            shards = -(-self.d_in // self.rank)
            update = self.columns().to(w.dtype).repeat(*(1 for _ in w.shape[1:]), shards)
            return w + update[..., : self.d_in]  # [*experts, d_out, d_in]

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor] | None:
        """Return the sum over the shards, [I I …] `[*experts, r, d_in]`, and Dᵀ."""
        if self.is_bat:
            return None
        b = self.columns().to(w)  # [*experts, d_out, r]
        eye = torch.eye(self.rank, device=w.device, dtype=w.dtype)
        a = eye.repeat(1, -(-self.d_in // self.rank))[:, : self.d_in]  # [r, d_in]
        return a.expand(*b.shape[:-2], *a.shape), b

    def extra_repr(self) -> str:
        """Return widths and r."""
        return f"d_in={self.d_in}, d_out={self.d_out}, r={self.rank}"
