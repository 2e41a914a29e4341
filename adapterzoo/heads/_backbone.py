"""The facts that heads read from a model, and the pooling of a sequence into one vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from adapterzoo.contracts import compute_dtype

Pooling = Literal["auto", "cls", "mean", "last", "eos", "pooler"]
"""The tokens that represent a sequence.

`cls`: the first; `mean`: the average of the real ones; `last`: the last real one, with padding on
either side; `eos`: the last end-of-sequence token; `pooler`: the model's own pooled output; `auto`:
the usual one of the model's family.
"""

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


def pool(hidden: Tensor, mask: Tensor | None, pooling: Pooling) -> Tensor:
    """Return one vector per sequence.

    Args:
        hidden: `[batch, tokens, d_model]`; `[batch, d_model]` is returned unchanged.
        mask: `[batch, tokens]`, true or 1 at the tokens that count: the real ones, for `eos` the
            end-of-sequence tokens. None if all count.
        pooling: resolved, never "auto".

    Returns:
        `[batch, d_model]`. A sequence without any token that counts gives zeros for `mean`, and its
        first token for `last` and `eos`.
    """
    if hidden.dim() == 2:
        return hidden
    if pooling == "mean":
        return _mean(hidden, mask)
    if pooling in ("last", "eos"):
        if mask is None:
            return hidden[:, -1]
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        last = (positions * mask.to(hidden.device, torch.bool)).argmax(dim=1)  # [batch]
        return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
    return hidden[:, 0]


def _mean(hidden: Tensor, mask: Tensor | None) -> Tensor:
    # float32: half-precision sums over hundreds of tokens lose digits or overflow
    wide = hidden.to(compute_dtype(hidden.dtype))
    if mask is None:
        return wide.mean(dim=1).to(hidden.dtype)
    kept = mask.to(hidden.device, torch.bool).unsqueeze(-1)  # [batch, tokens, 1]
    # where, not a product: padding may hold inf or nan
    total = torch.where(kept, wide, 0.0).sum(dim=1)
    return (total / kept.sum(dim=1).clamp(min=1)).to(hidden.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backbone:
    """The facts about a model that its heads depend on.

    Attributes:
        hidden_size: width of the hidden states.
        device: device of the head's parameters.
        dtype: dtype of the head's parameters.
        vocab_size: rows of the input embedding; None without one.
        embedding_size: width of the input embedding, if it is not `hidden_size`.
        dropout: dropout of heads whose config does not set it.
        layer_norm_eps: epsilon of the norms in heads.
        init_std: standard deviation of new weights.
        pooling: the meaning of `pooling="auto"` for this model.
        encoder_decoder: whether the hidden states come from the decoder of an encoder–decoder.
        lm_scale: factor of the hidden states before a language modeling head, if its config does
            not set it.
        task_head: a function that builds the head of a task class of transformers, given its config
            and this backbone; None if the model is not one of transformers.
    """

    hidden_size: int
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    vocab_size: int | None = None
    embedding_size: int | None = None
    dropout: float = 0.0
    layer_norm_eps: float = 1e-12
    init_std: float = 0.02
    pooling: Pooling = "cls"
    encoder_decoder: bool = False
    lm_scale: float | None = None
    task_head: Callable[[Any, Backbone], Any] | None = None

    def linear(self, d_in: int, d_out: int, bias: bool = True) -> nn.Linear:
        """Return a new linear layer with normal weights and zero bias."""
        layer = nn.Linear(d_in, d_out, bias=bias, device=self.device, dtype=self.dtype)
        nn.init.normal_(layer.weight, std=self.init_std)
        if bias:
            nn.init.zeros_(layer.bias)
        return layer

    def layer_norm(self, width: int, bias: bool = True, eps: float | None = None) -> nn.LayerNorm:
        """Return a new layer norm; for `eps=None`, with the model's epsilon."""
        eps = self.layer_norm_eps if eps is None else eps
        return nn.LayerNorm(width, eps, bias=bias, device=self.device, dtype=self.dtype)
