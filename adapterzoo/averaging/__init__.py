"""Arithmetic for combining adapters into one: on tensors, independent of methods.

Operations prune each tensor (`pruning`) and join the tensors (`joining`). A strategy chooses the
tensors: parameters, low-rank factors, or changes of a weight, which `splitting` factorizes again.
"""

from __future__ import annotations

from .joining import elected, weighted_sum
from .pruning import largest, random
from .splitting import signed_roots, split
from .strategies import LINEAR_OF_PEFT, STRATEGIES, Combination, Strategy, combination
from .truncating import Truncated, truncated
from .weights import weighted

__all__ = [
    "LINEAR_OF_PEFT",
    "STRATEGIES",
    "Combination",
    "Strategy",
    "Truncated",
    "combination",
    "elected",
    "largest",
    "random",
    "signed_roots",
    "split",
    "truncated",
    "weighted",
    "weighted_sum",
]
