"""Heads that classify whole sequences: a class, several labels, or a number.

Differs from AdapterHub: `pooling` chooses the tokens; labels of −100 do not count.
"""

from __future__ import annotations

from typing import Any, ClassVar

from adapterzoo.config_base import config_class
from adapterzoo.fields import field

from ._adding import Labels, Model, adds_head
from ._layers import COUNT
from ._pooling import Pooling
from .base import head_types
from .pooled import PooledConfig, is_multilabel
from .task_classes import Static, StaticHead


@head_types.register("classification")
@config_class
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
        """Return the head of a sequence classifier, if its labels fit this type."""
        fits = is_multilabel(static) == (cls is MultilabelClassificationConfig)
        return super().from_static(static) if fits else None


@head_types.register("multilabel_classification")
@config_class
class MultilabelClassificationConfig(ClassificationConfig):
    """A head that gives a yes or no for each of `num_labels` labels."""

    head_type: ClassVar[str] = "multilabel_classification"

    @property
    def problem_type(self) -> str:
        """Always multi-label, even with a single label."""
        return "multi_label_classification"


def _config(*, multilabel: bool, **fields: Any) -> PooledConfig:
    return (MultilabelClassificationConfig if multilabel else ClassificationConfig)(**fields)


@adds_head(_config)
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
        activation_function: between them; None: none.
        overwrite_ok: whether a head of that name may be replaced.
        multilabel: whether each class is a separate yes or no.
        id2label: names of the classes.
        use_pooler: whether to use the model's own pooled output.
        pooling: the tokens that represent the sequence; "auto": as in the model's family.
    """
