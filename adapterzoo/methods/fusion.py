"""AdapterFusion — attention over the outputs of several adapters.

Paper: Pfeiffer et al. 2020, arXiv:2005.00247, eq. 3–5.
o = softmax(Q x · K z_i) over the adapters i, and Σ o_i V z_i replaces a bottleneck's f, where x is
the adapters' input and z_i = f_i(x) are their updates.

Differs from the paper: a dropout on the scores, and z_i without gates and dropouts of the fused
adapters, as in adapters. Differs from adapters: the temperature decays only in training; x is
added once more where parallel bottlenecks are fused (`adds_input`).
Cost per site: 3 · d_model² + 2 · d_model parameters. Cannot do: `query_before_ln` and
`residual_before`, which no published config uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import dropout

from adapterzoo.config import Choice, Config, Maybe, Share, config_class, field
from adapterzoo.contracts import Contained
from adapterzoo.kernels.ops import is_autocast
from adapterzoo.names import FUSION
from adapterzoo.registry import Registry

from ._init import drawn, normal
from ._parts import Affine, affine

# the initial temperature, and the number of steps in which it falls by this amount
_HOT, _STEPS = 50.0, 1000

fusion_configs: Registry[Callable[[], AdapterFusionConfig]] = Registry("fusion config")


@config_class
class AdapterFusionConfig(Config):
    """Config of a fusion layer; the fields are those of adapters.

    Attributes:
        key: whether z_i is projected before it is compared.
        query: whether x is projected before it is compared.
        value: whether there is a V.
        query_before_ln: must be False.
        regularization: whether the trainer keeps V near the identity.
        residual_before: must be False.
        temperature: whether the scores are divided by a temperature that decays from 50 to 1.
        value_before_softmax: whether V acts on each z_i; if not, on their sum.
        value_initialized: whether V starts as the identity.
        adds_input: whether x is added to the fused update once more, as adapters does when it
            fuses parallel bottlenecks.
        dropout_prob: dropout probability of the scores; None: that of the model's attention.
        entry: what becomes of invertible functions at the embeddings. "fused": they are fused too,
            and there is no inverse; "first": that of the first adapter acts, as in adapters.
    """

    strings: ClassVar[Registry[Any]] = fusion_configs
    default: ClassVar[object] = "dynamic"

    key: bool = True
    query: bool = True
    value: bool = True
    query_before_ln: bool = field(False, Choice(False))
    regularization: bool = True
    residual_before: bool = field(False, Choice(False))
    temperature: bool = False
    value_before_softmax: bool = True
    value_initialized: bool = True
    adds_input: bool = False
    dropout_prob: float | None = field(None, Maybe(Share(), "that of the model's attention"))
    entry: str = field("fused", Choice("fused", "first"), ours=True)


@fusion_configs.register("static")
@config_class
class StaticAdapterFusionConfig(AdapterFusionConfig):
    """Without V: the sum of the adapters themselves."""

    value: bool = False
    regularization: bool = False
    value_initialized: bool = False


@fusion_configs.register("dynamic")
@config_class
class DynamicAdapterFusionConfig(AdapterFusionConfig):
    """With V, which starts as the identity and is kept near it."""


class Fusion(Contained):
    """Σ o_i V z_i with o = softmax(Q x · K z_i).

    Attributes:
        query: Q; None if the config has none.
        key: K, likewise.
        value: V, likewise.
        steps: number of training steps for which the temperature has decayed; None without one. An
            integer, so that casts of the model do not round it.
    """

    container = "adapter_fusion_layer"
    prefix = FUSION
    steps: Tensor | None

    def __init__(
        self,
        config: AdapterFusionConfig,
        d_model: int,
        dropout_prob: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make the parameters.

        Args:
            config: the layer's config.
            d_model: width of the stream.
            dropout_prob: dropout probability of the scores.
            device: device for the parameters.
            dtype: dtype of the parameters.
        """
        super().__init__()
        self.config, self.dropout_prob = config, dropout_prob
        shape, fill = (d_model, d_model), normal(0.02, None)
        self.query = affine(shape, fill, device, dtype) if config.query else None
        self.key = affine(shape, fill, device, dtype) if config.key else None
        self.value = Affine(drawn(shape, fill, device, dtype), None) if config.value else None
        if self.value is not None and config.value_initialized:
            with torch.no_grad():
                self.value.weight.fill_(1e-6).fill_diagonal_(1.0)
        steps = torch.zeros((), dtype=torch.int64, device=device) if config.temperature else None
        self.register_buffer("steps", steps)

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the fused update `[*batch, d_model]`, and the shares o `[*batch, n]`.

        Args:
            x: the input of the adapters, `[*batch, d_model]`.
            outputs: z_i of each of the n adapters, each of the shape of x, in any dtypes.
        """
        z = torch.stack(list(outputs), -2)  # [*batch, n, d_model]
        if (own := self.query or self.key or self.value) and not is_autocast(z.device):
            z = z.to(own.weight.dtype)
        query = x.to(z.dtype) if self.query is None else self.query(x.to(z.dtype))
        keys = z if self.key is None else self.key(z)  # [*batch, n, d_model]
        scores = torch.matmul(keys, query.unsqueeze(-1)).squeeze(-1)  # [*batch, n]
        scores = dropout(scores, self.dropout_prob, self.training)
        if self.steps is not None:
            scores = scores / self.temperature(self.steps).to(scores.dtype)
            if self.training:
                self.steps.add_(1)
        shares = scores.softmax(-1)
        if self.value is not None and self.config.value_before_softmax:
            z = self.value(z)
        context = torch.matmul(shares.unsqueeze(-2), z).squeeze(-2)  # [*batch, d_model]
        if self.value is not None and not self.config.value_before_softmax:
            context = self.value(context)
        if self.config.adds_input:
            context = context + x.to(context.dtype)
        return context, shares

    @staticmethod
    def temperature(steps: Tensor) -> Tensor:
        """Return the temperature after a number of steps, float32 or float64."""
        return (_HOT - steps * (_HOT / _STEPS)).clamp(min=1.0)

    def distance(self) -> Tensor | None:
        """Return Σ (V − I)², which regularization keeps small; None without it."""
        if self.value is None or not self.config.regularization:
            return None
        weight = self.value.weight
        return (weight - torch.zeros_like(weight).fill_diagonal_(1.0)).square().sum()
