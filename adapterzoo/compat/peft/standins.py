"""PEFT's classes that code only compares with, such as those of layers with adapters.

Neither a model here nor its layers are wrapped, so these classes have no instances of
their own: `isinstance` asks what a model or a layer has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

from adapterzoo.contracts import Adapter, Contained
from adapterzoo.inject.adapted import Adapted, AdapterDict
from adapterzoo.inject.building import plain_modules
from adapterzoo.methods._copies import LayerCopy, TokenRows
from adapterzoo.spelling import peft_spellings

from .layers import is_tuned, parts_of


class ModelType(type):
    """The type of `PeftModel` and of classes that code compares with.

    Calling `PeftModel`, or a class of models by task, adds an adapter to a model. An object of a
    class of the real PEFT that has the same name counts as an instance, too.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the model with the adapter: `get_peft_model` with the same arguments."""
        return cast("Any", cls)._called(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether an object is an instance here or in PEFT."""
        if any(_is_of_peft(c, cls.__name__) for c in type(instance).__mro__):
            return True
        return super().__instancecheck__(instance) or cls.takes(instance)

    def takes(cls, instance: object) -> bool:
        """Return whether an object is an instance although its class is not below this one."""
        return False


def _is_of_peft(cls: type, name: str) -> bool:
    return cls.__name__ == name and cls.__module__.partition(".")[0] == "peft"


def made(name: str, takes: Callable[[Any, Any], bool], bases: tuple[type, ...] = ()) -> type[Any]:
    """Return a class to compare with.

    Args:
        name: PEFT's name.
        takes: a function that tells whether an object, its second argument, is an instance.
        bases: bases of the class.
    """
    meta: Any = type("_Asked", (ModelType,), {"takes": takes})
    made: type[Any] = meta(
        name, bases, {"__doc__": f"PEFT's `{name}`, to compare with.", "__module__": __name__}
    )
    return made


# --- layers ---

_DEFAULT = Contained.container


def _layer_class(name: str, *kinds: type[nn.Module]) -> type[Any]:
    """Return PEFT's class of layers with an adapter of some kinds."""

    def takes(_cls: object, layer: object) -> bool:
        return any(isinstance(part, kinds) for _, part in parts_of(layer))

    cls: Any = made(name, takes)
    # frameworks skip modules below a layer by these names
    cls.adapter_layer_names = tuple(sorted({getattr(k, "container", _DEFAULT) for k in kinds}))
    return cast("type[Any]", cls)


def _kinds_of(peft_type: str) -> tuple[type[nn.Module], ...]:
    found: Any = (s.config for s in peft_spellings.values() if s.peft_type == peft_type)
    return tuple(c.adapter_class for c in found if getattr(c, "adapter_class", None) is not None)


def _is_copied(module: object) -> bool:
    """Return whether each layer of a module has a copy for some adapter, like those of a head."""
    if not isinstance(module, nn.Module) or isinstance(module, (Adapted, Adapter, AdapterDict)):
        return False
    own = [m for m in (plain for _, plain in plain_modules(module)) if m._parameters]
    copied = LAYER_CLASSES["ModulesToSaveWrapper"]
    return bool(own) and all(isinstance(m, Adapted) and isinstance(m, copied) for m in own)


_LAYERS: Mapping[str, str] = {
    "BOFTLayer": "BOFT", "IA3Layer": "IA3", "LoHaLayer": "LOHA", "LoKrLayer": "LOKR",
    "LoraLayer": "LORA", "MissLayer": "MISS", "OFTLayer": "OFT", "VeraLayer": "VERA",
}  # fmt: skip

LAYER_CLASSES = {
    "BaseTunerLayer": made("BaseTunerLayer", lambda _cls, layer: is_tuned(layer)),
    "AuxiliaryTrainingWrapper": _layer_class("AuxiliaryTrainingWrapper", LayerCopy, TokenRows),
    # a copy of a static head is a plain layer
    "ModulesToSaveWrapper": made(
        "ModulesToSaveWrapper",
        lambda _cls, layer: (
            any(isinstance(p, LayerCopy) or not isinstance(p, Adapter) for _, p in parts_of(layer))
            or _is_copied(layer)
        ),
    ),
    "TrainableTokensWrapper": _layer_class("TrainableTokensWrapper", TokenRows),
    **{name: _layer_class(name, *_kinds_of(kind)) for name, kind in _LAYERS.items()},
}
