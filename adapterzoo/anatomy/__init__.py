"""Anatomy: the sites for adapters in a model. Pure discovery, no list of models.

`find(model)` gives every linear layer of every transformer block a role from a small closed set,
and finds the *stream sites* that a bottleneck needs: the module whose output is added to
the residual stream, the module that reads the stream, and the norm after the addition.
"""

from __future__ import annotations

from .find import find, output_site, tied_to
from .inputs import NAME as ENTRY
from .inputs import input_embeddings_of, token_site, usual_joins, why_no_token_site
from .sites import (
    ROLES,
    Anatomy,
    Block,
    Kind,
    Mixture,
    OutputSlice,
    Role,
    Site,
    SubLayer,
    SubLayerKind,
    part_names,
)
from .tree import HEAD, WRAPPED, in_whole, shown, unwrapped, without_wrappers

__all__ = [
    "ENTRY",
    "HEAD",
    "ROLES",
    "WRAPPED",
    "Anatomy",
    "Block",
    "Kind",
    "Mixture",
    "OutputSlice",
    "Role",
    "Site",
    "SubLayer",
    "SubLayerKind",
    "find",
    "in_whole",
    "input_embeddings_of",
    "output_site",
    "part_names",
    "shown",
    "tied_to",
    "token_site",
    "unwrapped",
    "usual_joins",
    "why_no_token_site",
    "without_wrappers",
]
