"""AdapterHub's files of methods with low-rank factors: one architecture, told apart by fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from adapterzoo.anatomy import Anatomy
from adapterzoo.config import AdapterConfig
from adapterzoo.methods import _parts, _targets
from adapterzoo.spelling import (
    AdapterHubFile,
    AdapterHubSpelling,
    Container,
    Fields,
    Tensors,
    same,
    spelled,
)

from .dora import DoRAConfig
from .factors import LowRankConfig
from .lora import LoRAConfig
from .mtl_lora import MTLLoRAConfig
from .vera import DvoRAConfig, VeraConfig

# the fields of AdapterHub's LoRAConfig, without those that select another method
_FIELDS = _targets.FLAGS | same(
    "r", "alpha", "dropout", "init_weights", "init_weights_seed", "dtype"
)
_VERA_NAMES = {"vera_D": "lambda_d", "vera_B": "lambda_b"}
_OF_LAYER = Callable[[Tensors, AdapterConfig], Tensors]


def _read_fields(fields: Fields, file: AdapterHubFile) -> Fields:
    """Return the fields of a file in our terms."""
    # the initialization does not matter for loaded values
    if fields.get("init_weights") not in ("lora", "bert"):
        fields.pop("init_weights", None)
    # adapters before 1.1 scaled by 1, and it multiplies a gated update only by the gate
    if (file.is_before(1, 1, 0) or fields.get("use_gating")) and "r" in fields:
        fields["alpha"] = fields["r"]
    if fields.get("use_gating"):
        fields["convention"] = "adapterhub"
    return fields


def _as_flags(config: AdapterConfig, anatomy: Anatomy) -> AdapterConfig | None:
    """Return the config with its places and its scaling in AdapterHub's fields."""
    config = cast("LowRankConfig", config)
    if config.use_rslora:
        config = config.replace(alpha=config.scaling_at("") * config.r, use_rslora=False)
    return _targets.as_flags(config, anatomy)


def _unsayable(config: AdapterConfig) -> str | None:
    """Return why AdapterHub's format cannot express the config."""
    values = config.to_dict()
    unknown = [m for m in values["attn_matrices"] if m not in _targets.THEIR_MATRICES.values()]
    if unknown:
        return f"adapters has no attn_matrices={unknown!r}"
    if values.get("use_gating") and values["convention"] == "paper":
        return _parts.UNSAYABLE
    if values.get("use_gating") and values["alpha"] != values["r"]:
        return (
            f"adapters does not scale a gated update, and this one is scaled by alpha / r = "
            f"{values['alpha']} / {values['r']}"
        )
    return None


def _unsayable_dora(config: AdapterConfig) -> str | None:
    if config["convention"] != "adapterhub":
        return (
            "adapters computes another DoRA, without the scaling in the norm and with a scaled "
            "bias: convention='adapterhub'"
        )
    return _unsayable(config)


def _read_magnitudes(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    """Return a file's tensors with its `m.weight` `[d_out, 1]` as `m` `[d_out]`."""
    found = dict(tensors)
    m = found.pop("m.weight")
    # any other shape is found by the comparison with the model
    found["m"] = m.squeeze(1) if m.shape[1:] == (1,) else m.unsqueeze(0)  # [d_out]
    return found


def _write_magnitudes(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    """Undo `_read_magnitudes`."""
    found = dict(tensors)
    return found | {"m.weight": found.pop("m").unsqueeze(1)}  # [d_out, 1]


def _read_vera(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    """Return a file's tensors of one layer under our names."""
    return {_VERA_NAMES.get(name, name): tensor for name, tensor in tensors.items()}


def _write_vera(tensors: Tensors, _config: AdapterConfig) -> Tensors:
    """Undo `_read_vera`."""
    theirs = {ours: name for name, ours in _VERA_NAMES.items()}
    return {theirs.get(name, name): tensor for name, tensor in tensors.items()}


def _of_lora(
    fixed: Mapping[str, Any], container: Container, **more: Any
) -> Callable[[type[AdapterConfig]], AdapterHubSpelling]:
    """Return the spelling of a method with A and B in each layer.

    Args:
        fixed: the fields that identify it.
        container: of its tensors.
        **more: other arguments of `AdapterHubSpelling`.
    """
    chosen: dict[str, Any] = {
        "architecture": ("lora",),
        "fields": _FIELDS,
        "feed_forward": _targets.FEED_FORWARD,
        "read_fields": _read_fields,
        "place": _targets.place,
        "unsayable": _unsayable,
        "as_flags": _as_flags,
        **more,
    }
    fields = {"composition_mode": "add", "vera_b": None, "vera_d": None, **fixed}
    return lambda config: AdapterHubSpelling(
        config=config, fixed=fields, containers=(container,), **chosen
    )


def _of_vera(
    name: str, fixed: Mapping[str, Any], read: _OF_LAYER, write: _OF_LAYER
) -> Callable[[type[AdapterConfig]], AdapterHubSpelling]:
    """Return the spelling of a method with A and B once for all layers.

    Args:
        name: of the method, for errors.
        fixed: the fields that identify it.
        read: a layer's tensors to ours.
        write: ours to a layer's.
    """
    return lambda config: AdapterHubSpelling(
        config=config,
        architecture=("lora",),
        fixed={"composition_mode": "add", "use_gating": False, **fixed},
        constants={"init_weights": "vera"},
        required=("vera_d", "vera_b"),
        implied={"convention": "adapterhub"},
        fields=_targets.FLAGS
        | same("r", "alpha", "dropout", "vera_d", "vera_b", "dtype", "init_weights_seed"),
        omitted=("projection_prng_key",),
        containers=(
            Container("loras", "layer", read=read, write=write),
            Container("shared_parameters", "model"),
        ),
        fused=f"adapters cannot run {name} in a fused layer",
        feed_forward=_targets.FEED_FORWARD,
        place=_targets.place,
        as_flags=_targets.as_flags,
    )


spelled(
    _of_lora(
        {"use_dora": False},
        Container("loras", "layer"),
        fields=_FIELDS | same("use_gating"),
        omitted=("convention",),
    )
)(LoRAConfig)
spelled(
    _of_lora(
        {"use_dora": True, "use_gating": False},
        Container("loras", "layer", read=_read_magnitudes, write=_write_magnitudes),
        implied={"convention": "adapterhub"},
        fused="adapters cannot run DoRA in a fused layer",
        unsayable=_unsayable_dora,
    )
)(DoRAConfig)
# its files cannot hold a dense matrix Λ
spelled(
    _of_lora(
        {"use_dora": False, "use_gating": False, "task_specific_matrix_type": "singular_values"},
        Container("loras", "layer"),
        architecture=("mtl_lora",),
        fields=_FIELDS | same("n_up_projection", "weights_sharpness"),
        fused="adapters cannot run MTL-LoRA in a fused layer",
    )
)(MTLLoRAConfig)
spelled(_of_vera("VeRA", {"use_dora": False}, _read_vera, _write_vera))(VeraConfig)
spelled(
    _of_vera(
        "DVoRA",
        {"use_dora": True},
        lambda tensors, config: _read_magnitudes(_read_vera(tensors, config), config),
        lambda tensors, config: _write_vera(_write_magnitudes(tensors, config), config),
    )
)(DvoRAConfig)
