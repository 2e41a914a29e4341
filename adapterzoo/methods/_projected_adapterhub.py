"""The common part of VeRA and DVoRA in AdapterHub's files: A and B once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adapterzoo.configs import AdapterConfig
from adapterzoo.spelling import (
    AdapterHubFile,
    AdapterHubSpelling,
    Container,
    Fields,
    Tensors,
    same,
)

from . import _layer_flags

_NAMES = {"vera_D": "lambda_d", "vera_B": "lambda_b"}
_OF_LAYER = Callable[[Tensors, AdapterConfig], Tensors]


def spelling(
    config: type[AdapterConfig],
    name: str,
    fixed: Mapping[str, Any],
    read: _OF_LAYER,
    write: _OF_LAYER,
) -> AdapterHubSpelling:
    """Return how AdapterHub spells a method with dense matrices, times alpha / r.

    Args:
        config: of the method.
        name: of the method, for errors.
        fixed: the fields that tell it from the others.
        read: a layer's tensors to ours.
        write: ours to a layer's.
    """
    return AdapterHubSpelling(
        config=config,
        architecture=("lora",),
        fixed={"composition_mode": "add", "use_gating": False, **fixed},
        constants={"init_weights": "vera"},
        required=("vera_d", "vera_b"),
        implied={"convention": "adapterhub"},
        fields=_layer_flags.FLAGS
        | same("r", "alpha", "dropout", "vera_d", "vera_b", "dtype", "init_weights_seed"),
        omitted=("projection_prng_key",),
        containers=(
            Container("loras", "layer", read=read, write=write),
            Container("shared_parameters", "model"),
        ),
        fused=f"adapters cannot run {name} in a fused layer",
        feed_forward=_layer_flags.FEED_FORWARD,
        read_fields=_read_fields,
        place=_layer_flags.place,
        as_flags=_layer_flags.as_flags,
    )


def _read_fields(fields: Fields, _file: AdapterHubFile) -> Fields:
    return fields | {"leave_out": fields.get("leave_out") or ()}


def read(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    """Return a file's tensors of one layer under our names."""
    return {_NAMES.get(name, name): tensor for name, tensor in tensors.items()}


def write(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    """Undo `read`."""
    theirs = {ours: name for name, ours in _NAMES.items()}
    return {theirs.get(name, name): tensor for name, tensor in tensors.items()}
