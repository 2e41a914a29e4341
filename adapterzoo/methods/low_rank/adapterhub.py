"""AdapterHub's spelling of methods with low-rank factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from adapterzoo.anatomy import Anatomy
from adapterzoo.configs import AdapterConfig
from adapterzoo.spelling import (
    AdapterHubFile,
    AdapterHubSpelling,
    Container,
    Fields,
    Tensors,
    same,
)

from . import _gate, _layer_flags
from ._low_rank_config import LowRankConfig

FIELDS = _layer_flags.FLAGS | same(
    "r", "alpha", "dropout", "init_weights", "init_weights_seed", "dtype"
)
"""The fields of AdapterHub's LoRAConfig, without those that select another method."""


def read_fields(fields: Fields, file: AdapterHubFile) -> Fields:
    """Return the fields of a file in our terms."""
    # the initialization does not matter for loaded values
    if fields.get("init_weights") not in ("lora", "bert"):
        fields.pop("init_weights", None)
    # adapters before 1.1 scaled by 1, and it multiplies a gated update only by the gate
    if (file.is_before(1, 1, 0) or fields.get("use_gating")) and "r" in fields:
        fields["alpha"] = fields["r"]
    if fields.get("use_gating"):
        fields["convention"] = "adapterhub"
    return fields | {"leave_out": fields.get("leave_out") or ()}


def as_flags(config: AdapterConfig, anatomy: Anatomy) -> AdapterConfig | None:
    """Return the config with its places and its scaling in AdapterHub's fields."""
    config = cast("LowRankConfig", config)
    if config.use_rslora:
        config = config.replace(alpha=config.scaling_at("") * config.r, use_rslora=False)
    return _layer_flags.as_flags(config, anatomy)


def unsayable(config: AdapterConfig) -> str | None:
    """Return why AdapterHub's format cannot express the config."""
    values = config.to_dict()
    unknown = [m for m in values["attn_matrices"] if m not in _layer_flags.MATRICES.values()]
    if unknown:
        return f"adapters has no attn_matrices={unknown!r}"
    if values.get("use_gating") and values["convention"] == "paper":
        return _gate.UNSAYABLE
    if values.get("use_gating") and values["alpha"] != values["r"]:
        return (
            f"adapters does not scale a gated update, and this one is scaled by alpha / r = "
            f"{values['alpha']} / {values['r']}"
        )
    return None


def read_magnitudes(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    """Return a file's tensors with its `m.weight` `[d_out, 1]` as `m` `[d_out]`."""
    found = dict(tensors)
    m = found.pop("m.weight")
    # any other shape is found by the comparison with the model
    found["m"] = m.squeeze(1) if m.shape[1:] == (1,) else m.unsqueeze(0)  # [d_out]
    return found


def write_magnitudes(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    """Undo `read_magnitudes`."""
    found = dict(tensors)
    return found | {"m.weight": found.pop("m").unsqueeze(1)}  # [d_out, 1]


def spelling(
    config: type[AdapterConfig],
    fixed: Mapping[str, Any],
    *containers: Container,
    architecture: str = "lora",
    **more: Any,
) -> AdapterHubSpelling:
    """Return how AdapterHub spells a method of its LoRA layers.

    Args:
        config: of the method.
        fixed: the fields that identify it.
        containers: of its tensors.
        architecture: its name in AdapterHub.
        **more: other arguments of `AdapterHubSpelling`.
    """
    return AdapterHubSpelling(
        config=config,
        architecture=(architecture,),
        fixed={"composition_mode": "add", "vera_b": None, "vera_d": None, **fixed},
        containers=containers,
        **{
            "fields": FIELDS,
            "feed_forward": _layer_flags.FEED_FORWARD,
            "read_fields": read_fields,
            "place": _layer_flags.place,
            "unsayable": unsayable,
            "as_flags": as_flags,
            **more,
        },
    )
