"""Prediction heads: hidden states to logits, and logits with labels to a loss.

One file for each kind of task. A head sees tensors, never a transformers model or its outputs.
"""

from __future__ import annotations

from ._base import Backbone, HeadConfig, PredictionHead, head_types
from ._labels import labels_from
from ._lm import LMHead
from ._pooling import POOLINGS, Pooling, pool
from .classification import (
    ClassificationConfig,
    ImageClassificationConfig,
    MultilabelClassificationConfig,
    MultipleChoiceConfig,
    MultipleChoiceHead,
    PooledHead,
)
from .dependency_parsing import DependencyParsingConfig, DependencyParsingHead
from .language_modeling import CausalLMConfig, MaskedLMConfig, Seq2SeqLMConfig
from .question_answering import QuestionAnsweringConfig, QuestionAnsweringHead
from .tagging import TaggingConfig, TaggingHead

__all__ = [
    "POOLINGS",
    "Backbone",
    "CausalLMConfig",
    "ClassificationConfig",
    "DependencyParsingConfig",
    "DependencyParsingHead",
    "HeadConfig",
    "ImageClassificationConfig",
    "LMHead",
    "MaskedLMConfig",
    "MultilabelClassificationConfig",
    "MultipleChoiceConfig",
    "MultipleChoiceHead",
    "PooledHead",
    "Pooling",
    "PredictionHead",
    "QuestionAnsweringConfig",
    "QuestionAnsweringHead",
    "Seq2SeqLMConfig",
    "TaggingConfig",
    "TaggingHead",
    "head_types",
    "labels_from",
    "pool",
]
