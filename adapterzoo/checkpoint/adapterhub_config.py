"""AdapterHub's configs in the vocabulary of this library, and back.

Fields of methods that do not exist here are dropped at the values that turn them off; at others
the error names the method.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from adapterzoo.configs import AdapterConfig, ConfigUnion, architectures
from adapterzoo.errors import AdapterZooError, CheckpointError

# the release whose format is written
VERSION = "adapters.1.3.0"

_METHODS: Mapping[str, str] = {
    "prefix_tuning": "prefix tuning",
    "prompt_tuning": "prompt tuning",
    "reft": "ReFT",
    "mtl_lora": "multi-task LoRA",
}
# of releases before 2.0, without a meaning since
_FORGOTTEN = ("attention_type", "new_attention_norm")
_OLD_NAMES = {"LN_after": "ln_after", "LN_before": "ln_before", "MH_Adapter": "mh_adapter",
              "Output_Adapter": "output_adapter"}  # fmt: skip
_OLD_ACTIVATIONS = {"gelu": "gelu_new", "gelu_orig": "gelu"}
_RELEASE = re.compile(r"adapters\.(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?(.*)")

_LORA_FIELDS = (
    "selfattn_lora", "intermediate_lora", "output_lora", "attn_matrices", "leave_out", "r",
    "alpha", "dropout", "init_weights", "init_weights_seed", "dtype", "use_gating",
)  # fmt: skip
_LORA_OFF: Mapping[str, Any] = {
    "composition_mode": "add",
    "use_dora": False,
    "vera_b": None,
    "vera_d": None,
}
_LORA_ORDER = ("q", "k", "v")


def read_config(call: str, document: Mapping[str, Any], has_invertible: bool) -> AdapterConfig:
    """The config in an `adapter_config.json`.

    Args:
        call: what the user wrote, for messages.
        document: the whole file.
        has_invertible: whether the checkpoint has tensors of invertible adapters.

    Raises:
        CheckpointError: it asks for what does not exist here, or its values are not legal.
    """
    values = document.get("config")
    version = document.get("version")
    try:
        if isinstance(values, str):
            return AdapterConfig.load(values)
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"{call}: adapter_config.json has config={values!r}, which is no object of fields. "
                f"Copy the checkpoint again from where it was saved."
            )
        if values.get("architecture") != "union":
            return AdapterConfig.from_dict(_ours(call, values, version, has_invertible))
        members = values.get("configs")
        members = members if isinstance(members, list) else [members]
        found = [_ours(call, m, version, has_invertible) for m in members]
        return ConfigUnion(*(AdapterConfig.from_dict(member) for member in found))
    except CheckpointError:
        raise
    except AdapterZooError as error:
        raise CheckpointError(
            f"{call}: the config of the checkpoint is not legal; nothing has been loaded. {error}"
        ) from error


def write_config(call: str, config: AdapterConfig) -> dict[str, Any]:
    """The config as `adapters` writes it.

    Raises:
        CheckpointError: `adapters` has no such adapter.
    """
    if isinstance(config, ConfigUnion):
        members = [write_config(call, member) for member in config.configs]
        return {"architecture": "union", "configs": members}
    writer = _WRITERS.get(config.architecture)
    if writer is None:
        raise _unsayable(call, config, f"{type(config).__name__} is no method of adapters")
    return writer(call, config)


def _ours(call: str, values: object, version: object, has_invertible: bool) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"{call}: the union in adapter_config.json has the member {values!r}, which is no "
            f"object. Copy the checkpoint again from where it was saved."
        )
    fields = {str(key): value for key, value in values.items()}
    architecture = fields.pop("architecture", None)
    if architecture == "lora":
        return _lora(call, fields, version)
    if architecture not in (None, "", "bottleneck"):
        name = _METHODS.get(str(architecture), str(architecture))
        raise _missing(call, name, f"architecture={architecture!r}")
    return _bottleneck(call, fields, version, has_invertible)


def _lora(call: str, fields: dict[str, Any], version: object) -> dict[str, Any]:
    if fields.get("vera_b") is not None or fields.get("vera_d") is not None:
        raise _missing(call, "VeRA", f"vera_d={fields.get('vera_d')!r}")
    if fields.get("composition_mode", "add") != "add":
        raise _missing(call, "(IA)³", f"composition_mode={fields['composition_mode']!r}")
    dora = fields.get("use_dora", False)
    fields = {k: v for k, v in fields.items() if k not in _LORA_OFF}
    if not isinstance(dora, bool):
        raise CheckpointError(
            f"{call}: the config says use_dora={dora!r}, which is neither true nor false. Copy the "
            f"checkpoint again from where it was saved."
        )
    if dora and fields.pop("use_gating", False):
        raise _missing(call, "DoRA with a gate", "use_dora=True, use_gating=True")
    # how the values were drawn is of no concern to values that are there
    if fields.get("init_weights") not in ("lora", "bert"):
        fields.pop("init_weights", None)
    # adapters multiplies a gated update by the gate alone
    if (_ignored_alpha(version) or fields.get("use_gating")) and "r" in fields:
        fields["alpha"] = fields["r"]
    fields["leave_out"] = fields.get("leave_out") or ()
    if dora:
        return {"architecture": "dora", "convention": "adapterhub", **fields}
    return {"architecture": "lora", **fields}


def _ignored_alpha(version: object) -> bool:
    """Whether the release scaled LoRA by 1, whatever alpha was: `adapters` before 1.1."""
    match = _RELEASE.fullmatch(version) if isinstance(version, str) else None
    if match is None:
        return False
    number = tuple(int(part or 0) for part in match.groups()[:3])
    # 1.1.0.dev0 comes before 1.1.0
    return number < (1, 1, 0) or (number == (1, 1, 0) and bool(match[4]))


def _bottleneck(
    call: str, fields: dict[str, Any], version: object, has_invertible: bool
) -> dict[str, Any]:
    fields = {_OLD_NAMES.get(k, k): v for k, v in fields.items() if k not in _FORGOTTEN}
    nested = fields.pop("invertible_adapter", None)
    if nested:
        fields["inv_adapter"] = nested
    # in old files task adapters name invertible adapters that they do not have
    if fields.get("inv_adapter") is not None and has_invertible:
        raise _missing(call, "invertible adapters", f"inv_adapter={fields['inv_adapter']!r}")
    fields.pop("inv_adapter", None)
    fields.pop("inv_adapter_reduction_factor", None)
    if fields.get("phm_layer"):
        raise _missing(call, "Compacter", "phm_layer=True")
    defaults = {f.name: f.default for f in dataclasses.fields(architectures["bottleneck"])}
    without_effect = [k for k in fields if "phm" in k or k == "hypercomplex_nonlinearity"]
    if not fields.get("ln_after"):
        without_effect.append("adapter_residual_before_ln")
    if not fields.get("original_ln_before"):
        without_effect.append("residual_before_ln")
    for name in without_effect:
        if name in fields and name in defaults:
            fields[name] = defaults[name]
    if version is None:
        activation = fields.get("non_linearity")
        if isinstance(activation, str):
            fields["non_linearity"] = _OLD_ACTIVATIONS.get(activation, activation)
    fields["leave_out"] = fields.get("leave_out") or ()
    return {"architecture": "bottleneck", **fields}


def _write_bottleneck(call: str, config: AdapterConfig) -> dict[str, Any]:
    fields = config.to_dict()
    # the tensors have their dtype, and adapters has no such field here
    del fields["architecture"], fields["dtype"]
    return fields


def _write_lora(call: str, config: AdapterConfig) -> dict[str, Any]:
    values = config.to_dict()
    dora = config.architecture == "dora"
    if dora and values["convention"] != "adapterhub":
        raise _unsayable(
            call, config, "adapters computes another DoRA, without the scaling in the norm and "
            "with the bias scaled; only convention='adapterhub' is that one",
        )  # fmt: skip
    sayable = {*_LORA_FIELDS, "architecture", "convention"}
    plain: Any = type(config)()
    default = plain.to_dict()
    # the places are those of the flags, or the caller has put them into flags
    wrong = [k for k, v in values.items() if k not in sayable and v != default[k]]
    if wrong:
        shown = ", ".join(f"{name}={values[name]!r}" for name in sorted(wrong))
        raise _unsayable(call, config, f"adapters has no {shown}")
    if values.get("use_gating") and values["alpha"] != values["r"]:
        raise _unsayable(
            call, config, f"adapters does not scale a gated update, and this one is by "
            f"alpha / r = {values['alpha']} / {values['r']}",
        )  # fmt: skip
    unknown = [m for m in values["attn_matrices"] if m not in _LORA_ORDER]
    if unknown:
        raise _unsayable(call, config, f"adapters has no attn_matrices={unknown!r}")
    fields = {name: values.get(name, False) for name in _LORA_FIELDS}
    return {"architecture": "lora", **fields, **_LORA_OFF, "use_dora": dora}


_WRITERS: Mapping[str, Callable[[str, AdapterConfig], dict[str, Any]]] = {
    "bottleneck": _write_bottleneck,
    "lora": _write_lora,
    "dora": _write_lora,
}


def _missing(call: str, feature: str, said: str) -> CheckpointError:
    return CheckpointError(
        f"{call}: the checkpoint needs {feature} ({said}), which adapterzoo does not have; nothing "
        f"has been loaded. Bottlenecks, LoRA and DoRA of AdapterHub can be loaded."
    )


def _unsayable(call: str, config: AdapterConfig, why: str) -> CheckpointError:
    return CheckpointError(
        f"{call}: AdapterHub's format cannot say {config!r}: {why}. Nothing has been written. "
        f"Write format='native'."
    )
