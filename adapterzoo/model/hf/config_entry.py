"""Adapters in `save_pretrained` and `from_pretrained` of whole models.

The config has an entry `adapters`, from which the adapters are recreated; their values are among
the weights of the model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from adapterzoo import hosts
from adapterzoo.anatomy import find
from adapterzoo.composition import from_json, to_json
from adapterzoo.errors import CheckpointError, in_python, listing
from adapterzoo.formats.native import FORMAT
from adapterzoo.interface import AdapterModelInterface
from adapterzoo.model import adapters, fusion
from adapterzoo.model.activation import make_plan
from adapterzoo.model.heads import copies, tables
from adapterzoo.model.sharding import split_over
from adapterzoo.model.state import DEFAULT_EMBEDDINGS, AdaptedModel, heads_of, is_base
from adapterzoo.names import check_name


@contextlib.contextmanager
def entered(model: AdaptedModel, options: dict[str, Any]) -> Iterator[None]:
    """Let a model be saved with its adapters in its config, and with its own embeddings.

    Args:
        model: to save.
        options: of `save_pretrained`; those that do not fit are replaced or removed.
    """
    with tables.own_in_place(model) as replaced:
        if replaced:
            # of the embeddings that were active, as transformers' Trainer passes it
            options.pop("state_dict", None)
        if split_over(model) is not None:
            hosts.transformers_saves_ties_once(model, options)
        _enter(model)
        try:
            yield
        finally:
            vars(model.config).pop("adapters", None)


def _enter(model: AdaptedModel) -> None:
    """Write the config entry from which a saved model's adapters are recreated."""
    state, plan = model._adapter_state, model._active.default.plan
    heads, own = heads_of(model), plan.heads.setup
    vars(model.config).pop("adapters", None)
    inactive = [
        {
            "name": name,
            "shape": list(each.weight.shape),
            "padding_idx": each.padding_idx,
            "biases": {key: list(bias.shape) for key, bias in each.biases().items()},
        }
        for name, each in tables.inactive_of(model).items()
    ]
    if not (state.records or heads or state.interface or inactive):
        return
    records = state.records.items()
    model.config.adapters = {
        "format": FORMAT,
        # a list, since transformers sorts the keys of objects
        "adapters": [[name, record.config.to_dict()] for name, record in records],
        "meta": {name: dict(record.meta) for name, record in records if record.meta},
        "embeddings": {n: list(t) for n in state.records if (t := copies.tables_of(model, n))},
        "sharing": [[group, list(names)] for group, names in state.sharing.items()],
        "merged": list(state.merged),
        "fusions": [
            [name, list(record.adapters), record.config.to_dict()]
            for name, record in state.fusions.items()
        ],
        "active": to_json(plan.setup),
        "skip_layers": list(plan.skip_layers),
        "heads": list(plan.heads.names) if own is None else to_json(own),
        "static_heads": list(state.copies),
        "known_heads": list(heads),
        "interface": None if state.interface is None else state.interface.to_dict(),
    }
    if inactive:
        # a model is saved with its own in place
        active = state.coming_embeddings or DEFAULT_EMBEDDINGS
        model.config.adapters["loaded_embeddings"] = {"active": active, "tables": inactive}


def restore(model: AdaptedModel, quantized: bool = False) -> None:
    """Recreate the adapters in the config of a saved model; their values are loaded later.

    Args:
        model: that is being loaded.
        quantized: whether its layers have been quantized already.

    Raises:
        CheckpointError: they cannot be recreated.
    """
    config = model.config
    if getattr(config, "quantization_config", None) is not None and not quantized:
        # its library will replace layers, but only those of a plain class
        return
    document = vars(config).get("adapters")
    written = format_of(document)
    if written not in (None, FORMAT):
        raise CheckpointError(
            f"from_pretrained: the adapters in config.json have the format {written!r}. Write pip "
            f"install -U adapterzoo."
        )
    vars(config).pop("adapters", None)
    if written is None:
        return
    if (known := document.get("known_heads")) and not (
        model._has_named_heads or model._backbone is cast("nn.Module", model)
    ):
        raise CheckpointError(
            f"from_pretrained: the model was saved with the heads {listing(known)}, which a "
            f"{type(model).__name__} does not have. Write "
            f"{in_python('AutoAdapterModel.from_pretrained(…)', '--model with its base model')}."
        )
    try:
        _restore(model, document)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"from_pretrained: the adapters in config.json cannot be made: {error}. Save it again."
        ) from error


def _restore(model: AdaptedModel, document: Any) -> None:
    state = model._adapter_state
    if document.get("interface") and state.interface is None:
        enter_interface(model, AdapterModelInterface(**document["interface"]))
    for name, values in document["adapters"]:
        adapters.add(model, name, values, in_file=True)
    for name, paths in dict(document.get("embeddings", {})).items():
        state.find(name)
        tables.add_table(model, name, tuple(paths))
    for name, meta in dict(document.get("meta", {})).items():
        state.records[name] = dataclasses.replace(state.find(name), meta=dict(meta))
    for group, names in document.get("sharing", ()):
        tables.share(model, names, group)
    for name in document["merged"]:
        state.find(name)
    state.merged = tuple(document["merged"])
    for name, names, values in document.get("fusions", ()):
        fusion.add(model, names, values, name if name != ",".join(names) else None)
    for owner in document.get("static_heads", ()):
        copies.put(model, owner, copies.made(model))
    if (embeddings := document.get("loaded_embeddings")) is not None:
        own = tables.layer_of(model).weight
        like: dict[str, Any] = {"device": own.device, "dtype": own.dtype}
        for each in embeddings["tables"]:
            table = nn.Parameter(torch.empty(each["shape"], **like), False)
            made = tables.InactiveTable(table, each["padding_idx"])
            for key, shape in each["biases"].items():
                bias = torch.empty(shape, **like)
                made.keep(key, bias if key.endswith(tables.ADDED) else nn.Parameter(bias, False))
            tables.store_of(model)[check_name(each["name"])] = made
        state.coming_embeddings = embeddings["active"]
    setup, heads = from_json(document["active"]), document["heads"]
    if isinstance(heads, Mapping):
        heads = from_json(heads)
    plan = make_plan(model, setup, heads, tuple(document["skip_layers"]))
    model._active.default.plan = plan


def format_of(entry: object) -> str | None:
    """Return the format of a config's entry `adapters`; None for AdapterHub's entry."""
    written = entry.get("format") if isinstance(entry, Mapping) else None
    return written if isinstance(written, str) else None


# --- The plug-in interface: checked when it is given, saved with the model ---

Interface: TypeAlias = "AdapterModelInterface | str | os.PathLike[str] | None"


def checked_interface(model: Any, interface: Interface) -> AdapterModelInterface | None:
    """Return an interface that fits a model.

    Args:
        model: of transformers, without adapters.
        interface: or a folder that holds one; None for none.

    Raises:
        ConfigError: the model does not have the layers, or uses them for something else.
    """
    if interface is None:
        return None
    if not isinstance(interface, AdapterModelInterface):
        interface = AdapterModelInterface.load(interface)
    named = model if interface.base_model is None else getattr(model, interface.base_model)
    base = named if is_base(named) else named.base_model
    interface.check_names(base)
    interface.check_roles(find(base))
    return interface


def enter_interface(model: Any, interface: AdapterModelInterface | None) -> None:
    """Let anatomy read the names of an interface.

    Args:
        model: with the methods of adapters.
        interface: that fits it; None: nothing is done.
    """
    if interface is None:
        return
    if interface.base_model is not None:
        model.base_model_prefix = interface.base_model
    state = model._adapter_state
    state.interface, state.is_base, state.anatomy = interface, None, None
