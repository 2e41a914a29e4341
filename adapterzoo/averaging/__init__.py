"""The arithmetic of several adapters that become one: on tensors, knowing nothing of methods.

An operation is what is left out of each tensor (`pruning`) and how the rest is joined (`joining`);
a strategy says what the tensors are: parameters, low-rank factors, or whole changes of a weight,
which `splitting` makes into factors again.
"""

from __future__ import annotations

from .joining import elected, weighted_sum
from .pruning import largest, random
from .splitting import signed_roots, split
from .strategies import STRATEGIES, Combination, Strategy, combination
from .weights import weighted

__all__ = [
    "STRATEGIES",
    "Combination",
    "Strategy",
    "combination",
    "elected",
    "largest",
    "random",
    "signed_roots",
    "split",
    "weighted",
    "weighted_sum",
]
