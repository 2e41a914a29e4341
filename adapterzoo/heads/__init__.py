"""Prediction heads: hidden states to logits, and logits with labels to a loss.

One file for each kind of task. A head sees tensors, never a transformers model or its outputs.
"""

from __future__ import annotations

from ._base import Backbone, HeadConfig, PredictionHead, head_types, labels_from
from ._lm import LMHead
from ._pooling import POOLINGS, Pooling, pool
from .classification import (
    ClassificationConfig,
    ImageClassificationConfig,
    MultilabelClassificationConfig,
    MultipleChoiceConfig,
)
from .dependency_parsing import DependencyParsingConfig
from .language_modeling import CausalLMConfig, MaskedLMConfig, Seq2SeqLMConfig
from .question_answering import QuestionAnsweringConfig
from .tagging import TaggingConfig

__all__ = [
    "POOLINGS",
    "Backbone",
    "CausalLMConfig",
    "ClassificationConfig",
    "DependencyParsingConfig",
    "HeadConfig",
    "ImageClassificationConfig",
    "LMHead",
    "MaskedLMConfig",
    "MultilabelClassificationConfig",
    "MultipleChoiceConfig",
    "Pooling",
    "PredictionHead",
    "QuestionAnsweringConfig",
    "Seq2SeqLMConfig",
    "TaggingConfig",
    "head_types",
    "labels_from",
    "pool",
]
