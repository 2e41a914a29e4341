"""MiSS — Matrix Shard Sharing.

Paper: Kang & Yin 2024, arXiv:2409.15371 (first called Bone).
The features are cut into shards of r, the last one padded with zeros, which share one matrix:
y = W x + bias + Dᵀ Σ_k x_k with D `[r, d_out]`. "mini" repeats D `[r, mini_r]` along d_out. "bat"
has D `[d_out / r, r, r]`, one for each shard W_g of rows: W'_gk = W_gk + W_gk D_g + D_g.

Differs from the paper: the forms are those of PEFT, whose default is the paper's efficient variant.
Differs from PEFT: in a `Stack`, "bat" changes the untouched W, so the order does not matter;
it refuses dropout, which PEFT ignores there.
Cost per site: r · d_out parameters (mini: r · mini_r), a sum over the shards and one thin product;
"bat" needs a product of W with D and a copy of W in each forward, unless it is merged.
Cannot do: embeddings; "bat" at layers without a floating-point weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import dropout, linear, pad

from adapterzoo.anatomy import Site
from adapterzoo.config import MAX_WIDTH, SEED, Choice, Range, Share, field, method_config
from adapterzoo.contracts import BaseLayer, WeightAdapter
from adapterzoo.errors import ConfigError
from adapterzoo.kernels.low_rank import expand
from adapterzoo.kernels.ops import exactly
from adapterzoo.peft_arguments import PeftArguments
from adapterzoo.spelling import (
    Fields,
    PeftLayer,
    PeftOutput,
    PeftPart,
    PeftSpelling,
    Tensors,
    spelled,
)

from ._init import DTYPE, constant, drawn, dtype_named, generator, kaiming
from ._peft import EXCLUDED, TARGETS, bias, only_native, rows_of, same_as, unsayable, whole_width
from ._targets import TargetedConfig, check_site, check_size


@method_config("miss")
class MissConfig(TargetedConfig):
    """Config of MiSS; `TargetedConfig` chooses the layers.

    Attributes:
        r: features of a shard, 1 to d_in; for "bat" it divides d_in and d_out.
        init_weights: the form, and the initial values of D. True: D is zero; False: uniform in
            ±1 / √d_out; "mini" and "bat": those forms, with D zero.
        mini_r: columns of D in the form "mini", a divisor of d_out.
        miss_dropout: probability, 0 to below 1, of dropping an input feature before D.
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        dtype: dtype of the parameters, by name ("float32"); None for that of the layer.
    """

    # `init_weights` chooses more than the initial values
    training_fields = TargetedConfig.training_fields - {"init_weights"} | {"miss_dropout"}

    r: int = field(64, Range(1, MAX_WIDTH))
    init_weights: bool | str = field(True, Choice(True, False, "mini", "bat"))
    mini_r: int = field(1, Range(1, MAX_WIDTH), needs="init_weights='mini'")
    miss_dropout: float = field(0.0, Share())
    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is invalid.
        """
        super().__post_init__()
        if self.miss_dropout and self.init_weights == "bat":
            raise ConfigError(
                f"{type(self).__name__}(miss_dropout={self.miss_dropout}, init_weights='bat'): it "
                f"drops no features of the weight. Write miss_dropout=0.0."
            )

    def shape_at(self, site: Site) -> tuple[int, ...]:
        """Return the shape of D at a site, without experts.

        Raises:
            ConfigError: r or mini_r does not fit the widths.
        """
        r, d_in, d_out, form = self.r, site.d_in, site.d_out, self.init_weights
        shards = range(1, d_in + 1)
        if form == "bat":
            both = [n for n in shards if not (d_in % n or d_out % n)]
            check_size(self, site, "r", r, both)
            return d_out // r, r, r
        check_size(self, site, "r", r, shards)
        if form != "mini":
            return r, d_out
        divisors = [n for n in range(1, d_out + 1) if not d_out % n]
        check_size(self, site, "mini_r", self.mini_r, divisors)
        return r, self.mini_r


class Miss(WeightAdapter):
    """y = base(x) + Dᵀ Σ_k dropout(x)_k, or base(x) + (W_g D_g + D_g) x for "bat".

    Attributes:
        miss_block: D `[r, d_out]`, `[r, mini_r]` or `[d_out / r, r, r]`, with experts in front
            where the site has them.
        is_bat: whether the form is "bat".
        dropout: dropout probability before D.
    """

    def __init__(
        self, config: MissConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make D.

        Args:
            config: the adapter's config.
            site: the site, which sets the widths.
            device: device for the parameters.
            dtype: the layer's dtype.

        Raises:
            ConfigError: the widths do not fit, or the site has no features.
        """
        super().__init__()
        self.dropout = config.miss_dropout
        check_site(config, site, "miss_dropout")
        self.is_bat = config.init_weights == "bat"
        # "bat" depends on the weight
        self.is_additive = not self.is_bat
        self.d_in, self.d_out = site.d_in, site.d_out
        shape = (*site.lead, *config.shape_at(site))
        source = generator(config.init_weights_seed, f"{site.path}{site.role}")
        fresh = constant(0.0) if config.starts_as_identity else kaiming(source)
        self.miss_block = drawn(shape, fresh, device, dtype_named(config.dtype, dtype))

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output with the update. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        y = base(x)
        if not self.is_bat:
            return expand(y, self.summed(x), self.columns(), 1.0)
        change = self.change(base.weight, self.miss_block.dtype)  # [d_out, d_in]
        return y + linear(x.to(change.dtype), change).to(y.dtype)

    def summed(self, x: Tensor) -> Tensor:
        """Return Σ_k dropout(x)_k, `[*batch, d_in]` → `[*batch, r]`."""
        x = dropout(x.to(self.miss_block.dtype), self.dropout, self.training)
        # padding by zero columns would copy x
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
        # repeating once would copy D, and keep the copy for the backward pass
        return (D if times == 1 else D.repeat(*(1 for _ in D.shape[1:]), times)).mT

    def change(self, w: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the change of a weight by "bat", `[*experts, d_out, d_in]`, in a dtype."""
        D, r = self.miss_block.to(dtype), self.rank  # [*experts, shards, r, r]
        rows = w.to(dtype).reshape(*D.shape[:-1], -1, r)  # [*experts, shards, r, d_in / r, r]
        return (rows @ D.unsqueeze(-3) + D.unsqueeze(-2)).reshape(w.shape)  # W_gk D_g + D_g

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight `[d_out, d_in]`, with experts in front."""
        with exactly(w.device):
            if self.is_bat:
                return w + self.change(base.weight, w.dtype)
            shards = -(-self.d_in // self.rank)
            update = self.columns().to(w.dtype).repeat(*(1 for _ in w.shape[1:]), shards)
            return w + update[..., : self.d_in]  # [*experts, d_out, d_in]

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor] | None:
        """Return the sum over the shards as a matrix, [I I …] `[*experts, r, d_in]`, and Dᵀ."""
        if self.is_bat:
            return None
        b = self.columns().to(w)  # [*experts, d_out, r]
        eye = torch.eye(self.rank, device=w.device, dtype=w.dtype)
        a = eye.repeat(1, -(-self.d_in // self.rank))[:, : self.d_in]  # [r, d_in]
        return a.expand(*b.shape[:-2], *a.shape), b


MissConfig.adapter_class = Miss


_ARGUMENTS = PeftArguments(
    class_name="MissConfig",
    fields={
        **TARGETS,
        **EXCLUDED,
        **bias("MiSS_only", "miss_only"),
        **same_as(MissConfig, "r", "init_weights", "miss_dropout", "mini_r"),
    },
)


def _read_fields(_layer: PeftLayer, fields: Fields) -> Fields:
    """Return the fields of our config at a layer."""
    form = fields["init_weights"]
    return {
        **fields,
        # False is the form of True with other initial values
        "init_weights": form or True,
        "mini_r": fields["mini_r"] if form == "mini" else 1,
        # without effect in PEFT's "bat"
        "miss_dropout": 0.0 if form == "bat" else fields["miss_dropout"],
    }


def _join(parts: Sequence[PeftPart], _weight: Callable[[], Tensor | None]) -> Tensors:
    """Return one D of a whole layer, with zeros in the columns of parts without an adapter.

    Raises:
        CheckpointError: the parts differ in r, or are of the form "bat".
    """
    site = parts[0].placement.site
    blocks = [part.tensors["miss_block"] for part in parts]
    if len({block.shape[0] for block in blocks}) > 1 or blocks[0].dim() != 2:
        raise only_native(f"the adapters at {site.path!r} differ in r, or have init_weights='bat'")
    joined = blocks[0].new_zeros(blocks[0].shape[0], whole_width(site))
    for part, block in zip(parts, blocks, strict=True):
        mine = rows_of(part.placement.site)
        # several adapters at one column add up
        joined[:, mine] += block.repeat(1, len(mine) // block.shape[1])  # [r, part of d_out]
    return {"miss_block": joined}


def _written(layer: PeftOutput, said: Fields) -> Fields:
    """Return the fields of PEFT's config for a layer.

    Raises:
        CheckpointError: joined adapters differ in dropout.
    """
    block, site = layer.tensors["miss_block"], layer.parts[0].placement.site
    if len({part.placement.config["miss_dropout"] for part in layer.parts}) > 1:
        raise only_native(f"the adapters at {site.path!r} differ in miss_dropout")
    is_joined = len(layer.parts) > 1 or site.output_slice is not None
    form = (
        said["init_weights"] if said["init_weights"] in ("mini", "bat") and not is_joined else True
    )
    return {
        **said,
        "r": block.shape[-1 if form == "bat" else 0],
        "init_weights": form,
        "mini_r": block.shape[-1] if form == "mini" else 1,
    }


spelled(
    lambda config: PeftSpelling(
        config=config,
        peft_type="MISS",
        beside=frozenset({"bias"}),
        arguments=_ARGUMENTS,
        tensors={"miss_block": ("miss_block",)},
        read_fields=_read_fields,
        unsayable=lambda placement: unsayable(placement, "a MissConfig", "PEFT has no MiSS"),
        join=_join,
        write_layers=lambda layers, said: [
            _written(layer, fields) for layer, fields in zip(layers, said, strict=True)
        ],
    )
)(MissConfig)
