"""Heads that classify whole sequences: a class, several labels, or a number.

Differs from AdapterHub: `pooling` chooses the tokens; labels of −100 do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adapterzoo.fields import field

from ._adding import Labels, Model, adds_head
from ._base import head_types
from ._labels import labels_from
from ._layers import COUNT
from ._pooled import PooledConfig, is_multilabel
from ._pooling import Pooling
from ._static import Static, StaticHead


@head_types.register("classification")
@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(PooledConfig):
    """A head that gives each sequence one of `num_labels` classes; with one label, a number."""

    head_type: ClassVar[str] = "classification"
    output_class: ClassVar[str] = "SequenceClassifierOutput"
    pipeline_tag: ClassVar[str | None] = "text-classification"
    peft_task: ClassVar[str | None] = "SEQ_CLS"
    task_classes: ClassVar[tuple[str, ...]] = ("ForSequenceClassification",)

    num_labels: int = field(2, COUNT)
    bias: bool = True

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return the head of a classifier of sequences, unless each label is a yes or no."""
        return None if is_multilabel(static) else super().from_static(static)


@head_types.register("multilabel_classification")
@dataclass(frozen=True, kw_only=True)
class MultilabelClassificationConfig(PooledConfig):
    """A head that gives a yes or no for each of `num_labels` labels."""

    head_type: ClassVar[str] = "multilabel_classification"
    output_class: ClassVar[str] = "SequenceClassifierOutput"
    pipeline_tag: ClassVar[str | None] = "text-classification"
    peft_task: ClassVar[str | None] = "SEQ_CLS"
    task_classes: ClassVar[tuple[str, ...]] = ("ForSequenceClassification",)

    num_labels: int = field(2, COUNT)
    bias: bool = True

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return the head of a classifier of sequences where each label is a yes or no."""
        return super().from_static(static) if is_multilabel(static) else None

    @property
    def problem_type(self) -> str:
        """Each label by itself, even a single one."""
        return "multi_label_classification"


@adds_head
def add_classification_head(
    self: Model,
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
        head_name: of the new head.
        num_labels: number of classes; 1 for a number instead (regression).
        layers: number of linear layers.
        activation_function: between them; None for none.
        overwrite_ok: whether a head of that name may be replaced.
        multilabel: whether each class is a separate yes or no.
        id2label: names of the classes.
        use_pooler: whether to take the model's own pooled output.
        pooling: which tokens stand for the sequence; "auto" as in the model's family.
    """
    kind = MultilabelClassificationConfig if multilabel else ClassificationConfig
    config = kind(
        num_labels=num_labels,
        layers=layers,
        activation_function=activation_function,
        label2id=labels_from(id2label),
        use_pooler=use_pooler,
        pooling=pooling,
    )
    self.add_prediction_head_from_config(head_name, config, overwrite_ok)
