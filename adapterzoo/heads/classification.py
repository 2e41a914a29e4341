"""Heads that judge whole sequences: a class, several labels, or a number.

Differs from AdapterHub: `pooling` says which tokens answer; labels of −100 do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adapterzoo.fields import field

from ._base import head_types
from ._layers import COUNT
from ._pooled import PooledConfig, is_multilabel
from ._static import Static, StaticHead


@head_types.register("classification")
@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(PooledConfig):
    """One of `num_labels` classes for each sequence; with `num_labels=1` a number (regression)."""

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
    """A yes or no for each of `num_labels` labels."""

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
        """Each label by itself, also when there is one."""
        return "multi_label_classification"
