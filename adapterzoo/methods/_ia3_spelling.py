"""(IA)³ in AdapterHub's files."""

from __future__ import annotations

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


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """How AdapterHub spells (IA)³: as LoRA with one vector that scales the output."""
    return AdapterHubSpelling(
        config=config,
        architecture=("lora",),
        fixed={
            "composition_mode": "scale", "use_dora": False, "use_gating": False,
            "vera_b": None, "vera_d": None,
        },
        constants={"init_weights": "ia3", "init_weights_seed": None, "dropout": 0.0},
        implied={"convention": "adapterhub"},
        fields=_layer_flags.FLAGS | same("r", "alpha", "dtype"),
        containers=(Container("loras", "layer", read=_read, write=_write),),
        feed_forward=_layer_flags.FEED_FORWARD,
        read_fields=_read_fields,
        place=_layer_flags.place,
        as_flags=_layer_flags.as_flags,
    )  # fmt: skip


def _read_fields(fields: Fields, _file: AdapterHubFile) -> Fields:
    return fields | {"leave_out": fields.get("leave_out") or ()}


def _read(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    return {"ia3_l": tensors["lora_B"].squeeze(-1)}


def _write(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    return {"lora_B": tensors["ia3_l"].unsqueeze(-1)}
