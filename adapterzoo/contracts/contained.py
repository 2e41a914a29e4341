"""Modules that a layer or the base model keeps under the name of an adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

# types that are neither a parameter nor a buffer nor a module
_PLAIN = frozenset((bool, int, float, str, tuple, dict, type(None)))


class Contained(nn.Module):
    """A module that a layer, or the base model, keeps under the name of an adapter or fusion.

    Attributes:
        container: name of the submodule that holds it, `<layer>.<container>.<name>`: a part of the
            names of its parameters, as in AdapterHub's `adapters`.
        prefix: precedes its name in compositions, where adapters and fusions meet.
    """

    container: str = "adapters"
    prefix: ClassVar[str] = ""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a number, text or flag without the slower checks of `nn.Module`."""
        own = vars(self)
        if (
            type(value) in _PLAIN
            and "_modules" in own
            and not (
                name in own["_parameters"] or name in own["_buffers"] or name in own["_modules"]
            )
        ):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


class SharedModules(nn.ModuleDict, Contained):
    """Modules that the layers of an adapter share, by name."""

    container = "shared_parameters"


class SharedKey:
    """What the layers of an adapter share; one object for all of them.

    Keys are equal if name and number are.

    Attributes:
        name: of the adapter.
        number: of the config in a union; None outside of unions.
        module: the one that the layers share; None before the adapter is in a model.
    """

    __slots__ = ("module", "name", "number")

    def __init__(self, name: str = "", number: int | None = None) -> None:
        """Name what is shared.

        Args:
            name: of the adapter.
            number: of the config in a union; None outside of unions.
        """
        self.name, self.number = name, number
        self.module: nn.Module | None = None

    def __repr__(self) -> str:
        """Show name and number."""
        return f"SharedKey({self.name!r}, {self.number})"

    def __eq__(self, other: object) -> bool:
        """Return whether the layers of the same adapter share it."""
        if not isinstance(other, SharedKey):
            return False
        return (self.name, self.number) == (other.name, other.number)

    def __hash__(self) -> int:
        """Return a hash of name and number."""
        return hash((self.name, self.number))


class Ejectable(nn.Module, ABC):
    """A shared module with values that a network computes while they are trained."""

    @abstractmethod
    def eject(self) -> Mapping[str, Any]:
        """Replace the network by the values that it computes, in place.

        Returns:
            The fields of the config that change; empty if there is no network.
        """
