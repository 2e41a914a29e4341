"""The plug-in interface of a model: checked when it is given, saved with the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from adapterzoo.anatomy import find
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import ConfigError
from adapterzoo.interface import FILE, AdapterModelInterface
from adapterzoo.model.adapterhub.config import AdaptersConfig
from adapterzoo.model.state import is_base

Interface: TypeAlias = "AdapterModelInterface | str | os.PathLike[str] | None"


def checked(model: Any, interface: Interface) -> AdapterModelInterface | None:
    """Return an interface that fits a model.

    Args:
        model: of transformers, without adapters.
        interface: or a folder that holds one; None for none.

    Raises:
        ConfigError: the model does not have the layers, or uses them for something else.
    """
    if interface is None:
        return None
    if not isinstance(interface, AdapterModelInterface):
        interface = AdapterModelInterface.load(interface)
    if interface.base_model is not None and not hasattr(model, interface.base_model):
        raise ConfigError(
            f"AdapterModelInterface(base_model={interface.base_model!r}): "
            f"{type(model).__name__} has no such part. Leave base_model out, or write its name."
        )
    named = model if interface.base_model is None else getattr(model, interface.base_model)
    base = named if is_base(named) else named.base_model
    interface.check_names(base)
    interface.check_roles(find(base))
    return interface


def enter(model: Any, interface: AdapterModelInterface | None) -> None:
    """Let anatomy read the names of an interface.

    Args:
        model: with the methods of adapters.
        interface: that fits it; None: nothing is done.
    """
    if interface is None:
        return
    if interface.base_model is not None:
        model.base_model_prefix = interface.base_model
    state = model._adapter_state
    state.interface, state.is_base, state.anatomy = interface, None, None


def beside(path: object) -> Interface:
    """Return the interface in the folder of a saved model, None without one."""
    if not isinstance(path, (str, os.PathLike)):
        return None
    return path if (Path(path) / FILE).is_file() else None


def add_all(model: Any, configs: Mapping[str, AdapterConfig]) -> None:
    """Add adapters and fusions as another model has them, with fresh parameters.

    Args:
        model: with adapters.
        configs: `adapters_config` of that model, or names to configs.
    """
    for name, config in configs.items():
        model.add_adapter(name, config)
    if isinstance(configs, AdaptersConfig):
        for name in configs.fusions:
            fused, names = configs.get_fusion(name)
            model.add_adapter_fusion(names, fused, name)
