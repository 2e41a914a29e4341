"""`adapters.models`: the classes of models with named heads, made when they are asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from .auto import AdapterModel, AutoAdapterModel, adapter_class, class_named

__all__ = ["ADAPTER_MODEL_MAPPING", "AutoAdapterModel"]


class ModelMap(Mapping[type[PreTrainedConfig], type[AdapterModel]]):
    """The classes of configs to those of models; every config that `AutoModel` knows."""

    def __getitem__(self, config_class: type[PreTrainedConfig]) -> type[AdapterModel]:
        """Return the class of models for a class of configs."""
        if config_class not in self:
            raise KeyError(config_class)
        return adapter_class(config_class())

    def __contains__(self, config_class: object) -> bool:
        """Return whether transformers has a base model for it."""
        known: Any = modeling_auto.MODEL_MAPPING
        return isinstance(config_class, type) and config_class in known

    def __iter__(self) -> Iterator[type[PreTrainedConfig]]:
        """Iterate over the classes of configs."""
        return iter(modeling_auto.MODEL_MAPPING)

    def __len__(self) -> int:
        """Return their number."""
        return len(modeling_auto.MODEL_MAPPING)


ADAPTER_MODEL_MAPPING = ModelMap()


def __getattr__(name: str) -> Any:
    if name.endswith("AdapterModel"):
        return class_named(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# `from adapters.models.auto import AutoAdapterModel`
for _part in ("auto", "auto.adapter_model"):
    sys.modules[f"{__name__}.{_part}"] = sys.modules[__name__]
