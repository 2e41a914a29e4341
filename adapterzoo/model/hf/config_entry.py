"""Whole models with adapters, as `save_pretrained` and `from_pretrained` see them.

The config has an entry `adapters` from which the adapters are made anew; their values are in the
weights of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from adapterzoo.checkpoint.native import FORMAT
from adapterzoo.composition import from_json, to_json
from adapterzoo.errors import CheckpointError
from adapterzoo.interface import AdapterModelInterface
from adapterzoo.model import adapters, fusion
from adapterzoo.model.activation import make_plan
from adapterzoo.model.heads import tables
from adapterzoo.model.heads.ties import tables_of
from adapterzoo.model.state import AdaptedModel

from . import plugin


def enter(model: AdaptedModel) -> None:
    """Write to the config what a saved model needs to have the same adapters again."""
    state, plan = model._adapter_state, model._active.default.plan
    heads = model._head_strategy.names()
    vars(model.config).pop("adapters", None)
    if not state.records and not heads and state.interface is None:
        return
    records = state.records.items()
    model.config.adapters = {
        "format": FORMAT,
        # a list, since transformers sorts the keys of objects
        "adapters": [[name, record.config.to_dict()] for name, record in records],
        "meta": {name: dict(record.meta) for name, record in records if record.meta},
        "embeddings": {n: list(t) for n in state.records if (t := tables_of(model, n))},
        "merged": list(state.merged),
        "fusions": [
            [name, list(record.adapters), record.config.to_dict()]
            for name, record in state.fusions.items()
        ],
        "active": to_json(plan.setup),
        "skip_layers": list(plan.skip_layers),
        "heads": list(plan.heads),
        "static_heads": list(state.copies),
        "known_heads": list(heads),
        "interface": None if state.interface is None else state.interface.to_dict(),
    }


def restore(model: AdaptedModel, quantised: bool = False) -> None:
    """Make the adapters that the config of a saved model lists; their values come later.

    Args:
        model: that is being loaded.
        quantised: whether the layers to quantize are quantized by now.

    Raises:
        CheckpointError: they cannot be made.
    """
    config = model.config
    if getattr(config, "quantization_config", None) is not None and not quantised:
        # its library will replace layers, and only those of the plain class
        return
    document = vars(config).get("adapters")
    written = format_of(document)
    if written not in (None, FORMAT):
        raise CheckpointError(
            f"from_pretrained: the adapters in config.json are of the format {written!r}, this "
            f"release reads {FORMAT!r}. Write pip install -U adapterzoo, or take 'adapters' out of "
            f"config.json to load the model without them."
        )
    vars(config).pop("adapters", None)
    if written is None:
        return
    try:
        _restore(model, document)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"from_pretrained: the adapters in config.json cannot be made: {error}. Save the model "
            f"again, or take 'adapters' out of config.json to load it without them."
        ) from error


def _restore(model: AdaptedModel, document: Any) -> None:
    state = model._adapter_state
    if document.get("interface") and state.interface is None:
        plugin.enter(model, AdapterModelInterface(**document["interface"]))
    for name, values in document["adapters"]:
        adapters.add(model, name, values)
    for name, paths in dict(document.get("embeddings", {})).items():
        state.find(name)
        tables.add_table(model, name, tuple(paths))
    for name, meta in dict(document.get("meta", {})).items():
        state.records[name] = dataclasses.replace(state.find(name), meta=dict(meta))
    for name in document["merged"]:
        state.find(name)
    state.merged = tuple(document["merged"])
    for name, names, values in document.get("fusions", ()):
        fusion.add(model, names, values, name if name != ",".join(names) else None)
    model._head_strategy.restore(document.get("static_heads", ()))
    setup, heads = from_json(document["active"]), document["heads"]
    plan = make_plan(model, setup, heads, tuple(document["skip_layers"]))
    model._active.default.plan = plan


def format_of(entry: object) -> str | None:
    """Return the format of an entry `adapters` of a config; AdapterHub's entry has none."""
    written = entry.get("format") if isinstance(entry, Mapping) else None
    return written if isinstance(written, str) else None
