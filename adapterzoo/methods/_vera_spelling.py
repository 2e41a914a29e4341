"""VeRA in the peers' files: A and B once for all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError, argument
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

_HALF = (torch.bfloat16, torch.float16)


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
            "save_projection": PeftField(True),
        },
        inert=frozenset(("init_weights",)),
        read_layers=_read_layers,
        read_model=_read_model,
        unsayable=_unsayable,
        write_layers=_write_layers,
        write_model=_write_model,
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
    """Return A and B; in files with save_projection=False they are drawn again.

    Raises:
        CheckpointError: one is missing.
    """
    said = {"save_projection": fields["save_projection"]}
    if len(tensors) == 2 or not layers:
        return said, tensors
    if tensors or fields["save_projection"]:
        raise CheckpointError(
            f"the file lacks vera_A or vera_B, and adapter_config.json says save_projection="
            f"{fields['save_projection']}. Copy the file again from where it was saved; or, if it "
            f"was saved without both, write 'save_projection': false there, to draw them again "
            f"from projection_prng_key={fields['projection_prng_key']}."
        )
    own, weight = layers[0].tensors["lambda_d"].dtype, layers[0].weight()
    sites = [layer.site for layer in layers]
    a, b = _projections(fields["projection_prng_key"], fields["r"], sites)
    # as in PEFT, whose projections are in the dtype of the layers before that of the adapter
    dtype = own if weight is None else weight.dtype
    return said, {"lora_A": a.to(dtype).to(own), "lora_B": b.to(dtype).to(own)}


def _projections(key: int, r: int, sites: Sequence[Site]) -> tuple[Tensor, Tensor]:
    """Draw A `[r, widest d_in]`, then B `[widest d_out, r]`, as PEFT does."""
    source = torch.Generator().manual_seed(key)
    widest = max(site.d_in for site in sites), max(site.d_out for site in sites)
    # explicit: a caller's default device or dtype must not change the numbers
    where: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    a, b = torch.empty(r, widest[0], **where), torch.empty(widest[1], r, **where)
    for drawn in (a, b):
        torch.nn.init.kaiming_uniform_(drawn, generator=source)
    return a, b


def _write_model(
    config: AdapterConfig, tensors: Tensors, anatomy: Anatomy
) -> tuple[Fields, Tensors]:
    """Return A and B, or nothing where PEFT is to draw them again.

    Raises:
        CheckpointError: PEFT would draw others.
    """
    if config["save_projection"]:
        return {"save_projection": True}, tensors
    sites = [placement.site for placement in config.placements(anatomy)]
    again = _projections(_key(config), config["r"], sites)
    # whatever the dtype of the layers, to which both libraries round
    drawn = (tuple(t.to(dtype) for t in again) for dtype in (torch.float32, *_HALF))
    pair = tensors["lora_A"].cpu(), tensors["lora_B"].cpu()
    if not any(
        all(torch.equal(t.to(own.dtype), own) for t, own in zip(each, pair, strict=True))
        for each in drawn
    ):
        raise CheckpointError(
            f"VeraConfig(save_projection=False): A and B are not those that PEFT would draw from "
            f"projection_prng_key={_key(config)} for these layers. Write "
            f"{argument('format', 'native')}, or give the adapter save_projection=True."
        )
    return {"save_projection": False}, {}


def _key(config: AdapterConfig) -> int:
    seed = config["init_weights_seed"]
    return cast("int", config["projection_prng_key"] if seed is None else seed)


def _unsayable(placement: Placement) -> str | None:
    if placement.config.to_dict()["convention"] != "paper":
        return "VeraConfig(convention='adapterhub'), but PEFT's VeRA is the paper's"
    if placement.site.parameter is not None:
        return f"an adapter at the parameter {placement.site.parameter!r}"
    return None


def _write_layers(layers: Sequence[PeftOutput]) -> list[Fields]:
    configs = [layer.parts[0].placement.config for layer in layers]
    return [
        {
            "r": config["r"],
            "vera_dropout": config["dropout"],
            "d_initial": config["vera_d"],
            "projection_prng_key": _key(config),
            "init_weights": True,
            "bias": "none",
        }
        for config in configs
    ]
