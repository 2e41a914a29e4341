"""Heads on tokens: tagging (named entities, parts of speech), and the span that answers a question.

logits = W_n · act(… act(W_1 · hidden + b_1) …) + b_n for each token, dropout before each W.
Question answering: Devlin et al. 2019, arXiv:1810.04805, §4.2: two scores for each token, the cross
entropies of the first and last token are averaged.

Differs from AdapterHub: `bias=False` leaves out the last layer's; positions of answers before or
after the text do not count (AdapterHub reads negative ones as 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from adapterzoo.config import Choice, config_class, field
from adapterzoo.errors import ConfigError

from ._backbone import Backbone
from ._base import COUNT, Labels, LayersConfig, LayersHead, adds_head, head_types
from ._losses import IGNORED, Count, Logits, cross_entropy
from ._task_classes import InexpressibleError, Static, StaticHead

# encoder–decoders whose token classifiers have only the encoder
_OF_ENCODER = frozenset({"mt5", "t5", "umt5"})


@head_types.register("tagging")
@config_class
class TaggingConfig(LayersConfig):
    """A head that assigns each token one of `num_labels` classes.

    Attributes:
        num_labels: number of classes.
    """

    head_type: ClassVar[str] = "tagging"
    output_class: ClassVar[str] = "TokenClassifierOutput"
    token_labels: ClassVar[bool] = True
    pipeline_tag: ClassVar[str | None] = "token-classification"
    peft_task: ClassVar[str | None] = "TOKEN_CLS"
    task_classes: ClassVar[tuple[str, ...]] = ("ForTokenClassification",)

    num_labels: int = field(2, COUNT)

    @classmethod
    def from_static(cls, static: Static) -> StaticHead:
        """Return the one layer of a token classifier.

        Raises:
            InexpressibleError: it has more layers, or reads the encoder below a decoder.
        """
        if static.config.get("model_type") in _OF_ENCODER:
            raise InexpressibleError("it labels the encoder's tokens, named heads the decoder's")
        out, keys = static.one_linear()
        count = static.shape(out)[0]
        config = cls(
            num_labels=count,
            activation_function=None,
            label2id=static.label_names(count),
            bias=static.has_bias(out),
            dropout_prob=static.dropout(),
        )
        return StaticHead(config, keys)

    def build(self, backbone: Backbone) -> TaggingHead:
        """Return a new head."""
        return TaggingHead(self, backbone)


class TaggingHead(LayersHead):
    """Layers on each token."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits `[batch, tokens, num_labels]`. `hidden` `[batch, tokens, d_model]`."""
        return self.score(hidden)

    def loss(self, logits: Logits, labels: Tensor, count: Count = None) -> Tensor:
        """Return the cross entropy of `labels` `[batch, tokens]`."""
        return cross_entropy(cast("Tensor", logits), labels, count)


@adds_head(TaggingConfig)
def add_tagging_head(
    self: Any,
    head_name: str,
    num_labels: int = 2,
    layers: int = 1,
    activation_function: str | None = "tanh",
    overwrite_ok: bool = False,
    id2label: Labels = None,
) -> None:
    """Add a head that classifies tokens; the arguments are those of `add_classification_head`."""


@head_types.register("question_answering")
@config_class
class QuestionAnsweringConfig(LayersConfig):
    """A head that scores each token as the first and as the last one of the answer.

    Attributes:
        num_labels: 2, the two scores.
    """

    head_type: ClassVar[str] = "question_answering"
    output_class: ClassVar[str] = "QuestionAnsweringModelOutput"
    pipeline_tag: ClassVar[str | None] = "question-answering"
    peft_task: ClassVar[str | None] = "QUESTION_ANS"
    task_classes: ClassVar[tuple[str, ...]] = ("ForQuestionAnswering",)
    label_names: ClassVar[tuple[str, ...]] = ("start_positions", "end_positions")
    token_places: ClassVar[tuple[str, ...]] = ("start_positions", "end_positions")
    logit_names: ClassVar[tuple[str, ...]] = ("start_logits", "end_logits")

    num_labels: int = field(2, Choice(2))

    @classmethod
    def adapterhub_quirk(cls, model_type: str, config: Mapping[str, Any]) -> str | None:
        """Return how AdapterHub's computation differs, found by comparing outputs."""
        # it scales for every head except those on whole sequences
        if model_type in ("mt5", "t5") and config.get("tie_word_embeddings"):
            return "scales the hidden states"
        return None

    @classmethod
    def from_static(cls, static: Static) -> StaticHead:
        """Return the single layer of a question-answering class."""
        static.refuse_other_inputs()
        out, keys = static.one_linear()
        config = cls(
            num_labels=static.shape(out)[0],
            activation_function=None,
            bias=static.has_bias(out),
            dropout_prob=static.config.get("qa_dropout", 0.0),
        )
        return StaticHead(config, keys)

    def build(self, backbone: Backbone) -> QuestionAnsweringHead:
        """Return a new head."""
        return QuestionAnsweringHead(self, backbone)


class QuestionAnsweringHead(LayersHead):
    """Layers on each token, the last with two features."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the scores as first and last token, `[batch, tokens]` each.

        Args:
            hidden: `[batch, tokens, d_model]`.
            mask: not used; padding is also scored, as in transformers.
        """
        start, end = self.score(hidden).unbind(dim=-1)
        return start.contiguous(), end.contiguous()

    def loss(self, logits: Logits, labels: Tensor, count: Count = None) -> Tensor:
        """Return the mean of the two cross entropies.

        Args:
            logits: logits of the first and of the last token, `[batch, tokens]` each.
            labels: `[batch, 2]`, first and last positions; those outside the text do not count.
            count: the divisor of each sum, instead of the number of positions that count.

        Raises:
            ConfigError: wrong dtype or shape of the labels.
        """
        start, end = logits
        if labels.is_floating_point() or labels.shape[1:] != (2,):
            raise ConfigError(
                f"start_positions, end_positions: {labels.dtype}, stacked {[*labels.shape]}. Write "
                f"one whole number for each row."
            )
        inside = (labels >= 0) & (labels < start.shape[1])
        kept = labels.to(torch.long).where(inside, IGNORED)
        first = cross_entropy(start, kept[:, 0], count)
        last = cross_entropy(end, kept[:, 1], count)
        return (first + last) / 2


@adds_head(QuestionAnsweringConfig)
def add_qa_head(
    self: Any,
    head_name: str,
    num_labels: int = 2,
    layers: int = 1,
    activation_function: str | None = "tanh",
    overwrite_ok: bool = False,
    id2label: Labels = None,
) -> None:
    """Add a head that finds the span of an answer; `num_labels` is 2, its start and end."""
