"""Bottlenecks in AdapterHub's files, including those of adapter-transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch

from adapterzoo.config import AdapterConfig, without_idle
from adapterzoo.errors import CheckpointError
from adapterzoo.methods._parts import UNSAYABLE
from adapterzoo.spelling import AdapterHubFile, AdapterHubSpelling, Container, Fields, Tensors, same

from .config import BnConfig
from .places import LOCATIONS, PLACES, site_convention_in

_OURS = ("dtype", "convention", "site_convention")
_FIELDS = same(
    *(
        f.name
        for f in dataclasses.fields(BnConfig)
        if "ours" not in f.metadata and f.name not in _OURS
    )
)
# without meaning since adapter-transformers 2.0
_FORGOTTEN = ("attention_type", "new_attention_norm")
_OLD_NAMES = {"LN_after": "ln_after", "LN_before": "ln_before", "MH_Adapter": "mh_adapter",
              "Output_Adapter": "output_adapter"}  # fmt: skip
_OLD_ACTIVATIONS = {"gelu": "gelu_new", "gelu_orig": "gelu"}
_INVERTIBLE = {"invertible_adapters", "invertible_lang_adapters"}
_NESTED = {"inv_adapter": "block_type", "inv_adapter_reduction_factor": "reduction_factor"}


def _read_fields(fields: Fields, file: AdapterHubFile) -> Fields:
    """Return the fields of a file in our terms."""
    fields = {_OLD_NAMES.get(k, k): v for k, v in fields.items() if k not in _FORGOTTEN}
    nested = fields.pop("invertible_adapter", None)
    if isinstance(nested, Mapping):
        fields |= {ours: nested.get(theirs) for ours, theirs in _NESTED.items()}
    # in old files, task adapters name invertible adapters that they do not have
    if not file.words & _INVERTIBLE and not str(file.version).startswith("adapters."):
        fields |= dict.fromkeys(_NESTED)
    if fields.get("is_parallel") and "stochastic_depth" in fields:
        # adapters ignores it there
        fields["stochastic_depth"] = 0.0
    fields = without_idle(BnConfig, fields)
    activation = fields.get("non_linearity")
    if file.version is None and isinstance(activation, str):
        fields["non_linearity"] = _OLD_ACTIVATIONS.get(activation, activation)
    if fields.get("use_gating"):
        fields["convention"] = "adapterhub"
    return fields


# --- tensors: AdapterHub saves the norm before a bottleneck under two names ---

_NORM, _DOWN = "adapter_norm_before.", "adapter_down.0."


def _read(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    found = {name: t for name, t in tensors.items() if not name.startswith(_NORM)}
    for name in tensors.keys() - found.keys():
        first = found.get(name.replace(_NORM, _DOWN))
        if first is None or not torch.equal(first, tensors[name]):
            raise CheckpointError(f"{name!r} differs from {_DOWN[:-1]!r}. Copy the file again.")
    return found


def _write(tensors: Tensors, config: AdapterConfig) -> Tensors:
    if not config.to_dict()["ln_before"]:
        return tensors
    norm = {k.replace(_DOWN, _NORM): t for k, t in tensors.items() if k.startswith(_DOWN)}
    return norm | tensors


_CONTAINER = Container(
    "adapters",
    "sublayer",
    locations=LOCATIONS,
    aliases=tuple(
        f"{part}_text_{kind}_adapters"
        for part in ("attention", "layer")
        for kind in ("task", "lang")
    ),
    read=_read,
    write=_write,
)


_COUPLING = Container(
    "invertible_adapters",
    "model",
    aliases=("invertible_lang_adapters",),
    in_encoder=True,
    held_by=lambda config: config["inv_adapter"] is not None,
    prefix="invertible.",
)
_SHARED = Container(
    "shared_parameters",
    "model",
    held_by=lambda config: cast("BnConfig", config).shares_matrices,
    prefix="phm.",
)

# --- where adapters 1.3 computes something other than it documents, from its sources ---


def _convention(model_type: str, config: AdapterConfig) -> AdapterConfig:
    """Return the config with the place that its bottlenecks have in such a model."""
    values = config.to_dict()
    row = PLACES.get(model_type)
    changes: Fields = {"site_convention": site_convention_in(model_type, values)}
    if row is not None and row.entry == "none":
        # in such a model the fields have no effect
        changes |= dict.fromkeys(_NESTED)
    return config.replace(**changes)


def _unsayable(config: AdapterConfig) -> str | None:
    values = config.to_dict()
    is_masked = values["use_gating"] and values["convention"] == "paper"
    return UNSAYABLE if is_masked else None


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells bottlenecks."""
    return AdapterHubSpelling(
        config=config,
        architecture=(None, "", "bottleneck"),
        fields=_FIELDS,
        omitted=("dtype", "convention", "site_convention"),
        containers=(_CONTAINER, _COUPLING, _SHARED),
        read_fields=_read_fields,
        unsayable=_unsayable,
        # one after the attention and one after the feed-forward layer are a single adapter there
        joins=lambda one, other: all(one[n] != other[n] for n in ("mh_adapter", "output_adapter")),
        convention=_convention,
        fusion=lambda config: {"adds_input": bool(config.to_dict()["is_parallel"])},
    )
