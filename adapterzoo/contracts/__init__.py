"""The two contracts of the library: adapters and heads.

An adapter is a function around a layer; a head is a function of hidden states. Both are plain
modules that do not depend on models, names, files, devices or each other.
"""

from __future__ import annotations

from .adapter import (
    Adapter,
    AttentionAdapter,
    BaseLayer,
    Contained,
    CopyAdapter,
    Ejectable,
    FactoredAdapter,
    FusibleAdapter,
    InputPlan,
    InputStatistics,
    InvertibleAdapter,
    Joins,
    LanguageFreeAdapter,
    LayerData,
    OriginalWeight,
    PositionAdapter,
    Prefix,
    PromptAdapter,
    SharedKey,
    SharedModules,
    WeightAdapter,
    WeightPlan,
    can_batch,
    compute_dtype,
    replaced,
    upcast,
    widest,
)
from .head import Head

__all__ = [
    "Adapter",
    "AttentionAdapter",
    "BaseLayer",
    "Contained",
    "CopyAdapter",
    "Ejectable",
    "FactoredAdapter",
    "FusibleAdapter",
    "Head",
    "InputPlan",
    "InputStatistics",
    "InvertibleAdapter",
    "Joins",
    "LanguageFreeAdapter",
    "LayerData",
    "OriginalWeight",
    "PositionAdapter",
    "Prefix",
    "PromptAdapter",
    "SharedKey",
    "SharedModules",
    "WeightAdapter",
    "WeightPlan",
    "can_batch",
    "compute_dtype",
    "replaced",
    "upcast",
    "widest",
]
