"""Prediction heads: hidden states to logits, and logits with labels to a loss.

One file for each kind of task. A head sees tensors, never a transformers model or its outputs.
"""

from __future__ import annotations

from ._adding import add_methods, adds_head
from ._labels import by_head, labels_from
from ._lm import LMHead
from ._pooling import POOLINGS, Pooling, pool
from .backbone import Backbone
from .base import HeadConfig, PredictionHead, head_types, token_places
from .classification import ClassificationConfig, MultilabelClassificationConfig
from .dependency_parsing import DependencyParsingConfig, DependencyParsingHead
from .image_classification import ImageClassificationConfig
from .language_modeling import (
    BertStyleMaskedLMHead,
    CausalLMConfig,
    CausalLMHead,
    MaskedLMConfig,
    Seq2SeqLMConfig,
    Seq2SeqLMHead,
)
from .losses import IGNORED, Logits, next_labels
from .multiple_choice import MultipleChoiceConfig, MultipleChoiceHead
from .pooled import PooledHead
from .question_answering import QuestionAnsweringConfig, QuestionAnsweringHead
from .static import STATIC, StaticConfig, TaskHead
from .task_classes import InexpressibleError, Shapes, Static, StaticHead, label_numbers
from .tokens import TaggingConfig, TaggingHead

# their names in `adapters`, which has a class for each task
BiaffineParsingHead = DependencyParsingHead
ClassificationHead = ImageClassificationHead = MultiLabelClassificationHead = PooledHead

__all__ = [
    "IGNORED",
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
    "by_head",
    "head_types",
    "label_numbers",
    "labels_from",
    "next_labels",
    "pool",
    "token_places",
]
