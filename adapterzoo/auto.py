"""`AutoAdapterModel`: any model type with an `AutoModel` class, with named adapters and heads."""

from __future__ import annotations

import os
from typing import Any, cast

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _get_model_class

from .errors import ConfigError
from .model.heads.model import AdapterModel
from .model.hf import adapter_folders
from .model.hf.factory import class_of
from .model.hf.static_checkpoints import HUB_ARGUMENTS

# its name in `adapters`
ModelWithFlexibleHeadsAdaptersMixin = AdapterModel

__all__ = ["AdapterModel", "AutoAdapterModel", "adapter_class", "class_named"]


class AutoAdapterModel:
    """Makes a model with adapters and heads for a checkpoint or a config.

    ```python
    model = AutoAdapterModel.from_pretrained("bert-base-uncased")  # a BertAdapterModel
    ```

    Its class is a subclass of the family's own `PreTrainedModel`, with the base model under the
    family's `base_model_prefix`, so it can be used like any transformers model.
    """

    _has_named_heads = True

    @classmethod
    @adapter_folders.or_adapter
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        """Load a checkpoint: a base model, one with a static head, or one saved from here.

        The folder of an adapter, in any format, gives its base model with the adapter active.

        A static head (say of `BertForSequenceClassification`) becomes the named head "default",
        unless the checkpoint has named heads of its own.

        Args:
            pretrained_model_name_or_path: a folder, or a name on the Hub.
            *args: as `PreTrainedModel.from_pretrained` takes them.
            **kwargs: the same: `dtype`, `device_map`, `quantization_config`, `revision`, …

        Raises:
            ConfigError: transformers has no base model for this type.
        """
        config = kwargs.pop("config", None)
        hub = {k: kwargs[k] for k in HUB_ARGUMENTS if k in kwargs}
        if not isinstance(config, PreTrainedConfig):
            name = pretrained_model_name_or_path if config is None else config
            # arguments that the config does not use are for the model
            model_own = {k: kwargs.pop(k) for k in _MODEL_ARGUMENTS if k in kwargs}
            config, rest = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **kwargs)
            kwargs = {**rest, **hub, **model_own}
        return cast("Any", adapter_class(config)).from_pretrained(
            pretrained_model_name_or_path, *args, config=config, **kwargs
        )

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> AdapterModel:
        """Make a model with fresh weights.

        Args:
            config: of any model type that `AutoModel` knows.
            **kwargs: as `AutoModel.from_config` takes them: `dtype`, `attn_implementation`.

        Raises:
            ConfigError: transformers has no base model for this type.
        """
        return cast(
            "AdapterModel", cast("Any", adapter_class(config))._from_config(config, **kwargs)
        )


# arguments that a config would keep, so that the model would not get them
_MODEL_ARGUMENTS = (
    "dtype", "torch_dtype", "quantization_config", "attn_implementation", "output_loading_info",
)  # fmt: skip


def adapter_class(config: PreTrainedConfig) -> type[AdapterModel]:
    """Return the class for a config, such as `BertAdapterModel` for a `BertConfig`; cached.

    Raises:
        ConfigError: transformers has no base model for this type.
    """
    if type(config) not in modeling_auto.MODEL_MAPPING:
        raise ConfigError(f"AutoModel knows no {type(config).__name__}. Write one that it knows.")
    backbone = _get_model_class(config, modeling_auto.MODEL_MAPPING)
    return class_of(AdapterModel, backbone, type(config))


def class_named(name: str) -> type[AdapterModel]:
    """Return the class of a name such as `BertAdapterModel`.

    Raises:
        AttributeError: transformers has no such base model.
    """
    family = name.removesuffix("AdapterModel")
    found = (getattr(transformers, f"{family}{end}", None) for end in ("Model", "Encoder"))
    backbone: Any = next((cls for cls in found if cls is not None), None)
    config_class: Any = getattr(backbone, "config_class", None)
    if backbone is None or config_class not in modeling_auto.MODEL_MAPPING:
        raise AttributeError(f"transformers has no base model for {name!r}")
    return class_of(AdapterModel, backbone, config_class)
