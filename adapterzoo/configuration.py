"""`adapters.configuration`: the configs, and the names under which `load` finds them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import adapterzoo

from .config import AdapterConfig, ConfigUnion
from .methods.fusion import AdapterFusionConfig
from .model.adapterhub.config import AdaptersConfig as ModelAdaptersConfig

__all__ = [
    "ADAPTERFUSION_CONFIG_MAP",
    "ADAPTER_CONFIG_MAP",
    "DEFAULT_ADAPTERFUSION_CONFIG",
    "DEFAULT_ADAPTER_CONFIG",
    "ModelAdaptersConfig",
]


class ConfigMap(Mapping[str, Any]):
    """The names that `load` takes to their configs; `config_strings.register` adds one."""

    def __init__(self, base: Any) -> None:
        """Read the registry of a config class.

        Args:
            base: the class.
        """
        self._base = base

    def __getitem__(self, name: str) -> Any:
        """Return the config of a name."""
        return self._base.strings[name]()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        # a union has members, so it cannot be made from a name alone
        return (name for name, make in self._base.strings.items() if make is not ConfigUnion)

    def __len__(self) -> int:
        """Return the number of names."""
        return sum(1 for _ in self)


ADAPTER_CONFIG_MAP = ConfigMap(AdapterConfig)
ADAPTERFUSION_CONFIG_MAP = ConfigMap(AdapterFusionConfig)
DEFAULT_ADAPTER_CONFIG = AdapterConfig.default
DEFAULT_ADAPTERFUSION_CONFIG = "dynamic"


def __getattr__(name: str) -> Any:
    if name.endswith("Config") and name in adapterzoo.__all__:
        return getattr(adapterzoo, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# `from adapters.configuration.adapter_config import LoRAConfig`
for _part in ("adapter_config", "adapter_fusion_config", "model_adapters_config"):
    sys.modules[f"{__name__}.{_part}"] = sys.modules[__name__]
