"""The hash by which AdapterHub's index and `adapters` name a config."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from adapterzoo.configs import AdapterConfig

from .config import write_config

# fields that are left out at these values, since old hashes did not know them
_NEW_FIELDS: Mapping[str, object] = {
    "phm_layer": True,
    "phm_dim": 4,
    "factorized_phm_W": True,
    "shared_W_phm": False,
    "shared_phm_rule": True,
    "factorized_phm_rule": False,
    "phm_c_init": "normal",
    "phm_init_range": 0.0001,
    "learn_phm": True,
    "hypercomplex_nonlinearity": "glorot-uniform",
    "phm_rank": 1,
    "phm_bias": True,
    "init_weights": "bert",
    "scaling": 1.0,
}


def get_adapter_config_hash(
    config: Mapping[str, Any], length: int = 16, ignore_params: Collection[str] = ()
) -> str:
    """Return the hash that `adapters` gives a config.

    Different configs can have one hash: fields that are false are left out, and so are
    those of Compacter at their defaults.

    Args:
        config: a config, or the dict in a file of AdapterHub.
        length: number of hexadecimal digits.
        ignore_params: fields that do not count.

    Raises:
        CheckpointError: `adapters` has no such config.
    """
    values: Any = write_config(config) if isinstance(config, AdapterConfig) else dict(config)
    if values.get("architecture") == "union" and isinstance(config, AdapterConfig):
        members = enumerate(values["configs"])
        values = {f"{i}.{key}": value for i, member in members for key, value in member.items()}
    kept = _without_false({k: v for k, v in values.items() if k not in ignore_params})
    for name, default in _NEW_FIELDS.items():
        if kept.get(name) == default:
            del kept[name]
    text = json.dumps(kept, sort_keys=True)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:length]


def _without_false(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_false(inner) for key, inner in value.items() if inner}
