"""`init` and `load_model`: adapters for models that keep the head of their class."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedModel

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import ConfigError, StateError, naming
from adapterzoo.inject import set_class
from adapterzoo.model.mixin import AdapterModelMixin
from adapterzoo.model.sharding import peft_layer

from . import adapter_folders, guards, plugin
from .config_entry import format_of
from .factory import INTERFACE, own_config, with_adapters
from .plugin import Interface

M = TypeVar("M", bound=nn.Module)


def init(
    model: M,
    adapters_config: Mapping[str, AdapterConfig] | None = None,
    interface: Interface = None,
) -> M:
    """Give a model that exists the methods of `AdapterModelMixin`; its head stays as it is.

    Args:
        model: any `PreTrainedModel`; changed in place. It gets a copy of its config.
        adapters_config: adapters to add with fresh parameters: `adapters_config` of another
            model, or names to configs.
        interface: names of its layers, where they are not found; or a folder that holds one.

    Returns:
        The same object.

    Raises:
        ConfigError: the interface does not fit the model.
        StateError: it is not a `PreTrainedModel`, has layers of PEFT, is a part of a model that has
            adapters, or was loaded without the adapters that it was saved with.
    """
    with naming(f"init({type(model).__name__})"):
        if isinstance(model, AdapterModelMixin):
            _refuse_again(model, adapters_config, interface)
            return model
        _refuse_init(model)
        given = plugin.checked(model, interface)
    name = type(model).__name__
    set_class(model, with_adapters(type(model)))
    memo: dict[int, Any] = {}
    for module in model.modules():
        for key, value in list(vars(module).items()):
            vars(module)[key] = own_config(value, memo)
    made: Any = model
    made._start_adapters()
    plugin.enter(made, given)
    with naming(f"init({name})"):
        plugin.add_all(made, adapters_config or {})
    return model


def _refuse_again(model: Any, adapters_config: object, interface: object) -> None:
    if adapters_config is not None or interface is not None:
        raise StateError(
            "the model has the methods of adapters already. Write init(model) alone, and "
            "add_adapter(…) for each adapter; or pass a plain model of transformers."
        )


def _refuse_init(model: Any) -> None:
    if isinstance(model, nn.Module) and (wrapped := peft_layer(model)) is not None:
        raise StateError(
            f"PEFT has wrapped its layer {wrapped!r}. Write init(…) of the plain model and load "
            f"PEFT's checkpoint there, load_adapter('folder'); or call unload() of the PeftModel "
            f"first."
        )
    if "base_model_prefix" not in dir(model):
        raise StateError(
            "adapters are named for a transformers PreTrainedModel. Write "
            "init(AutoModel.from_pretrained(…))."
        )
    if guards.guard_of(model) is not None:
        raise StateError(
            "it is a part of a model that has adapters. Call the methods of that model, or delete "
            "its adapters first."
        )
    if format_of(vars(model.config).get("adapters")) is not None:
        raise StateError(
            f"the model was saved with adapters, which plain transformers has not loaded. Write "
            f"load_model(path, {type(model).__name__})."
        )


def load_model(
    path: str | os.PathLike[str],
    model_class: type[M],
    interface: Interface = None,
    **kwargs: Any,
) -> M:
    """Load a model that was saved with its adapters, or an adapter with its base model.

    Args:
        path: what `save_pretrained` was given; or the folder of an adapter, which becomes active.
        model_class: the transformers class it was saved from, `type(model)`, or `AutoAdapterModel`.
        interface: as in `init`; None: the one that it was saved with.
        **kwargs: as `from_pretrained` takes them.

    Returns:
        A model of that class, as `init` makes it, with the same adapters active.

    Raises:
        ConfigError: it is not a class of models; `AutoAdapterModel` takes no interface.
    """
    if getattr(model_class, "chooses_class", False) and interface is None:
        return cast("M", cast("Any", model_class).from_pretrained(path, **kwargs))
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ConfigError(
            f"load_model({str(path)!r}, {model_class!r}): that is not a class of models. Write the "
            f"one that config.json has under 'architectures', such as BertForMaskedLM."
        )
    if interface is None and (adapter := adapter_folders.find(path, kwargs)) is not None:
        load = functools.partial(load_model, model_class=model_class)
        return cast("M", adapter_folders.load(adapter, load, kwargs))
    given = plugin.beside(path) if interface is None else interface
    if given is not None:
        kwargs[INTERFACE] = given
    loaded = cast("Any", with_adapters(model_class)).from_pretrained(path, **kwargs)
    return cast("M", loaded)
