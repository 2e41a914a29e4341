"""`adapters.training`: the command-line arguments of the scripts of `adapters`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .composition import Stack
from .config import AdapterConfig
from .errors import ConfigError, names_call

__all__ = ["AdapterArguments", "setup_adapter_training"]


@dataclass
class AdapterArguments:
    """The arguments of a script that trains an adapter, for `HfArgumentParser`."""

    train_adapter: bool = field(
        default=False, metadata={"help": "Train an adapter instead of the whole model."}
    )
    load_adapter: str | None = field(
        default="", metadata={"help": "The adapter to start from: a folder, or a name on the Hub."}
    )
    adapter_config: str | None = field(
        default="seq_bn",
        metadata={"help": "The config: a string such as lora[r=8], or the path of a JSON file."},
    )
    load_lang_adapter: str | None = field(
        default=None,
        metadata={"help": "A language adapter to put below: a folder, or a name on the Hub."},
    )
    lang_adapter_config: str | None = field(
        default=None, metadata={"help": "Its config, as for --adapter_config."}
    )


@names_call
def setup_adapter_training(
    model: Any,
    adapter_args: AdapterArguments,
    adapter_name: str,
    adapter_config_kwargs: Mapping[str, Any] | None = None,
    adapter_load_kwargs: Mapping[str, Any] | None = None,
) -> tuple[str | None, str | None]:
    """Add or load the adapter that a script's arguments ask for, and train only this one.

    An adapter that the model already has is trained further. A language adapter is loaded below it
    and frozen.

    Args:
        model: a model with adapters.
        adapter_args: the script's arguments.
        adapter_name: name of the adapter to train.
        adapter_config_kwargs: fields to change in the configs.
        adapter_load_kwargs: more arguments of `load_adapter`.

    Returns:
        The names of the adapter and of the language adapter; None for an adapter that is absent.

    Raises:
        ConfigError: an adapter is given, but `train_adapter` is False.
    """
    changes, options = adapter_config_kwargs or {}, adapter_load_kwargs or {}
    if not adapter_args.train_adapter:
        if adapter_args.load_adapter or adapter_args.load_lang_adapter:
            raise ConfigError(
                "an adapter would be loaded, but train_adapter is False. Write --train_adapter."
            )
        return None, None
    config = AdapterConfig.load(adapter_args.adapter_config, **changes)
    if adapter_args.load_adapter:
        model.load_adapter(
            adapter_args.load_adapter, config=config, load_as=adapter_name, **options
        )
    elif adapter_name not in model.adapters_config:
        model.add_adapter(adapter_name, config=config)
    language = None
    if adapter_args.load_lang_adapter:
        asked = adapter_args.lang_adapter_config
        lang_config = None if asked is None else AdapterConfig.load(asked, **changes)
        language = model.load_adapter(adapter_args.load_lang_adapter, config=lang_config, **options)
    model.train_adapter(adapter_name)
    if language is not None:
        model.set_active_adapters(Stack(language, adapter_name))
    return adapter_name, language
