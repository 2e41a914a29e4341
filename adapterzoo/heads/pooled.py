"""Heads on one pooled vector per sequence: classification of texts and images, and multiple choice.

logits = W_n · act(… act(W_1 · pool(hidden) + b_1) …) + b_n, dropout before each W.

Differs from AdapterHub: `pooling` chooses the tokens; labels of −100 do not count.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor

from adapterzoo.config import Choice, config_class, field
from adapterzoo.errors import ConfigError

from ._backbone import POOLINGS, Backbone, Pooling, pool
from ._base import COUNT, Labels, LayersConfig, LayersHead, adds_head, head_types
from ._losses import LOSSES, Count, Logits
from ._task_classes import InexpressibleError, Static, StaticHead, activation_after

_SUMMARIES = {"first": "cls", "last": "last"}


@config_class
class PooledConfig(LayersConfig):
    """Configs of heads on one pooled vector per sequence.

    Attributes:
        use_pooler: whether to use the model's own pooler; the same as `pooling="pooler"`.
        pooling: the tokens that represent the sequence.
    """

    layers: int = 2
    use_pooler: bool = False
    pooling: Pooling = field("auto", Choice(*POOLINGS), ours=True)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.use_pooler and self.pooling not in ("auto", "pooler"):
            raise ConfigError(
                f"{type(self).__name__}(use_pooler=True, pooling={self.pooling!r}): these exclude "
                f"each other. Write use_pooler=False, pooling={self.pooling!r}."
            )
        if self.pooling == "pooler":
            # write only the form that AdapterHub reads
            object.__setattr__(self, "use_pooler", True)
            object.__setattr__(self, "pooling", "auto")

    def resolved(self, backbone: Backbone) -> Pooling:
        """Return the pooling for this backbone, never "auto"."""
        if self.use_pooler:
            return "pooler"
        return backbone.pooling if self.pooling == "auto" else self.pooling

    def build(self, backbone: Backbone) -> PooledHead:
        """Return a new head."""
        return PooledHead(self, backbone)

    @property
    def problem_type(self) -> str:
        """The kind of labels, which decides the loss and how pipelines read the logits."""
        return "regression" if self.label_count == 1 else "single_label_classification"

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return a static head on a pooled vector as a head of this type."""
        static.refuse_other_inputs()
        out, dense, keys = static.linears()
        pooling: Any = "cls"
        activation = None
        if dense is not None:
            activation = activation_after(dense, static.config)
            if dense.startswith("classification_head."):
                pooling = "eos"
            elif dense.startswith("sequence_summary."):
                kind = str(static.config.get("summary_type"))
                if kind not in _SUMMARIES:
                    raise InexpressibleError(f"its config has summary_type={kind!r}")
                pooling = _SUMMARIES[kind]
        elif (named := cls.pooling_of(static)) is not None:
            pooling = named
        elif out == "score":
            pooling = "last"
        elif static.pooler:
            pooling = "pooler"
        else:
            raise InexpressibleError("its base model has no pooler")
        config = cls(
            layers=1 if dense is None else 2,
            activation_function=activation,
            use_pooler=pooling == "pooler",
            pooling="auto" if pooling in (static.backbone.pooling, "pooler") else pooling,
            bias=static.has_bias(out),
            dropout_prob=static.dropout("seq_classif_dropout"),
            **cls.labels_of(static, static.shape(out)[0]),
        )
        return StaticHead(config, keys)

    @classmethod
    def pooling_of(cls, static: Static) -> str | None:
        """Return the pooling of a static head without inner layers; None if its layers imply it.

        Raises:
            InexpressibleError: the pooling is unknown.
        """
        return None

    @classmethod
    def labels_of(cls, static: Static, outputs: int) -> dict[str, Any]:
        """Return the fields for the labels of a static head.

        Args:
            static: the head.
            outputs: rows of its last layer.

        Raises:
            InexpressibleError: no head of this type has such labels.
        """
        if outputs > 1 and static.config.get("problem_type") == "regression":
            raise InexpressibleError(f"it is a regression of {outputs} numbers at once")
        return {"num_labels": outputs, "label2id": static.label_names(outputs)}


class PooledHead(LayersHead):
    """Layers on one pooled vector per sequence."""

    config: PooledConfig

    def __init__(self, config: PooledConfig, backbone: Backbone) -> None:
        """Make the layers."""
        super().__init__(config, backbone, config.resolved(backbone))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits `[batch, num_labels]`.

        Args:
            hidden: `[batch, tokens, d_model]`, or `[batch, d_model]` if the model has pooled.
            mask: `[batch, tokens]`, true or 1 at the tokens that `pooling` uses.
        """
        return self.score(pool(hidden, mask, self.pooling or "cls"))

    def loss(self, logits: Logits, labels: Tensor, count: Count = None) -> Tensor:
        """Return the loss of the task. `logits` `[batch, num_labels]`, `labels` `[batch]`."""
        return LOSSES[self.config.problem_type](cast("Tensor", logits), labels, count)


def is_multilabel(static: Static) -> bool:
    """Return whether each label of a static head is a yes or no."""
    return static.config.get("problem_type") == "multi_label_classification"


@head_types.register("classification")
@config_class
class ClassificationConfig(PooledConfig):
    """A head that assigns each sequence one of `num_labels` classes, or a number with one label."""

    head_type: ClassVar[str] = "classification"
    output_class: ClassVar[str] = "SequenceClassifierOutput"
    pipeline_tag: ClassVar[str | None] = "text-classification"
    peft_task: ClassVar[str | None] = "SEQ_CLS"
    task_classes: ClassVar[tuple[str, ...]] = ("ForSequenceClassification",)

    num_labels: int = field(2, COUNT)
    bias: bool = True

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return the head of a sequence classifier, if its labels fit this type."""
        fits = is_multilabel(static) == (cls is MultilabelClassificationConfig)
        return super().from_static(static) if fits else None


@head_types.register("multilabel_classification")
@config_class
class MultilabelClassificationConfig(ClassificationConfig):
    """A head that predicts a yes or no for each of `num_labels` labels."""

    head_type: ClassVar[str] = "multilabel_classification"

    @property
    def problem_type(self) -> str:
        """Always multi-label, even with a single label."""
        return "multi_label_classification"


def _config(*, multilabel: bool, **fields: Any) -> PooledConfig:
    return (MultilabelClassificationConfig if multilabel else ClassificationConfig)(**fields)


@adds_head(_config)
def add_classification_head(
    self: Any,
    head_name: str,
    num_labels: int = 2,
    layers: int = 2,
    activation_function: str | None = "tanh",
    overwrite_ok: bool = False,
    multilabel: bool = False,
    id2label: Labels = None,
    use_pooler: bool = False,
    pooling: Pooling = "auto",
) -> None:
    """Add a head that classifies whole sequences, and make it the active one.

    Args:
        self: the model.
        head_name: name of the new head.
        num_labels: number of classes; 1 for a number instead (regression).
        layers: number of linear layers.
        activation_function: the activation between them; None without one.
        overwrite_ok: whether a head of that name may be replaced.
        multilabel: whether each class is a separate yes or no.
        id2label: names of the classes.
        use_pooler: whether to use the model's own pooled output.
        pooling: the tokens that represent the sequence; "auto": as usual in the model's family.
    """


# pooling before the single layer → model types
_POOLED = {
    "cls": "deit pvt vit vit_msn",
    "mean": "ijepa levit",
    "pooler": (
        "beit convnext convnextv2 data2vec-vision focalnet mobilevit mobilevitv2 regnet resnet "
        "swin swinv2"
    ),
}


@head_types.register("image_classification")
@config_class
class ImageClassificationConfig(PooledConfig):
    """A head that classifies images; with `multilabel`, a yes or no for each class."""

    head_type: ClassVar[str] = "image_classification"
    output_class: ClassVar[str] = "ImageClassifierOutput"
    pipeline_tag: ClassVar[str | None] = "image-classification"
    peft_classes: ClassVar[str | None] = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"
    task_classes: ClassVar[tuple[str, ...]] = ("ForImageClassification",)

    num_labels: int = field(2, COUNT)
    multilabel: bool = False
    bias: bool = True

    @property
    def problem_type(self) -> str:
        """As for text; with a single label, a regression."""
        several = self.multilabel and self.num_labels > 1
        return "multi_label_classification" if several else super().problem_type

    @classmethod
    def pooling_of(cls, static: Static) -> str:
        """Return the pooling before the single layer of an image classifier.

        Raises:
            InexpressibleError: the pooling is unknown.
        """
        model_type = str(static.config.get("model_type"))
        found = next((p for p, types in _POOLED.items() if model_type in types.split()), None)
        if found is None:
            raise InexpressibleError(f"the pooling of a {model_type} is unknown")
        return found

    @classmethod
    def labels_of(cls, static: Static, outputs: int) -> dict[str, Any]:
        """Return the fields for the labels, and whether each is a yes or no."""
        return {**super().labels_of(static, outputs), "multilabel": is_multilabel(static)}


@adds_head(ImageClassificationConfig)
def add_image_classification_head(
    self: Any,
    head_name: str,
    num_labels: int = 2,
    layers: int = 1,
    activation_function: str | None = "tanh",
    overwrite_ok: bool = False,
    multilabel: bool = False,
    id2label: Labels = None,
    use_pooler: bool = False,
    pooling: Pooling = "auto",
) -> None:
    """Add a head that classifies images; the arguments are those of `add_classification_head`."""


# arguments of the base model with one row per sequence
_PER_SEQUENCE = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")


@head_types.register("multiple_choice")
@config_class
class MultipleChoiceConfig(PooledConfig):
    """A head that chooses the best of `num_choices` sequences, each scored separately."""

    head_type: ClassVar[str] = "multiple_choice"
    output_class: ClassVar[str] = "MultipleChoiceModelOutput"
    pipeline_tag: ClassVar[str | None] = "multiple-choice"
    count_field: ClassVar[str] = "num_choices"
    task_classes: ClassVar[tuple[str, ...]] = ("ForMultipleChoice",)

    num_choices: int = field(2, COUNT)

    @property
    def d_out(self) -> int:
        """One score per sequence."""
        return 1

    @property
    def problem_type(self) -> str:
        """The choices are classes."""
        return "single_label_classification"

    def prepare_inputs(self, inputs: dict[str, Any]) -> None:
        """Flatten the choices into the batch: `[batch, choices, …]` → `[batch · choices, …]`."""
        for name in _PER_SEQUENCE:
            value = inputs.get(name)
            if isinstance(value, Tensor) and value.dim() == (4 if name == "inputs_embeds" else 3):
                inputs[name] = value.flatten(0, 1)  # [batch · choices, tokens]

    def build(self, backbone: Backbone) -> MultipleChoiceHead:
        """Return a new head."""
        return MultipleChoiceHead(self, backbone)

    @classmethod
    def labels_of(cls, static: Static, outputs: int) -> dict[str, Any]:
        """Return the number of labels in the config as the number of choices; 2 without labels."""
        return {"num_choices": len(static.config.get("id2label") or (0, 1))}


class MultipleChoiceHead(PooledHead):
    """A score for each sequence, compared within each group of choices."""

    config: MultipleChoiceConfig

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits `[batch, num_choices]`.

        Args:
            hidden: `[batch · num_choices, tokens, d_model]`, the choices of one question together.
            mask: `[batch · num_choices, tokens]`.
        """
        scores = super().forward(hidden, mask)  # [batch · num_choices, 1]
        return scores.view(-1, self.config.num_choices)  # [batch, num_choices]


@adds_head(MultipleChoiceConfig)
def add_multiple_choice_head(
    self: Any,
    head_name: str,
    num_choices: int = 2,
    layers: int = 2,
    activation_function: str | None = "tanh",
    overwrite_ok: bool = False,
    id2label: Labels = None,
    use_pooler: bool = False,
    pooling: Pooling = "auto",
) -> None:
    """Add a head that chooses among sequences; inputs are `[batch, num_choices, tokens]`.

    Args:
        self: the model.
        head_name: name of the new head.
        num_choices: number of sequences to choose from.
        layers: as in `add_classification_head`, like the rest.
        activation_function: the activation between the layers.
        overwrite_ok: whether a head of that name may be replaced.
        id2label: names of the choices.
        use_pooler: whether to use the model's own pooled output.
        pooling: the tokens that represent a sequence.
    """
