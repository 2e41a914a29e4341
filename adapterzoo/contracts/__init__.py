"""The two contracts of the library: adapters and heads.

An adapter is a function around a layer; a head is a function of hidden states. Both are plain
modules that do not depend on models, names, files, devices or each other.
"""

from __future__ import annotations

from ._dtypes import compute_dtype, upcast, widest
from .adapter import Adapter, BaseLayer
from .contained import Contained, Ejectable, SharedKey, SharedModules
from .head import Head
from .init_data import InputPlan, InputStatistics, LayerData, OriginalWeight, WeightPlan
from .places import (
    AttentionAdapter,
    FusibleAdapter,
    InvertibleAdapter,
    Joins,
    LanguageFreeAdapter,
    PositionAdapter,
    Prefix,
    PromptAdapter,
)
from .shortcuts import can_batch
from .weights import CopyAdapter, FactoredAdapter, WeightAdapter, replaced

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
