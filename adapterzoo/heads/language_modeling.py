"""Heads that predict the next or a masked token: causal, masked and sequence-to-sequence LMs.

features = norm(act(W · hidden + b)), once for each layer but the last, from hidden · hidden_scale;
logits = (E · features + b) · logit_scale / logit_divisor, capped by c·tanh(·/c).
E is the input embedding where the model ties them.

Differs from AdapterHub: the scales, the cap and the added bias that T5, Gemma, Cohere, Granite and
BART use, so that these heads equal those models bit for bit.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from adapterzoo.config_base import config_class
from adapterzoo.errors import ConfigError
from adapterzoo.fields import MAX_WIDTH, Maybe, Range, Share, field

from ._adding import Model, adds_head
from ._lm import LMConfig, LMHead
from .backbone import Backbone
from .base import head_types
from .task_classes import Static, StaticHead

# classes that generate, with an encoder or without one
_CONDITIONAL = ("ForConditionalGeneration", "MTModel")


@head_types.register("causal_lm")
@config_class
class CausalLMConfig(LMConfig):
    """A head that predicts the next token.

    Attributes:
        embedding_size: features before the last layer; None for those of the model.
        dropout_prob: before the last layer; None for none.
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
        embedding_size: features before the last layer; None for those of the model.
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
        """Return a fresh head, not yet tied.

        Raises:
            ConfigError: the model has no decoder above an encoder.
        """
        if not backbone.encoder_decoder:
            raise ConfigError(
                "add_seq2seq_lm_head needs an encoder–decoder. Write add_causal_lm_head."
            )
        return super().build(backbone)


# their names in `adapters`, which has a class for each task
BertStyleMaskedLMHead = CausalLMHead = Seq2SeqLMHead = LMHead


@adds_head(MaskedLMConfig)
def add_masked_lm_head(
    self: Model,
    head_name: str,
    activation_function: str | None = "gelu",
    layers: int = 2,
    overwrite_ok: bool = False,
) -> None:
    """Add a head that predicts masked tokens; it shares the embedding if the model ties it."""


@adds_head(functools.partial(CausalLMConfig, layer_norm=True, bias=True))
def add_causal_lm_head(
    self: Model,
    head_name: str,
    activation_function: str | None = "gelu",
    layers: int = 2,
    overwrite_ok: bool = False,
) -> None:
    """Add a head that predicts the next token; it shares the embedding if the model ties it."""


@adds_head(Seq2SeqLMConfig)
def add_seq2seq_lm_head(
    self: Model, head_name: str, layers: int = 1, overwrite_ok: bool = False
) -> None:
    """Add a head that predicts a decoder's next token, on encoder–decoder models."""
