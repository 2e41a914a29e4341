"""PEFT's functions that replace the values of an adapter in place."""

from __future__ import annotations

import os
from typing import Any, Literal

from adapterzoo.errors import names_call

__all__ = ["hotswap_adapter", "prepare_model_for_compiled_hotswap"]


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
        UnknownNameError: there is no such adapter.
    """
    model.load_adapter(model_name_or_path, adapter_name=adapter_name, hotswap=True, **kwargs)


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
        check_compiled: "error": refuse if the model has adapters; "warn" or "ignore": give
            these the rank too.

    Raises:
        ConfigError: the rank of an adapter is larger.
        StateError: an adapter is in use.
    """
    if target_rank is None:
        ranks = [c.to_dict().get("r", 1) for c in model.adapters_config.values()]
        target_rank = max(ranks, default=1)
    model.enable_peft_hotswap(target_rank, check_compiled)
