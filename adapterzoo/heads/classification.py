"""Heads that judge a whole sequence or image: classes, several labels, regression, a choice.

logits = W_n · act(… act(W_1 · pool(hidden) + b_1) …) + b_n, dropout before each W.

Differs from AdapterHub: `pooling` says which tokens answer; labels of −100 do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from adapterzoo.errors import ConfigError
from adapterzoo.fields import Choice, field

from ._base import Backbone, head_types
from ._layers import COUNT, LayersConfig, LayersHead
from ._losses import LOSSES
from ._pooling import POOLINGS, Pooling, pool

# arguments of the base model with one row for each sequence
_PER_SEQUENCE = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")


@dataclass(frozen=True, kw_only=True)
class PooledConfig(LayersConfig):
    """Configs of heads on one vector for each sequence.

    Attributes:
        use_pooler: whether the model pools; the same as `pooling="pooler"`.
        bias: whether the last layer has one.
        pooling: which tokens answer for the sequence.
    """

    layers: int = 2
    use_pooler: bool = False
    bias: bool = field(True, ours=True)
    pooling: Pooling = field("auto", Choice(*POOLINGS), ours=True)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.use_pooler and self.pooling not in ("auto", "pooler"):
            raise ConfigError(
                f"{type(self).__name__}(use_pooler=True, pooling={self.pooling!r}): the model's "
                f"pooler and another pooling exclude each other. "
                f"Write use_pooler=False, pooling={self.pooling!r}."
            )
        if self.pooling == "pooler":
            # one spelling in files, the one that AdapterHub reads
            object.__setattr__(self, "use_pooler", True)
            object.__setattr__(self, "pooling", "auto")

    def resolved(self, backbone: Backbone) -> Pooling:
        """The pooling that holds on this backbone, never "auto"."""
        if self.use_pooler:
            return "pooler"
        return backbone.pooling if self.pooling == "auto" else self.pooling

    def build(self, backbone: Backbone) -> PooledHead:
        """A fresh head."""
        return PooledHead(self, backbone)

    @property
    def problem_type(self) -> str:
        """Decides the loss, and what pipelines do with the logits."""
        return "regression" if self.label_count == 1 else "single_label_classification"

    def loss(self, logits: Tensor, labels: Tensor, count: Tensor | int | None) -> Tensor:
        """Binary cross entropy of labels, cross entropy of classes, squared error of a number."""
        return LOSSES[self.problem_type](logits, labels, count)


@head_types.register("classification")
@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(PooledConfig):
    """One of `num_labels` classes for each sequence; with `num_labels=1` a number (regression)."""

    head_type: ClassVar[str] = "classification"
    output_class: ClassVar[str] = "SequenceClassifierOutput"
    pipeline_tag: ClassVar[str | None] = "text-classification"
    peft_task: ClassVar[str | None] = "SEQ_CLS"

    num_labels: int = field(2, COUNT)
    bias: bool = True


@head_types.register("multilabel_classification")
@dataclass(frozen=True, kw_only=True)
class MultilabelClassificationConfig(PooledConfig):
    """A yes or no for each of `num_labels` labels."""

    head_type: ClassVar[str] = "multilabel_classification"
    output_class: ClassVar[str] = "SequenceClassifierOutput"
    pipeline_tag: ClassVar[str | None] = "text-classification"
    peft_task: ClassVar[str | None] = "SEQ_CLS"

    num_labels: int = field(2, COUNT)
    bias: bool = True

    @property
    def problem_type(self) -> str:
        """Each label by itself, also when there is one."""
        return "multi_label_classification"


@head_types.register("image_classification")
@dataclass(frozen=True, kw_only=True)
class ImageClassificationConfig(PooledConfig):
    """One of `num_labels` classes for each image, or with `multilabel` a yes or no for each."""

    head_type: ClassVar[str] = "image_classification"
    output_class: ClassVar[str] = "ImageClassifierOutput"
    pipeline_tag: ClassVar[str | None] = "image-classification"

    num_labels: int = field(2, COUNT)
    multilabel: bool = False
    bias: bool = True

    @property
    def problem_type(self) -> str:
        """As of the heads on text; a single label is a number."""
        several = self.multilabel and self.num_labels > 1
        return "multi_label_classification" if several else super().problem_type


@head_types.register("multiple_choice")
@dataclass(frozen=True, kw_only=True)
class MultipleChoiceConfig(PooledConfig):
    """The best of `num_choices` sequences, each scored by itself."""

    head_type: ClassVar[str] = "multiple_choice"
    output_class: ClassVar[str] = "MultipleChoiceModelOutput"
    pipeline_tag: ClassVar[str | None] = "multiple-choice"
    count_field: ClassVar[str] = "num_choices"

    num_choices: int = field(2, COUNT)

    @property
    def d_out(self) -> int:
        """One score for each sequence."""
        return 1

    @property
    def problem_type(self) -> str:
        """The choices are classes."""
        return "single_label_classification"

    def prepare_inputs(self, inputs: dict[str, Any]) -> None:
        """Put the choices one after the other: `[batch, choices, …]` → `[batch · choices, …]`."""
        for name in _PER_SEQUENCE:
            value = inputs.get(name)
            if isinstance(value, Tensor) and value.dim() == (4 if name == "inputs_embeds" else 3):
                inputs[name] = value.flatten(0, 1)  # [batch · choices, tokens]

    def build(self, backbone: Backbone) -> MultipleChoiceHead:
        """A fresh head."""
        return MultipleChoiceHead(self, backbone)


class PooledHead(LayersHead):
    """Layers on one vector for each sequence."""

    config: PooledConfig

    def __init__(self, config: PooledConfig, backbone: Backbone) -> None:
        """Make the layers."""
        super().__init__(config, backbone, config.resolved(backbone), config.bias)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits `[batch, num_labels]`.

        Args:
            hidden: `[batch, tokens, d_model]`, or `[batch, d_model]` where the model has pooled.
            mask: `[batch, tokens]`, true or 1 at the tokens that `pooling` looks at.
        """
        return self.score(pool(hidden, mask, self.pooling or "cls"))

    def loss(
        self,
        logits: Tensor | tuple[Tensor, ...],
        labels: Tensor,
        count: Tensor | int | None = None,
    ) -> Tensor:
        """The loss of the task. `logits` `[batch, num_labels]`, `labels` `[batch]`."""
        scores = logits[0] if isinstance(logits, tuple) else logits
        return self.config.loss(scores, labels, count)


class MultipleChoiceHead(PooledHead):
    """A score for each sequence, compared within each group of choices."""

    config: MultipleChoiceConfig

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits `[batch, num_choices]`.

        Args:
            hidden: `[batch · num_choices, tokens, d_model]`, the choices of one question together.
            mask: `[batch · num_choices, tokens]`.

        Raises:
            ConfigError: the sequences do not divide into groups of choices.
        """
        choices = self.config.num_choices
        if hidden.shape[0] % choices:
            raise ConfigError(
                f"multiple choice: {hidden.shape[0]} sequences do not divide into groups of "
                f"num_choices={choices}. Write input_ids of shape [batch, {choices}, tokens]."
            )
        return super().forward(hidden, mask).view(-1, choices)  # [batch, num_choices]
