"""The base model of a model with adapters: its methods for adapters are those of the whole model.

`model.base_model.add_adapter(…)` would otherwise be that of transformers' mixin for PEFT.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import weakref
from collections.abc import Callable
from typing import Any, Self, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.peft import PeftAdapterMixin

from adapterzoo.inject.adapted import set_class

_OWNER = "_adapter_owner"
WHOLE = "model"
"""PEFT's name, in its wrapper, of the model that is wrapped."""


class Owner:
    """The whole model, as its base model refers to it; copies and pickles of either have both.

    The reference is weak, so that a model that is dropped is freed at once. If only its base model
    is kept, `keep` makes the reference a strong one.
    """

    def __init__(self, model: nn.Module, keep: bool = False) -> None:
        """Refer to a model.

        Args:
            model: with adapters.
            keep: whether the model lives as long as its base model.
        """
        # unlike a weak reference, it is there while the model is freed
        self.number = id(model)
        self.model: Callable[[], nn.Module | None] = (lambda: model) if keep else weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refer to the copy of the model; where the base model is copied alone, copy both."""
        alone = self.number not in memo
        return type(self)(copy.deepcopy(cast("nn.Module", self.model()), memo), keep=alone)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model with the base model."""
        return type(self), (self.model(),)


class OwnedType(type):
    """The type of the classes of owned base models: pickled by what they are made from."""


_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def own(model: Any, mixin: type, *more: str) -> None:
    """Let a base model take the calls for adapters; a model that is its own has them anyway.

    Args:
        model: with adapters.
        mixin: its public members are taken over, without those that every model of transformers
            has.
        *more: other attributes of the model; `WHOLE` for the model itself.
    """
    base = getattr(model, "base_model", model)
    if base is model or not isinstance(base, PreTrainedModel):
        return
    plain = {n for c in PreTrainedModel.__mro__ if c is not PeftAdapterMixin for n in vars(c)}
    names = [n for n in vars(mixin) if not n.startswith("_") and n not in plain]
    cls = type(base)
    if _OWNER in vars(base):
        # another mixin has been taken over before
        names, cls = [*_names_of(cls), *names], cls.__mro__[1]
    names += [name for name in more if name not in base._modules]
    set_class(base, _owned(cls, tuple(dict.fromkeys(names))))
    vars(base)[_OWNER] = Owner(model)


def keep_alive(model: nn.Module) -> bool:
    """Keep a model that is about to be freed if its base model is still used elsewhere.

    Args:
        model: whose `__del__` is running.

    Returns:
        Whether the model lives on, as long as its base model does.
    """
    modules = vars(model).get("_modules", {})
    owners = {name: vars(m).get(_OWNER) for name, m in modules.items() if m is not None}
    name = next((n for n, owner in owners.items() if owner and owner.number == id(model)), None)
    if name is None:
        return False
    # one reference is that of the dict, one that of the argument
    if sys.getrefcount(modules[name]) <= 2:
        return False
    vars(modules[name])[_OWNER] = Owner(model, keep=True)
    return True


def disown(model: Any) -> None:
    """Undo `own`.

    Args:
        model: without adapters.
    """
    base = getattr(model, "base_model", model)
    if vars(base).pop(_OWNER, None) is not None:
        set_class(base, type(base).__mro__[1])


def _owned(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    if (cls, names) not in _classes:
        made: Any = OwnedType(cls.__name__, (cls,), {name: _forwarded(name) for name in names})
        made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
        _classes[cls, names] = made
    return _classes[cls, names]


def _names_of(made: type) -> tuple[str, ...]:
    return tuple(name for name, member in vars(made).items() if isinstance(member, property))


def _by_parts(made: OwnedType) -> tuple[Any, ...]:
    return _owned, (made.__mro__[1], _names_of(made))


copyreg.pickle(OwnedType, _by_parts)


def _forwarded(name: str) -> property:
    def owner(base: nn.Module) -> Any:
        return vars(base)[_OWNER].model()

    def put(base: nn.Module, value: object) -> None:
        setattr(owner(base), name, value)

    if name == WHOLE:
        return property(owner)
    return property(lambda base: getattr(owner(base), name), put)
