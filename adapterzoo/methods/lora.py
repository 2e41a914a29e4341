"""LoRA — Low-Rank Adaptation.

Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3; rsLoRA: Kalajdzievski 2023, arXiv:2312.03732.
y = W x + b + s · B A x with A `[rank, d_in]`, B `[d_out, rank]` and s = alpha / rank, or
alpha / √rank with `use_rslora`.

Differs from the paper: dropout before A, as everybody has it. Differs from PEFT: parameters
live in the dtype of their layer unless `dtype` says otherwise. Differs from adapters: a `Stack`
adds the updates.
Cost per site: rank · (d_in + d_out) parameters, two matrix products of that size in the forward.
Cannot do: initialisations that change the base weights (PiSSA, OLoRA, LoftQ).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding

from adapterzoo.anatomy import Site
from adapterzoo.configs import MAX_WIDTH, architectures, config_strings, require_choice, require_range
from adapterzoo.contracts import Base, WeightAdapter
from adapterzoo.errors import ConfigError
from adapterzoo.kernels.low_rank import low_rank_reference
from ._init import constant, drawn, generator, kaiming, normal
from ._targets import TargetedConfig, check_pattern

_T = TypeVar("_T")
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32)}


@architectures.register("lora")
@config_strings.register("lora")
@dataclass(frozen=True, kw_only=True)
class LoRAConfig(TargetedConfig):
    """Config of LoRA; where the adapters sit is said by the fields of `TargetedConfig`.

    Attributes:
        r: rank, 1 to 65,536.
        alpha: numerator of the scaling.
        dropout: probability, 0 to below 1, of dropping an input feature on the way to A.
        init_weights: "lora": B is zero, so that a fresh adapter changes nothing; "bert": both
            normal with deviation 0.02.
        init_weights_seed: makes the initial values reproducible, whatever was drawn before.
        use_gating: scale the update by a learned gate, one number a token sequence (UniPELT).
        use_rslora: scale by alpha / √r.
        lora_bias: give B a bias.
        rank_pattern: path endings or regular expressions to the rank of the layers they match.
        alpha_pattern: the same for alpha.
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    architecture: ClassVar[str] = "lora"

    r: int = 8
    alpha: float = 8
    dropout: float = 0.0
    init_weights: str = "lora"
    init_weights_seed: int | None = None
    use_gating: bool = False
    use_rslora: bool = False
    lora_bias: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a value is not legal.
        """
        super().__post_init__()
        require_range(self, "r", 1, MAX_WIDTH)
        require_range(self, "alpha", -1e9, 1e9)
        require_range(self, "dropout", 0.0, 1.0 - 1e-9)
        require_choice(self, "init_weights", ("lora", "bert"))
        require_choice(self, "dtype", (None, *_DTYPES))
        for name in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, name):
                check_pattern(self, name, pattern)
        for rank in self.rank_pattern.values():
            self.replace(r=rank, rank_pattern={})

    def __hash__(self) -> int:
        """A hash that equal configs share; the patterns, which are dicts, are left to `==`."""
        return hash((self.r, self.alpha, self.target_modules, self.attn_matrices, self.leave_out))

    @property
    def starts_as_identity(self) -> bool:
        """Whether B starts as zero."""
        return self.init_weights == "lora"

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> LoRA:
        """A fresh adapter for the site."""
        return LoRA(self, site, device, _DTYPES[self.dtype] if self.dtype else dtype)

    def rank_at(self, path: str) -> int:
        """The rank of the adapter at a path."""
        return _matching(self.rank_pattern, path, self.r)

    def scaling_at(self, path: str) -> float:
        """The factor s of the adapter at a path."""
        rank = self.rank_at(path)
        alpha = _matching(self.alpha_pattern, path, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


class LoRA(WeightAdapter):
    """y = base(x) + s · B A dropout(x) (+ s · B's bias)."""

    def __init__(
        self, config: LoRAConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Args:
            config: of the adapter.
            site: gives the widths.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        rank = config.rank_at(site.path)
        self.scaling = config.scaling_at(site.path)
        self.dropout = config.dropout
        self.looks_up = site.kind == "embedding"
        if self.looks_up and (config.dropout or config.use_gating):
            raise ConfigError(
                f"LoRAConfig(dropout={config.dropout}, use_gating={config.use_gating}) at the "
                f"embedding {site.path!r}: its input is token numbers, which have neither. "
                f"Write dropout=0.0, use_gating=False."
            )
        if site.parameter and (config.dropout or config.use_gating or config.lora_bias):
            raise ConfigError(
                f"LoRAConfig(dropout={config.dropout}, use_gating={config.use_gating}, "
                f"lora_bias={config.lora_bias}) at {site.path}.{site.parameter}: the module "
                f"computes with this parameter, so only its weight can change. "
                f"Write dropout=0.0, use_gating=False, lora_bias=False."
            )
        lead = (site.experts,) if site.experts else ()
        source = generator(config.init_weights_seed, site.path + str(site.role))
        small = normal(0.02, source)
        fresh = (kaiming(source), constant(0.0)) if config.init_weights == "lora" else (small, small)
        self.lora_A = drawn((*lead, rank, site.d_in), fresh[0], device, dtype)
        self.lora_B = drawn((*lead, site.d_out, rank), fresh[1], device, dtype)
        self.lora_B_bias: nn.Parameter | None = None
        if config.lora_bias:
            self.lora_B_bias = drawn((site.d_out,), constant(0.0), device, dtype)
        self.gate: nn.Parameter | None = None
        if config.use_gating:
            self.gate = drawn((1, site.d_in), small, device, dtype)

    def forward(self, x: Tensor, base: Base) -> Tensor:
        """The adapted layer. `x` `[*batch, d_in]`, or token numbers `[*batch]` → `[*batch, d_out]`."""
        y = base(x)
        a, b = self.lora_A, self.lora_B
        if self.looks_up:
            low = embedding(x, a.T)  # [*batch, rank]
            return y + (low @ b.T * (self.scaling * base.scale)).to(y.dtype)
        x = x.to(a.dtype)
        if self.dropout and self.training:
            x = dropout(x, self.dropout)
        if self.gate is None and self.lora_B_bias is None:
            return low_rank_reference(y, x, a, b, self.scaling)
        update = nn.functional.linear(x @ a.T, b, self.lora_B_bias) * self.scaling
        if self.gate is not None:
            gate = torch.sigmoid(x @ self.gate.T)  # [*batch, tokens, 1]
            update = update * gate.mean(-2, keepdim=True)
        return y + update.to(y.dtype)

    def weight(self, w: Tensor, base: Base) -> Tensor:
        """The merged weight w + s · B A, `[d_out, d_in]`."""
        if self.gate is not None:
            raise ConfigError(
                "merge: a LoRA adapter with use_gating=True depends on its input and is no weight. "
                "Keep it active instead."
            )
        return w + self.scaling * (self.lora_B.to(w.dtype) @ self.lora_A.to(w.dtype))

    def bias(self, b: Tensor, base: Base) -> Tensor:
        """The merged bias b + s · B's bias, `[d_out]`."""
        return b if self.lora_B_bias is None else b + self.scaling * self.lora_B_bias.to(b.dtype)

    def extra_repr(self) -> str:
        """Widths, rank and scaling."""
        rank, d_in = self.lora_A.shape[-2:]
        return f"d_in={d_in}, d_out={self.lora_B.shape[-2]}, rank={rank}, scaling={self.scaling:g}"


def _matching(patterns: Mapping[str, _T], path: str, otherwise: _T) -> _T:
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", path):
            return value
    return otherwise
