"""Shared parameters of heads and adapters, as transformers needs them to save and load a model."""

from __future__ import annotations

import re
from typing import Any, cast

from adapterzoo.model.state import AdaptedModel

LOCATION = "embeddings"
"""Where an adapter has a table of tokens of its own."""


def tables_of(model: AdaptedModel, name: str) -> tuple[str, ...]:
    """Return the paths of the embeddings for which an adapter has a table; they share one."""
    record = model._adapter_state.records.get(name)
    places = {} if record is None else record.places
    return tuple(path for path, ps in places.items() if ps and ps[0].location == LOCATION)


def ties(model: AdaptedModel) -> dict[str, str]:
    """Map state-dict keys of shared parameters to the keys of those that they share."""
    whole = model._backbone is cast("Any", model)
    start = "" if whole else f"{model.base_model_prefix}."
    found = {}
    for name in model._adapter_state.records:
        first, *rest = tables_of(model, name) or ("",)
        end = f"adapters.{name}.table.weight"
        found.update({f"{start}{p}.{end}": f"{start}{first}.{end}" for p in rest})
    return {**found, **model._head_strategy.ties()}


def list_ties(model: AdaptedModel, name: str | None = None) -> None:
    """Tell transformers which parameters are shared.

    Args:
        model: with adapters.
        name: of an adapter that was added or removed; None: something else has changed.
    """
    own = cast("Any", model)
    # absent until transformers has finished the constructor
    listed = vars(own).get("all_tied_weights_keys")
    if name is not None:
        gone = any(
            f".adapters.{name}." in f"{key} {other}" for key, other in (listed or {}).items()
        )
        # most adapters have no table, and the fiftieth must cost no more than the first
        if not gone and not tables_of(model, name):
            return
    tied = ties(model)
    vars(own).pop("_tied_weights_keys", None)
    if tied:
        # transformers reads these as patterns
        patterns = {re.escape(k): re.escape(v) for k, v in tied.items()}
        own._tied_weights_keys = {**(type(own)._tied_weights_keys or {}), **patterns}
    if listed is not None:
        for key in [k for k in listed if k.startswith("heads.") or ".adapters." in k]:
            del listed[key]
        listed.update(tied)
