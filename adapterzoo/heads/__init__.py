"""Prediction heads: hidden states to logits, and logits with labels to a loss.

One file for each kind of task. A head sees tensors, never a transformers model or its outputs.
"""

from __future__ import annotations

from adapterzoo.names import STATIC

from ._backbone import POOLINGS, Backbone, Pooling, pool
from ._base import HeadConfig, PredictionHead, add_methods, adds_head, head_types, token_places
from ._losses import IGNORED, Logits, labels_from, next_labels
from ._task_classes import InexpressibleError, Shapes, Static, StaticHead, label_numbers
from .dependency_parsing import DependencyParsingConfig, DependencyParsingHead
from .language_modeling import (
    BertStyleMaskedLMHead,
    CausalLMConfig,
    CausalLMHead,
    LMHead,
    MaskedLMConfig,
    Seq2SeqLMConfig,
    Seq2SeqLMHead,
)
from .pooled import (
    ClassificationConfig,
    ImageClassificationConfig,
    MultilabelClassificationConfig,
    MultipleChoiceConfig,
    MultipleChoiceHead,
    PooledHead,
)
from .static import OWN_OUTPUT, StaticConfig, TaskHead
from .tokens import QuestionAnsweringConfig, QuestionAnsweringHead, TaggingConfig, TaggingHead

# their names in `adapters`, which has a class for each task
BiaffineParsingHead = DependencyParsingHead
ClassificationHead = ImageClassificationHead = MultiLabelClassificationHead = PooledHead

__all__ = [
    "IGNORED",
    "OWN_OUTPUT",
    "POOLINGS",
    "STATIC",
    "Backbone",
    "BertStyleMaskedLMHead",
    "BiaffineParsingHead",
    "CausalLMConfig",
    "CausalLMHead",
    "ClassificationConfig",
    "ClassificationHead",
    "DependencyParsingConfig",
    "DependencyParsingHead",
    "HeadConfig",
    "ImageClassificationConfig",
    "ImageClassificationHead",
    "InexpressibleError",
    "LMHead",
    "Logits",
    "MaskedLMConfig",
    "MultiLabelClassificationHead",
    "MultilabelClassificationConfig",
    "MultipleChoiceConfig",
    "MultipleChoiceHead",
    "PooledHead",
    "Pooling",
    "PredictionHead",
    "QuestionAnsweringConfig",
    "QuestionAnsweringHead",
    "Seq2SeqLMConfig",
    "Seq2SeqLMHead",
    "Shapes",
    "Static",
    "StaticConfig",
    "StaticHead",
    "TaggingConfig",
    "TaggingHead",
    "TaskHead",
    "add_methods",
    "adds_head",
    "head_types",
    "label_numbers",
    "labels_from",
    "next_labels",
    "pool",
    "token_places",
]


def __dir__() -> list[str]:
    return __all__
