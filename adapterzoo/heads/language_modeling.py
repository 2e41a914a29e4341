"""Heads that predict the next or a masked token: causal, masked and sequence-to-sequence LMs.

features = norm(act(W · hidden + b)), once for each layer but the last, on hidden · hidden_scale;
logits = (E · features + b) · logit_scale / logit_divisor, capped by c·tanh(·/c).
E is the input embedding if the model ties them.

Differs from AdapterHub: the scales, the cap and the added bias that T5, Gemma, Cohere, Granite and
BART use, so these heads equal those models bit for bit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterzoo.activations import ActivationName
from adapterzoo.config import FLAG, MAX_WIDTH, Maybe, Positive, Range, Share, config_class, field
from adapterzoo.errors import ConfigError

from ._backbone import Backbone
from ._base import LAYERS, Activation, HeadConfig, PredictionHead, adds_head, head_types, number
from ._losses import Count, Logits, cross_entropy, next_labels
from ._task_classes import InexpressibleError, Static, StaticHead, activation_after

_FACTOR = Maybe(Positive())


@config_class
class LMConfig(HeadConfig):
    """Configs of language modeling heads.

    Attributes:
        vocab_size: number of tokens; None: the model's.
        layers: number of linear layers, including the one onto the vocabulary.
        activation_function: the activation after each layer but the last; None without one.
        layer_norm: whether a norm follows each layer but the last.
        bias: whether the last layer has a bias.
        shift_labels: whether the logits at t − 1 predict the token at t.
        hidden_scale: factor of the hidden states; None: the model's.
        logit_scale: factor of the logits.
        logit_divisor: divisor of the logits.
        logit_softcap: c in c·tanh(logits / c), which bounds the logits.
        added_bias: whether a constant, untrained `final_logits_bias` is added to the logits.
        dense_bias: whether the layers before the last have a bias.
        norm_bias: whether the norms have a bias.
        layer_norm_eps: epsilon of the norms; None: that of the model.
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
        """The loss of causal language models if the labels shift."""
        return "ForCausalLM" if self.shift_labels else None

    def shift(self, labels: Tensor) -> Tensor:
        """Return the labels, shifted to the next token if `shift_labels`; same shape."""
        return next_labels(labels) if self.shift_labels else labels

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return the layers onto the vocabulary of a language model."""
        fields, keys = lm_fields(static)
        return StaticHead(cls(**fields), keys)

    def build(self, backbone: Backbone) -> LMHead:
        """Return a new head, not yet tied."""
        return LMHead(self, backbone)


class LMHead(PredictionHead):
    """Layers on each token, the last onto the vocabulary; children are numbered in order."""

    config: LMConfig
    has_exit: ClassVar[bool] = True
    final_logits_bias: Tensor

    def __init__(self, config: LMConfig, backbone: Backbone) -> None:
        """Make the layers.

        Args:
            config: the head's config; some types have an `embedding_size` and a `dropout_prob`.
            backbone: the model below.

        Raises:
            ConfigError: neither the model nor the config has a vocabulary size.
        """
        super().__init__(config)
        vocabulary = config.vocab_size or backbone.vocab_size
        if vocabulary is None:
            raise ConfigError("the model has no vocabulary. Write vocab_size=….")
        self.dropout: float = config.get("dropout_prob") or 0.0
        given = config.hidden_scale
        self.hidden_scale = backbone.lm_scale if given is None else given
        width = backbone.hidden_size
        d_out: int = config.get("embedding_size") or backbone.embedding_size or width
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
        self.output_path = str(len(layers) - 1)
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
        *_, last = self._modules.values()
        logits: Tensor = last(features)  # type: ignore[misc]
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
        # shift the labels, not the logits, which would have to be copied
        return cross_entropy(cast("Tensor", logits), self.config.shift(labels), count)

    # --- the vocabulary ---

    def tokens_to_score(self, hidden: Tensor, keep: int | Tensor) -> Tensor:
        """Return the hidden states of the last `keep` tokens, of the listed ones, or of all (0)."""
        if isinstance(keep, Tensor):
            return hidden[:, keep]
        return hidden[:, -keep:] if keep else hidden

    @property
    def output_key(self) -> str:
        """The key of the last layer's weight."""
        return f"{self.output_path}.weight"

    def resize_output(self, weight: nn.Parameter, bias: Tensor | None) -> None:
        """Give the layer onto the vocabulary another weight and bias."""
        super().resize_output(weight, bias)
        if (old := getattr(self, "final_logits_bias", None)) is not None:
            rows = weight.shape[0]
            self.final_logits_bias = F.pad(old, (0, rows - old.shape[-1]))  # [1, vocab_size]


# classes that generate, with or without an encoder
_CONDITIONAL = ("ForConditionalGeneration", "MTModel")


@head_types.register("causal_lm")
@config_class
class CausalLMConfig(LMConfig):
    """A head that predicts the next token.

    Attributes:
        embedding_size: features before the last layer; None for the model's.
        dropout_prob: dropout before the last layer; None for none.
    """

    head_type: ClassVar[str] = "causal_lm"
    output_class: ClassVar[str] = "CausalLMOutput"
    pipeline_tag: ClassVar[str | None] = "text-generation"
    task_classes: ClassVar[tuple[str, ...]] = (
        "ForCausalLM",
        "LMHeadModel",
        "GenerationDecoder",
        *_CONDITIONAL,
    )
    peft_task: ClassVar[str | None] = "CAUSAL_LM"

    embedding_size: int | None = field(None, Maybe(Range(1, MAX_WIDTH), "that of the model"))
    shift_labels: bool = True
    dropout_prob: float | None = field(None, Maybe(Share(), "none"))

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return the head of a language model, unless it reads an encoder's output."""
        seq2seq = static.task in _CONDITIONAL and static.backbone.encoder_decoder
        return None if seq2seq else super().from_static(static)


@head_types.register("masked_lm")
@config_class
class MaskedLMConfig(LMConfig):
    """A head that predicts masked tokens.

    Attributes:
        embedding_size: features before the last layer; None for the model's.
    """

    head_type: ClassVar[str] = "masked_lm"
    output_class: ClassVar[str] = "MaskedLMOutput"
    pipeline_tag: ClassVar[str | None] = "fill-mask"
    task_classes: ClassVar[tuple[str, ...]] = ("ForMaskedLM",)

    embedding_size: int | None = field(None, Maybe(Range(1, MAX_WIDTH), "that of the model"))
    layers: int = 2
    activation_function: str | None = "gelu"
    layer_norm: bool = True
    bias: bool = True


@head_types.register("seq2seq_lm")
@config_class
class Seq2SeqLMConfig(LMConfig):
    """A head that predicts a decoder's next token; the decoder's inputs shift, not the labels."""

    head_type: ClassVar[str] = "seq2seq_lm"
    output_class: ClassVar[str] = "Seq2SeqLMOutput"
    decoder_inputs_from: ClassVar[str | None] = "labels"
    peft_task: ClassVar[str | None] = "SEQ_2_SEQ_LM"
    task_classes: ClassVar[tuple[str, ...]] = _CONDITIONAL

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return the head of an encoder–decoder; without an encoder it is causal."""
        return super().from_static(static) if static.backbone.encoder_decoder else None

    def build(self, backbone: Backbone) -> LMHead:
        """Return a new head, not yet tied.

        Raises:
            ConfigError: the model has no decoder above an encoder.
        """
        if not backbone.encoder_decoder:
            raise ConfigError("this is not an encoder–decoder. Write add_causal_lm_head.")
        return super().build(backbone)


# their names in `adapters`, which has a class for each task
BertStyleMaskedLMHead = CausalLMHead = Seq2SeqLMHead = LMHead


@adds_head(MaskedLMConfig)
def add_masked_lm_head(
    self: Any,
    head_name: str,
    activation_function: str | None = "gelu",
    layers: int = 2,
    overwrite_ok: bool = False,
) -> None:
    """Add a head that predicts masked tokens; it shares the embedding if the model ties it."""


@adds_head(functools.partial(CausalLMConfig, layer_norm=True, bias=True))
def add_causal_lm_head(
    self: Any,
    head_name: str,
    activation_function: str | None = "gelu",
    layers: int = 2,
    overwrite_ok: bool = False,
) -> None:
    """Add a head that predicts the next token; it shares the embedding if the model ties it."""


@adds_head(Seq2SeqLMConfig)
def add_seq2seq_lm_head(
    self: Any, head_name: str, layers: int = 1, overwrite_ok: bool = False
) -> None:
    """Add a head that predicts a decoder's next token, on encoder–decoder models."""


# config fields that change logits in ways that no head type here supports
_STRANGE = (
    "dim_model_base", "embedding_rank", "logits_mup_width_multiplier", "output_multiplier",
    "softcap", "unpadded_vocab_size", "use_predict_layer",
)  # fmt: skip
# names of the bound on logits
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def lm_fields(static: Static) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a head config, and the names of the tensors in a named head.

    Raises:
        InexpressibleError: the head has layers or factors that no head type here supports.
    """
    config = static.config
    if strange := [name for name in _STRANGE if config.get(name) not in (None, False, 1)]:
        raise InexpressibleError(f"its config has {strange[0]}={config[strange[0]]!r}")
    out, dense, norm = (static.module(role) for role in ("output", "dense", "norm"))
    if norm is not None and dense is None:
        raise InexpressibleError(f"it has the norm {norm} without a layer before it")
    # dense 0, activation 1, norm 2, then the output
    places = {dense: 0, norm: 2, out: 0 if dense is None else 2 if norm is None else 3}
    keys = static.keys_at(places)
    # BERT and RoBERTa store the output layer's bias next to it
    lone = [k for k in static.tensors if k not in keys and re.search(r"(^|\.)bias$", k)]
    keys.update(dict.fromkeys(lone, f"{places[out]}.bias"))
    added = "final_logits_bias" in static.tensors
    if added:
        keys["final_logits_bias"] = "final_logits_bias"
    static.refuse_unused(keys)
    rows = static.backbone.vocab_size if out is None else static.shape(out)[0]
    width = static.backbone.embedding_size or static.backbone.hidden_size
    if out is not None and static.shape(out)[1] != width:
        raise InexpressibleError(f"{out} takes {static.shape(out)[1]} features, not {width}")
    is_cohere = str(config.get("model_type")).startswith("cohere")
    fields: dict[str, Any] = {
        "vocab_size": None if rows == static.backbone.vocab_size else rows,
        "layers": 1 if dense is None else 2,
        "activation_function": None,
        "layer_norm": norm is not None,
        "bias": f"{places[out]}.bias" in keys.values(),
        "added_bias": added,
        "logit_scale": config.get("logit_scale" if is_cohere else "lm_head_multiplier"),
        "logit_divisor": config.get("logits_scaling"),
        "logit_softcap": next((config[name] for name in _SOFTCAPS if config.get(name)), None),
    }
    if out is None and not config.get("tie_word_embeddings"):
        # the config of the whole model ties it, the config of its text part does not
        fields["tie_word_embeddings"] = True
    if dense is not None:
        fields["activation_function"] = activation_after(dense, config)
        fields["dense_bias"] = static.has_bias(dense)
    if norm is not None:
        fields["norm_bias"] = static.has_bias(norm)
        if "layer_norm_eps" not in config:
            fields["layer_norm_eps"] = config.get("norm_eps")
            # DistilBERT's is the default of all heads
            if "norm_eps" not in config and dense != "vocab_transform":
                raise InexpressibleError(f"its config has no eps of {norm}")
    return fields, keys
