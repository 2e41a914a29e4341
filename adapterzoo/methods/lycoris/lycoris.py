"""The common base of LoHa and LoKr: the fields of their configs, and their dropout.

Paper: Yeh et al. 2023 (LyCORIS), arXiv:2309.14859. y = W x + b + s · ΔW x with s = alpha / r; the
methods differ in ΔW. In training `rank_dropout` drops rows of ΔW, the same for a whole call, and
`module_dropout` all of ΔW.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.config import FACTOR, SEED, AdapterConfig, Placement, Share, config_class, field
from adapterzoo.contracts import BaseLayer, WeightAdapter
from adapterzoo.kernels.ops import exactly
from adapterzoo.methods._init import DTYPE
from adapterzoo.methods._peft import (
    EXCLUDED,
    TARGETS,
    ignored,
    ours,
    refuse_ignored,
    same_as,
    unsayable,
)
from adapterzoo.methods._targets import (
    RANK,
    SIZES,
    TargetedConfig,
    check_site,
    refuse_larger,
    rescaled,
)
from adapterzoo.patterns import Patterns, matching
from adapterzoo.peft_arguments import PeftArgument, PeftArguments
from adapterzoo.spelling import ConvolutionShape, Fields, PeftLayer, PeftOutput, PeftSpelling


@config_class
class LycorisConfig(TargetedConfig):
    """Base of the configs of LoHa and LoKr; `TargetedConfig` chooses the layers.

    Attributes:
        r: rank, 1 to 65,536.
        alpha: numerator of the scaling.
        rank_pattern: path endings or regular expressions to the rank of the layers they match.
        alpha_pattern: the same for alpha.
        init_weights_seed: makes the initial values independent of earlier random numbers.
        dtype: dtype of the parameters, by name ("float32"); None for that of the layer.
        rank_dropout: probability, 0 to below 1, of dropping a row of ΔW in a training step.
        module_dropout: probability, 0 to below 1, of dropping the whole ΔW of a layer.
        use_effective_conv2d: whether a convolution with a kernel above 1 has a third factor for its
            kernel positions; other layers have none.
    """

    training_fields = TargetedConfig.training_fields | {"rank_dropout", "module_dropout"}

    r: int = field(8, RANK)
    alpha: float = field(8, FACTOR)
    rank_pattern: Mapping[str, int] = field({}, Patterns("r", RANK, 8))
    alpha_pattern: Mapping[str, float] = field({}, Patterns("alpha", FACTOR, 8))
    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)
    rank_dropout: float = field(0.0, Share())
    module_dropout: float = field(0.0, Share())
    use_effective_conv2d: bool = False

    @property
    def slot_fields(self) -> frozenset[str]:
        """The fields of layers, ranks and scaling, which a factor can absorb."""
        return super().slot_fields | SIZES

    def rank_at(self, name: str) -> int:
        """Return the rank of the adapter at a site, by `Site.name`."""
        return matching(self.rank_pattern, name, self.r)

    def alpha_at(self, name: str) -> float:
        """Return the numerator of the scaling of the adapter at a site, by `Site.name`."""
        return matching(self.alpha_pattern, name, self.alpha)

    def scaling_at(self, name: str) -> float:
        """Return the factor s of the adapter at a site, by `Site.name`."""
        return self.alpha_at(name) / self.rank_at(name)

    def of_rank(self, rank: int) -> Self:
        """Return the config with one rank for all layers and the scaling of r."""
        refuse_larger(self, rank, (self.r, *self.rank_pattern.values()))
        alpha = self.alpha * rank / self.r
        return self.replace(r=rank, alpha=alpha, rank_pattern={}, alpha_pattern={})


class Lycoris(WeightAdapter):
    """Base of the adapters y = W x + b + s · ΔW x.

    Attributes:
        scaling: the factor s.
        rank_dropout: probability of dropping a row of ΔW.
        module_dropout: probability of dropping ΔW.
        scaled: keys of the first factor of ΔW.
        rescales: whether the kept rows are divided by their share.
    """

    is_additive = True
    adapts_convolutions = True
    rescales = True
    scaled: ClassVar[tuple[str, ...]]

    def __init__(self, config: LycorisConfig, site: Site) -> None:
        """Set the attributes that do not depend on ΔW.

        Args:
            config: the adapter's config.
            site: the site, which sets the widths.

        Raises:
            ConfigError: the site is an embedding; or it is a parameter and there is dropout.
        """
        super().__init__()
        self.scaling = config.scaling_at(site.name)
        self.rank_dropout, self.module_dropout = config.rank_dropout, config.module_dropout
        self.d_in, self.d_out = site.d_in, site.d_out
        check_site(config, site, "rank_dropout", "module_dropout")

    def has_third(self, config: LycorisConfig, site: Site) -> bool:
        """Return whether the site has a third factor, see `use_effective_conv2d`."""
        return config.use_effective_conv2d and math.prod(site.kernel) > 1

    @abstractmethod
    def delta(self, dtype: torch.dtype) -> Tensor:
        """Return ΔW `[*experts, d_out, d_in]` without s, in a dtype."""

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the tensors, with the ratio of the scalings in one factor."""
        return rescaled(self.state_dict(), self.scaling, slot.scaling, self.scaled)

    def kept_rows(self, like: Tensor) -> Tensor | None:
        """Return the factors for the rows of ΔW in this call, `[d_out]`; None if all are 1.

        Args:
            like: a tensor with their device and dtype.
        """
        if not self.training or not (self.rank_dropout or self.module_dropout):
            return None
        kept = like.new_ones(self.d_out)
        if self.rank_dropout:
            rows = torch.rand(self.d_out, device=like.device) >= self.rank_dropout
            kept = kept * rows
            if self.rescales:
                # if no row is kept the result is zero, without a division by zero
                kept = kept * (self.d_out / rows.sum().clamp(min=1)).to(kept.dtype)
        if self.module_dropout:
            kept = kept * (torch.rand(1, device=like.device) >= self.module_dropout)
        return kept

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + s · ΔW, `[*experts, d_out, d_in]`."""
        with exactly(w.device):
            return w + self.scaling * self.delta(w.dtype)

    def trained_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return w + s · ΔW without the rows that training drops in this call."""
        change, kept = self.scaling * self.delta(w.dtype), self.kept_rows(w)
        return w + (change if kept is None else change * kept.unsqueeze(-1))


def tucker(t: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return Σ t[i, j] ⊗ a[i] ⊗ b[j], a matrix of a convolution.

    Args:
        t: `[r, r, kernel]`, the third factor.
        a: `[r, d_out]`.
        b: `[r, channels]`.

    Returns:
        `[d_out, channels · kernel]`.
    """
    product: Tensor = torch.einsum("ijk,ip,jc->pck", t, a, b)  # [d_out, channels, kernel]
    return product.flatten(1)


def _third(t: Tensor, site: Site) -> Tensor:
    """Return the third factor as PEFT stores it; at a 1-D convolution with a last dimension 1."""
    sizes = site.kernel if len(site.kernel) > 1 else (*site.kernel, 1)
    stored: Tensor = t.unflatten(2, sizes)  # [r, r, *kernel]
    return stored


THIRD = ConvolutionShape(lambda t, _layer: t.flatten(2), _third)
"""`[r, r, kernel]`, in PEFT's files `[r, r, *kernel]`."""


def peft_spelling(
    peft_type: str,
    class_name: str,
    names: Sequence[str],
    extra: Mapping[str, PeftArgument],
    **more: Any,
) -> Callable[[type[AdapterConfig]], PeftSpelling]:
    """Return how PEFT spells LoHa or LoKr.

    Args:
        peft_type: in its files.
        class_name: name of its config class.
        names: names of the tensors.
        extra: fields that the other method does not have.
        **more: other arguments of `PeftSpelling`.
    """
    arguments = {
        **TARGETS,
        **EXCLUDED,
        **same_as(
            LycorisConfig, "r", "alpha", "rank_dropout", "module_dropout", "use_effective_conv2d"
        ),
        **extra,
        "rank_pattern": ours({}, "rank_pattern"),
        "alpha_pattern": ours({}, "alpha_pattern"),
        "init_weights": ours(True, "init_weights"),
    }
    return lambda config: PeftSpelling(
        config=config,
        peft_type=peft_type,
        arguments=PeftArguments(class_name=class_name, fields=arguments),
        tensors={name: (name,) for name in names},
        patterns={"rank_pattern": "r", "alpha_pattern": "alpha"},
        read_fields=_read_fields,
        **{"unsayable": not_in_peft, **more},
        write_layers=lambda layers, said: [
            _written(layer, fields) for layer, fields in zip(layers, said, strict=True)
        ],
    )


def not_in_peft(placement: Placement) -> str | None:
    """Return why PEFT's format cannot express an adapter; None if it can."""
    kind = type(placement.config).__name__
    if len(placement.site.kernel) > 2:
        return f"a {kind} at {placement.site.path!r}, a 3-D convolution, which PEFT's cannot adapt"
    if (why := ignored(placement.site, "padding_mode")) is not None:
        return why
    return unsayable(placement, f"a {kind}", "PEFT's method does not work")


def _read_fields(layer: PeftLayer, fields: Fields) -> Fields:
    refuse_ignored(layer.site, "padding_mode")
    return fields


def _written(layer: PeftOutput, said: Fields) -> Fields:
    """Return the fields of PEFT's config for a layer; the scalings of its parts are equal."""
    placement = layer.parts[0].placement
    config, path = cast("LycorisConfig", placement.config), placement.site.path
    rank = config.rank_at(path)
    if len(layer.parts) > 1:
        # a joined adapter has the sum of the ranks
        rank = layer.tensors["hada_w1_a"].shape[1]
    alpha = config.scaling_at(path) * rank
    alpha = int(alpha) if alpha == int(alpha) else alpha
    return {**said, "r": rank, "alpha": alpha}
