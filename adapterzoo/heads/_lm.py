"""The layers that all language modeling heads share: features, and logits over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterzoo.activations import ActivationName
from adapterzoo.config_base import config_class
from adapterzoo.errors import ConfigError
from adapterzoo.fields import FLAG, Maybe, Positive, Range, field

from ._layers import LAYERS, Activation, number
from ._lm_static import lm_fields
from ._vocabulary import VocabularyHead
from .backbone import Backbone
from .base import HeadConfig
from .losses import Count, Logits, cross_entropy, next_labels
from .task_classes import Static, StaticHead

_FACTOR = Maybe(Positive())


@config_class
class LMConfig(HeadConfig):
    """Configs of language modeling heads.

    Attributes:
        vocab_size: number of tokens; None: that of the model.
        layers: number of linear layers, including the one onto the vocabulary.
        activation_function: after each layer but the last; None: none.
        layer_norm: whether a norm follows each layer but the last.
        bias: whether the last layer has one.
        shift_labels: whether the logits at t − 1 predict the token at t.
        hidden_scale: factor of the hidden states; None: that of the model.
        logit_scale: factor of the logits.
        logit_divisor: divides the logits.
        logit_softcap: c in c·tanh(logits / c), which bounds the logits.
        added_bias: whether a constant `final_logits_bias`, not trained, is added to the logits.
        dense_bias: whether the layers but the last have one.
        norm_bias: whether the norms have one.
        layer_norm_eps: of the norms; None: that of the model.
        tie_word_embeddings: whether the last layer is the input embedding; False: it has its own
            weight even if the model ties the two; None: as in the model's config.
    """

    scores_vocabulary: ClassVar[bool] = True

    vocab_size: int | None = field(None, Maybe(Range(1, 10_000_000), "that of the model"))
    layers: int = field(1, LAYERS)
    activation_function: str | None = field(None, ActivationName())
    layer_norm: bool = False
    bias: bool = False
    shift_labels: bool = False
    hidden_scale: float | None = field(None, _FACTOR, ours=True)
    logit_scale: float | None = field(None, _FACTOR, ours=True)
    logit_divisor: float | None = field(None, _FACTOR, ours=True)
    logit_softcap: float | None = field(None, _FACTOR, ours=True)
    added_bias: bool = field(False, ours=True)
    dense_bias: bool = field(True, ours=True)
    norm_bias: bool = field(True, ours=True)
    layer_norm_eps: float | None = field(None, _FACTOR, ours=True)
    tie_word_embeddings: bool | None = field(
        None, Maybe(FLAG, "that of the model's config"), ours=True
    )

    @property
    def loss_type(self) -> str | None:
        """That of causal language models if the labels shift."""
        return "ForCausalLM" if self.shift_labels else None

    def shift(self, labels: Tensor) -> Tensor:
        """Return the labels, shifted to the next token if `shift_labels`; same shape."""
        return next_labels(labels) if self.shift_labels else labels

    def ties_output(self, model_ties: bool) -> bool:
        """Return this config's choice, or else the model's."""
        return model_ties if self.tie_word_embeddings is None else self.tie_word_embeddings

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return the layers onto the vocabulary of a language model."""
        fields, keys = lm_fields(static)
        return StaticHead(cls(**fields), keys)

    def build(self, backbone: Backbone) -> LMHead:
        """Return a fresh head, not yet tied."""
        return LMHead(self, backbone)


class LMHead(VocabularyHead):
    """Layers on each token, the last onto the vocabulary; children numbered in their order."""

    config: LMConfig
    has_exit: ClassVar[bool] = True

    def __init__(self, config: LMConfig, backbone: Backbone) -> None:
        """Make the layers.

        Args:
            config: of the head; some types have an `embedding_size` and a `dropout_prob`.
            backbone: the model below.

        Raises:
            ConfigError: neither the model nor the config has a vocabulary size.
        """
        super().__init__(config)
        vocabulary = config.vocab_size or backbone.vocab_size
        if vocabulary is None:
            raise ConfigError(
                f"{type(config).__name__}(vocab_size=None): the model has no vocabulary. Write "
                f"vocab_size=…."
            )
        self.dropout: float = config.get("dropout_prob") or 0.0
        given = config.hidden_scale
        self.hidden_scale = backbone.lm_scale if given is None else given
        own: int | None = config.get("embedding_size")
        d_out = own or backbone.embedding_size or backbone.hidden_size
        width = backbone.hidden_size
        layers: list[nn.Module] = []
        for _ in range(config.layers - 1):
            layers.append(backbone.linear(width, d_out, config.dense_bias))
            width = d_out
            if config.activation_function:
                layers.append(Activation(config.activation_function))
            if config.layer_norm:
                layers.append(backbone.layer_norm(d_out, config.norm_bias, config.layer_norm_eps))
        layers.append(backbone.linear(width, vocabulary, config.bias))
        number(self, layers)
        if config.added_bias:
            bias = torch.zeros(1, vocabulary, device=backbone.device, dtype=backbone.dtype)
            self.register_buffer("final_logits_bias", bias)

    def features(self, hidden: Tensor) -> Tensor:
        """Apply all layers but the last, `[*batch, d_model]` → `[*batch, embedding_size]`."""
        if self.hidden_scale is not None:
            hidden = hidden * self.hidden_scale
        *inner, _ = self._modules.values()
        for layer in inner:
            hidden = layer(hidden)  # type: ignore[misc]
        return F.dropout(hidden, self.dropout, self.training) if self.dropout else hidden

    def decode(self, features: Tensor) -> Tensor:
        """Apply the last layer. `[*batch, embedding_size]` → `[*batch, vocab_size]`."""
        config = self.config
        logits: Tensor = self.output_embeddings(features)
        if config.added_bias:
            logits = logits + self.final_logits_bias
        if config.logit_scale is not None:
            logits = logits * config.logit_scale
        if config.logit_divisor is not None:
            logits = logits / config.logit_divisor
        if config.logit_softcap is not None:
            logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
        return logits

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        at_exit: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return logits `[batch, tokens, vocab_size]`. `hidden` `[batch, tokens, d_model]`."""
        features = self.features(hidden)
        return self.decode(features if at_exit is None else at_exit(features))

    def loss(self, logits: Logits, labels: Tensor, count: Count = None) -> Tensor:
        """Return the cross entropy of `labels` `[batch, tokens]`."""
        if isinstance(logits, tuple):
            (logits,) = logits
        # shift the labels, not the logits, which would have to be copied
        return cross_entropy(logits, self.config.shift(labels), count)
