"""PEFT's functions that replace the values of an adapter in place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from adapterzoo.compat.peft.saving import adapted, write_folder
from adapterzoo.errors import ConfigError, names_call

__all__ = [
    "check_hotswap_configs_compatible",
    "hotswap_adapter",
    "hotswap_adapter_from_state_dict",
    "prepare_model_for_compiled_hotswap",
]


@names_call
def hotswap_adapter(
    model: Any, model_name_or_path: str | os.PathLike[str], adapter_name: str, **kwargs: Any
) -> None:
    """Write the values of an adapter's file into an adapter of the model.

    Args:
        model: with the adapter.
        model_name_or_path: the folder, or `user/repository`.
        adapter_name: of the adapter that takes them.
        **kwargs: as `load_adapter` takes them.

    Raises:
        ConfigError: method, layers or options differ; nothing has changed.
        StateError: the model has no adapters.
        UnknownNameError: there is no such adapter.
    """
    own = adapted(model)
    own.load_adapter(model_name_or_path, adapter_name=adapter_name, hotswap=True, **kwargs)


@names_call
def check_hotswap_configs_compatible(config0: Any, config1: Any) -> None:
    """Check that an adapter can take the values of another; layers and ranks are checked later.

    Args:
        config0: of PEFT, of the adapter that takes them.
        config1: of PEFT, of the adapter that has them.

    Raises:
        ConfigError: the methods differ.
    """
    kinds = [getattr(c.peft_type, "value", c.peft_type) for c in (config0, config1)]
    if kinds[0] != kinds[1]:
        raise ConfigError(f"{kinds[1]} does not fit {kinds[0]}. Load it under another name.")


@names_call
def hotswap_adapter_from_state_dict(
    model: Any,
    state_dict: Mapping[str, Tensor],
    adapter_name: str,
    config: Any,
    parameter_prefix: str = "lora_",
) -> None:
    """Write the values of an adapter into an adapter of the model.

    Args:
        model: with the adapter.
        state_dict: tensors by PEFT's keys, with the name of the adapter.
        adapter_name: of the adapter that takes them.
        config: of PEFT, of the values.
        parameter_prefix: has no effect: nothing is needed, as the method names its tensors.

    Raises:
        CheckpointError: they are not those of an adapter with this config.
        ConfigError: method, layers or options differ; nothing has changed.
        StateError: the model has no adapters.
        UnknownNameError: there is no such adapter.
    """
    own = adapted(model)
    ends = f".{adapter_name}"
    parts = {key: key.rpartition(".") for key in state_dict}
    keys = {key: above.removesuffix(ends) + dot + last for key, (above, dot, last) in parts.items()}
    with tempfile.TemporaryDirectory() as made:
        write_folder(Path(made), config, {keys[key]: t for key, t in state_dict.items()})
        own.load_adapter(made, adapter_name=adapter_name, hotswap=True)


@names_call
def prepare_model_for_compiled_hotswap(
    model: Any,
    *,
    target_rank: int | None = None,
    config: Any = None,
    check_compiled: Literal["error", "warn", "ignore"] = "ignore",
) -> None:
    """Give all adapters one rank, so that later ones of any lower rank fit without compiling.

    Args:
        model: with adapters, before it is compiled.
        target_rank: the largest rank of all adapters; None: that of the adapters of the model.
        config: of PEFT, or several by name; has no effect: nothing is needed, as the model has its
            configs.
        check_compiled: what to do if the model is already compiled, and so would compile again:
            "error": refuse; "warn" or "ignore": give its adapters the rank, with or without a
            warning.

    Raises:
        ConfigError: the rank of an adapter is larger.
        StateError: an adapter is in use, or the model is compiled or has no adapters.
    """
    own = adapted(model)
    if target_rank is None:
        ranks = [c.to_dict().get("r", 1) for c in own.adapters_config.values()]
        target_rank = max(ranks, default=1)
    is_compiled = own is not model or own._compiled_call_impl is not None
    own.enable_peft_hotswap(target_rank, check_compiled if is_compiled else "ignore")
