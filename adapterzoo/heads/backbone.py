"""The facts about a model that its heads depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._pooling import Pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class Backbone:
    """The facts about a model that its heads depend on.

    Attributes:
        hidden_size: width of the hidden states.
        device: of the head's parameters.
        dtype: of the head's parameters.
        vocab_size: rows of the input embedding; None without one.
        embedding_size: width of the input embedding, if it is not `hidden_size`.
        dropout: of heads whose config does not set it.
        layer_norm_eps: of the norms in heads.
        init_std: standard deviation of fresh weights.
        pooling: the meaning of `pooling="auto"` for this model.
        encoder_decoder: whether the hidden states come from the decoder of an encoder–decoder.
        lm_scale: factor of the hidden states before a language modeling head whose config does
            not set it.
        task_head: makes the head of a task class of transformers, from its config and this
            backbone; None if the model is not one of transformers.
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
        """Return a fresh linear layer with normal weights and zero bias."""
        layer = nn.Linear(d_in, d_out, bias=bias, device=self.device, dtype=self.dtype)
        nn.init.normal_(layer.weight, std=self.init_std)
        if bias:
            nn.init.zeros_(layer.bias)
        return layer

    def layer_norm(self, width: int, bias: bool = True, eps: float | None = None) -> nn.LayerNorm:
        """Return a fresh layer norm; `eps` None: that of the model."""
        eps = self.layer_norm_eps if eps is None else eps
        return nn.LayerNorm(width, eps, bias=bias, device=self.device, dtype=self.dtype)
