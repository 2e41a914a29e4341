"""Prefix tuning in AdapterHub's files: a table for each location, and gates at each attention."""

from __future__ import annotations

from adapterzoo.configs import AdapterConfig
from adapterzoo.spelling import AdapterHubSpelling, Container, Tensors, same

_NAMES = {
    "wte.weight": "wte",
    "control_trans.0.weight": "down.weight",
    "control_trans.0.bias": "down.bias",
    "control_trans.2.weight": "up.weight",
    "control_trans.2.bias": "up.bias",
    "control_trans": "table",
}
# next to the gates, adapters saves another copy of all tables for each attention
_POOL = "prefix_tuning.pool"


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells prefix tuning."""
    return AdapterHubSpelling(
        config=config,
        architecture=("prefix_tuning",),
        fields=same(
            "encoder_prefix", "cross_prefix", "leave_out", "flat", "prefix_length",
            "bottleneck_size", "non_linearity", "dropout", "use_gating", "shared_gating",
            "init_weights_seed",
        ),
        implied={"convention": "adapterhub"},
        containers=(
            Container(
                "prefix_tunings",
                "model",
                below="prefix_tuning",
                duplicates=(_POOL,),
                read=_read,
                write=_write,
            ),
            Container("prefix_gates", "attention", below="prefix_tuning", read=_gate_in,
                      write=_gate_out),
        ),
    )  # fmt: skip


def _read(tensors: Tensors, config: AdapterConfig) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        location, _, parameter = name.partition(".")
        ours = _NAMES.get(parameter, parameter)
        if ours == "table" and not tensor.numel() % config["prefix_length"]:
            tensor = tensor.view(config["prefix_length"], -1)  # [P, 2 N H e]
        found[f"{location}.{ours}"] = tensor
    return found


def _write(tensors: Tensors, config: AdapterConfig) -> Tensors:
    theirs = {ours: name for name, ours in _NAMES.items()}
    found: Tensors = {}
    for name, tensor in tensors.items():
        location, _, parameter = name.partition(".")
        flat = tensor.flatten() if parameter == "table" else tensor
        found[f"{location}.{theirs[parameter]}"] = flat
    return found


def _gate_in(tensors: Tensors, config: AdapterConfig) -> Tensors:
    return {f"gate.{name}": tensor for name, tensor in tensors.items()}


def _gate_out(tensors: Tensors, config: AdapterConfig) -> Tensors:
    return {name.removeprefix("gate."): tensor for name, tensor in tensors.items()}
