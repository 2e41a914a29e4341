"""MTL-LoRA — Low-Rank Adaptation for Multi-Task Learning.

Paper: Yang et al. 2024, arXiv:2410.09437, eq. 3 to 5.
y = W x + b + s · Σⱼ softmax(w / τ)ⱼ · Bⱼ Λ A x for each task, with A `[rank, d_in]`, n matrices Bⱼ
`[d_out, rank]`, a matrix Λ `[rank, rank]`, n weights w, and s = alpha / rank, or alpha / √rank with
`use_rslora`. `model.share_parameters` lets tasks share A and B; each has its own Λ and w.

Differs from the paper: dropout before A, as in LoRA; Λ is diagonal by default. Differs from PEFT:
it has no MTL-LoRA. Differs from adapters: a dense Λ works and starts as the identity; merging
works; a fused layer is adapted part by part.
Cost per site: rank · (d_in + n · d_out) + rank + n parameters (no w if n = 1), rank² for a dense Λ
instead of rank; LoRA's two products, and one pass over the n matrices B.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.averaging import Combination
from adapterzoo.config import (
    MAX_WIDTH,
    AdapterConfig,
    Choice,
    MultiTaskConfig,
    Positive,
    Range,
    field,
    method_config,
)
from adapterzoo.contracts import Adapter, BaseLayer, compute_dtype
from adapterzoo.kernels.grouped import RowGroups, grouped_low_rank
from adapterzoo.kernels.low_rank import expand
from adapterzoo.methods._init import constant, drawn

from .factors import Factors, LowRank, LowRankConfig


@method_config("mtl_lora")
class MTLLoRAConfig(LowRankConfig, MultiTaskConfig):
    """Config of MTL-LoRA; `TargetedConfig` chooses the layers, `LowRankConfig` how large they are.

    Attributes:
        n_up_projection: the number n of matrices B, from 1.
        task_specific_matrix_type: "singular_values" for a diagonal Λ, "linear" for a dense one.
        weights_sharpness: τ, above 0.
    """

    shareable: ClassVar[tuple[str, ...]] = ("lora_A", "lora_B")

    n_up_projection: int = field(1, Range(1, MAX_WIDTH))
    task_specific_matrix_type: str = field("singular_values", Choice("singular_values", "linear"))
    weights_sharpness: float = field(0.05, Positive())

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> LowRankConfig:
        """Return the config of the combination, the same for all."""
        # the combination cannot have other ranks
        return cast("LowRankConfig", super(LowRankConfig, cls).combined(configs, strategy, anatomy))


class TaskMatrix(nn.Module):
    """The matrix Λ of one task.

    Attributes:
        values: its diagonal `[*experts, rank]`, or the dense matrix `[*experts, rank, rank]`.
    """

    def __init__(
        self, shape: tuple[int, ...], dense: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Start as the identity.

        Args:
            shape: `[*experts, rank]`.
            dense: whether the matrix is dense.
            device: device of the parameter.
            dtype: dtype of the parameter.
        """
        super().__init__()
        self.dense = dense
        fill, shape = (_eye, (*shape, shape[-1])) if dense else (constant(1.0), shape)
        self.values = drawn(shape, fill, device, dtype)

    def forward(self, t: Tensor) -> Tensor:
        """Return Λ t, `[*batch, rank]`, of a layer without experts, in the dtype of t."""
        scaled = linear(t, self.values.to(t.dtype)) if self.dense else t * self.values
        return scaled.to(t.dtype)

    def after(self, b: Tensor) -> Tensor:
        """Return B Λ `[*experts, d_out, rank]`, in the dtype of B."""
        values = self.values.to(b.dtype)
        return b @ values if self.dense else b * values.unsqueeze(-2)


def _eye(t: Tensor) -> Tensor:
    t.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)
    return t


class MTLLoRA(LowRank):
    """y = base(x) + s · Σⱼ softmax(w / τ)ⱼ · Bⱼ Λ A dropout(x).

    Attributes:
        lora_B: `[n, d_out, rank]`, with experts after n if the site has any.
        task_specific: the matrix Λ.
        weights: w `[n]`, not trained if n is 1.
        sharpness: τ.
    """

    is_additive = True
    weights: Tensor

    def __init__(
        self, config: MTLLoRAConfig, site: Site, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the parameters.

        Args:
            config: the adapter's config.
            site: the site, which sets the widths.
            device: device for the parameters.
            dtype: the layer's dtype.

        Raises:
            ConfigError: there is dropout, but the site has no features to drop.
        """
        n = config.n_up_projection
        super().__init__(config, site, device, dtype, several=(n,))
        dtype = config.dtype_at(dtype)
        dense = config.task_specific_matrix_type == "linear"
        self.task_specific = TaskMatrix(self.lora_A.shape[:-1], dense, device, dtype)
        weights = drawn((n,), constant(1.0), device, dtype)
        # with a single B its share is 1: there is nothing to train
        if n > 1:
            self.weights = weights
        else:
            self.register_buffer("weights", weights.detach())
        self.sharpness = config.weights_sharpness

    def up(self, dtype: torch.dtype) -> Tensor:
        """Return Σⱼ softmax(w / τ)ⱼ · Bⱼ, `[*experts, d_out, rank]`."""
        wide = self.weights.to(compute_dtype(self.weights.dtype))
        shares = torch.softmax(wide / self.sharpness, 0).to(dtype)  # [n]
        b = self.lora_B.to(dtype)
        shares = shares.view(-1, *(1 for _ in b.shape[1:]))  # [n, 1, …]
        summed: Tensor = (shares * b).sum(0, dtype=dtype)
        return summed

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer with the update; in an embedding `x` is token ids `[*batch]`.

        `x` `[*batch, d_in]` → `[*batch, d_out]`.
        """
        y, t = base(x), self.task_specific(self.down(x, self.lora_A, base))  # [*batch, rank]
        return expand(y, t, self.up(self.lora_B.dtype), self.scaling)

    @property
    def row_options(self) -> Hashable | None:
        """Dtype and dropout; None at an embedding."""
        return None if self.at_embedding else (self.lora_A.dtype, self.dropout)

    def row_tensors(self, base: BaseLayer, dtype: torch.dtype) -> Mapping[str, Tensor | float]:
        """Return A, Σⱼ softmax(w / τ)ⱼ · Bⱼ Λ and s."""
        b = self.task_specific.after(self.up(self.lora_B.dtype))
        return {"lora_A": self.lora_A, "lora_B": b, "scaling": self.scaling}

    def forward_rows(
        self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return each row of the batch with its own update. `x` `[rows, *tokens, d_in]`.

        Tasks without rows take part, so that no process of a data-parallel run skips one.
        """
        a, b, scaling = stacks["lora_A"], stacks["lora_B"], stacks["scaling"]
        return grouped_low_rank(base(x), x, a, b, scaling, groups, self.dropout, self.training)

    def whole_factors(self, like: Tensor) -> Factors:
        """Return A and Σⱼ softmax(w / τ)ⱼ · Bⱼ Λ, on the device and in the dtype of `like`."""
        b = self.task_specific.after(self.up(like.dtype))
        return self.lora_A.to(like.device, like.dtype), b.to(like.device)

    def identity_values(self, base: BaseLayer) -> Mapping[str, Tensor]:
        """Return the initial values of Λ and w."""
        values, fill = self.task_specific.values, constant(1.0)
        start = (_eye if self.task_specific.dense else fill)(torch.empty_like(values))
        ones = fill(torch.empty_like(self.weights))
        return {"task_specific.values": start, "weights": ones}

    # not that of `factors`: all parameters are combined linearly
    combine = Adapter.combine


MTLLoRAConfig.adapter_class = MTLLoRA
