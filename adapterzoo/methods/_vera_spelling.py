"""VeRA in the peers' files: A and B once for all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adapterzoo.anatomy import Anatomy
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.fields import FACTOR, MAX_WIDTH, Range, Share
from adapterzoo.peft_arguments import PeftArgument, PeftArguments
from adapterzoo.spelling import (
    AdapterHubSpelling,
    Fields,
    PeftField,
    PeftLayer,
    PeftOutput,
    PeftSpelling,
    Tensors,
)

from . import _projected_adapterhub
from ._peft_arguments import BIAS, STORED, TARGETS, ours

_ARGUMENTS = PeftArguments(
    class_name="VeraConfig",
    fields={
        **TARGETS,
        **STORED,
        **BIAS,
        "r": ours(256, "r"),
        "projection_prng_key": ours(0, "projection_prng_key"),
        "save_projection": PeftArgument(
            True, hint="A and B are always in the file. Write save_projection=True."
        ),
        "vera_dropout": ours(0.0, "dropout"),
        "d_initial": ours(0.1, "vera_d"),
        "init_weights": PeftArgument(
            True,
            "init_weights",
            {True: "vera"},
            "there is one kind of initial values. Write init_weights=True.",
        ),
    },
)


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells VeRA: dense matrices, times alpha / r."""
    return _projected_adapterhub.spelling(
        config, "VeRA", {"use_dora": False}, _projected_adapterhub.read, _projected_adapterhub.write
    )


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells VeRA: vectors, as in the paper."""
    return PeftSpelling(
        config=config,
        peft_type="VERA",
        arguments=_ARGUMENTS,
        tensors={"lambda_d": ("vera_lambda_d",), "lambda_b": ("vera_lambda_b",)},
        shared={"lora_A": "base_model.vera_A", "lora_B": "base_model.vera_B"},
        fields={
            "r": PeftField(256, Range(1, MAX_WIDTH)),
            "projection_prng_key": PeftField(0, Range(0, 2**63 - 1)),
            "vera_dropout": PeftField(0.0, Share()),
            "d_initial": PeftField(0.1, FACTOR),
        },
        inert=frozenset(("init_weights", "save_projection")),
        read_layers=_read_layers,
        read_model=_read_model,
        unsayable=_unsayable,
        write_layers=_write_layers,
    )


def _read_layers(layers: Sequence[PeftLayer]) -> list[Fields]:
    return [
        {
            "r": layer.tensors["lambda_d"].shape[0],
            "dropout": layer.fields["vera_dropout"],
            "vera_d": layer.fields["d_initial"],
            "projection_prng_key": layer.fields["projection_prng_key"],
        }
        for layer in layers
    ]


def _read_model(
    fields: Mapping[str, Any], tensors: Tensors, layers: Sequence[PeftLayer], _anatomy: Anatomy
) -> tuple[Fields, Tensors]:
    if tensors or not layers:
        return {}, tensors
    # files with save_projection=False: drawn again, A then B, as large as the largest layer
    source = torch.Generator().manual_seed(fields["projection_prng_key"])
    r, dtype = fields["r"], layers[0].tensors["lambda_d"].dtype
    widest = max(layer.site.d_in for layer in layers), max(layer.site.d_out for layer in layers)
    a, b = torch.empty(r, widest[0]), torch.empty(widest[1], r)
    for drawn in (a, b):
        torch.nn.init.kaiming_uniform_(drawn, generator=source)
    return {}, {"lora_A": a.to(dtype), "lora_B": b.to(dtype)}


def _unsayable(placement: Placement) -> str | None:
    if placement.config.to_dict()["convention"] != "paper":
        return "VeraConfig(convention='adapterhub'), but PEFT's VeRA is the paper's"
    if placement.site.parameter is not None:
        return f"an adapter at the parameter {placement.site.parameter!r}"
    return None


def _write_layers(layers: Sequence[PeftOutput]) -> list[Fields]:
    configs = [layer.parts[0].placement.config.to_dict() for layer in layers]
    return [
        {
            "r": config["r"],
            "vera_dropout": config["dropout"],
            "d_initial": config["vera_d"],
            "projection_prng_key": (
                config["projection_prng_key"]
                if config["init_weights_seed"] is None
                else config["init_weights_seed"]
            ),
            "save_projection": True,
            "init_weights": True,
            "bias": "none",
        }
        for config in configs
    ]
