"""Declarations of config fields: the legal values of each, and errors that name it.

```python
@config_class
class MyConfig(AdapterConfig):
    r: int = field(8, Range(1, MAX_WIDTH))
    dropout: float = field(0.0, Share())
```

Fields annotated `bool` are checked without a declaration. A class that changes the default of an
inherited field keeps its check.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar, cast

from .errors import ConfigError, listing

_T = TypeVar("_T")

# far above any published use; stops typos before they allocate memory
MAX_WIDTH = 65_536


def is_number(value: object, *types: type) -> TypeGuard[float]:
    """Return whether a value is an int or a float, or of the given types; bool is neither."""
    return type(value) in (types or (int, float))


class Check(metaclass=ABCMeta):
    """The legal values of a field.

    Attributes:
        legal: the legal values in words, for "`field` is …".
    """

    legal: str

    @abstractmethod
    def fits(self, value: object) -> bool:
        """Return whether the value is legal."""

    def convert(self, value: object) -> object:
        """Return the value as configs store it."""
        return value

    def nearest(self, value: object, default: object) -> object:
        """Return a legal value to suggest instead."""
        return default

    def below(self, value: Any, prefix: str, anatomy: Any) -> Any:
        """Return a legal value with names of layers as names below the base model.

        Args:
            value: with names and expressions for the paths in the whole model, as PEFT reads them.
            prefix: what precedes the paths of the base model, such as "model.".
            anatomy: `Anatomy` of the base model.
        """
        return value

    def __call__(self, config: str, name: str, value: object, default: object = None) -> object:
        """Return the value to keep.

        Args:
            config: name of the config's class.
            name: of the field.
            value: as it was given.
            default: of the field.

        Raises:
            ConfigError: the value is not legal.
        """
        kept = self.convert(value)
        if self.fits(kept):
            return kept
        raise ConfigError(
            f"{config}({name}={value!r}): {name} is {self.legal}. "
            f"Write {name}={self.nearest(value, default)!r}."
        )


@dataclass(frozen=True)
class Range(Check):
    """A number within `low ≤ value ≤ high`; a whole one if both bounds are."""

    low: float
    high: float

    @property
    def legal(self) -> str:  # type: ignore[override]
        """The bounds in words."""
        kind = "a whole number" if self._types == (int,) else "a number"
        return f"{kind} from {self.low} to {self.high}"

    def fits(self, value: object) -> bool:
        """Return whether it is a number within the bounds."""
        return is_number(value, *self._types) and self.low <= value <= self.high

    def nearest(self, value: object, default: object) -> object:
        """Return the bound on the value's side."""
        if is_number(value) and not math.isnan(value):
            return self.low if value < self.low else self.high if value > self.high else default
        return default

    @property
    def _types(self) -> tuple[type, ...]:
        return (int,) if type(self.low) is type(self.high) is int else (int, float)


class Share(Check):
    """A number from 0 to below 1."""

    legal = "a number from 0 to below 1"

    def fits(self, value: object) -> bool:
        """Return whether the value is legal."""
        return is_number(value) and 0 <= value < 1


class Text(Check):
    """Text, or None."""

    legal = "text, or None for none"

    def fits(self, value: object) -> bool:
        """Return whether the value is legal."""
        return value is None or isinstance(value, str)


class AnyValue(Check):
    """Any value."""

    legal = "any value"

    def fits(self, value: object) -> bool:
        """Return whether the value is legal."""
        return True


class Positive(Check):
    """A finite number above 0."""

    legal = "a number above 0"

    def fits(self, value: object) -> bool:
        """Return whether the value is legal."""
        return is_number(value) and 0 < value < math.inf


class Choice(Check):
    """One of a few values."""

    def __init__(self, *values: object) -> None:
        """Take the legal values; the first is suggested if the default is not legal."""
        self.values, self.legal = values, f"one of {listing(values)}"

    def fits(self, value: object) -> bool:
        """Return whether it equals one of them and has its type: True == 1."""
        return any(value == choice and type(value) is type(choice) for choice in self.values)

    def nearest(self, value: object, default: object) -> object:
        """Return the default, or the first."""
        return default if self.fits(default) else self.values[0]


@dataclass(frozen=True)
class Maybe(Check):
    """The values that another check accepts, or None.

    Attributes:
        check: the check of other values.
        meaning: of None, such as "that of the model".
    """

    check: Check
    meaning: str = ""

    @property
    def legal(self) -> str:  # type: ignore[override]
        """The other check's legal values, or None."""
        return f"{self.check.legal}, or None{' for ' if self.meaning else ''}{self.meaning}"

    def fits(self, value: object) -> bool:
        """Return whether it is None or the other check accepts it."""
        return value is None or self.check.fits(value)

    def convert(self, value: object) -> object:
        """Return None, or the value converted by the other check."""
        return None if value is None else self.check.convert(value)

    def nearest(self, value: object, default: object) -> object:
        """Return the suggestion of the other check."""
        return self.check.nearest(value, default)


@dataclass(frozen=True)
class Either(Check):
    """The values that one of two checks accepts; only the second may convert."""

    first: Check
    second: Check

    @property
    def legal(self) -> str:  # type: ignore[override]
        """The legal values of both checks."""
        return f"{self.first.legal}, or {self.second.legal}"

    def convert(self, value: object) -> object:
        """Return a value that the first accepts unchanged, any other converted by the second."""
        return value if self.first.fits(value) else self.second.convert(value)

    def fits(self, value: object) -> bool:
        """Return whether one of them accepts it."""
        return self.first.fits(value) or self.second.fits(value)


class Layers(Check):
    """Numbers of layers: a list, a single number or None becomes a tuple."""

    legal = "a list of layer numbers from 0"

    def convert(self, value: object) -> object:
        """Return a tuple."""
        if value is None:
            return ()
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(value)
        return (value,)

    def fits(self, value: object) -> bool:
        """Return whether each is a whole number from 0."""
        return isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)

    def nearest(self, value: object, default: object) -> object:
        """Return the first two layers."""
        return [0, 1]


class StackLayers(Layers):
    """The same, counted in each stack of blocks, as PEFT reads them in paths."""


class Items(tuple[Any, ...]):
    """The items of a field: a tuple that equals a list or a tuple of the same items."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Return whether the items are the same."""
        return tuple.__eq__(self, tuple(other) if isinstance(other, list) else other)

    def __ne__(self, other: object) -> bool:
        """Return whether the items differ."""
        return not self == other

    __hash__ = tuple.__hash__


FLAG = Choice(False, True)
FACTOR = Range(-1e9, 1e9)
SEED = Maybe(Range(-(2**63), 2**63 - 1))


def field(default: _T, check: Check | None = None, *, ours: bool = False) -> _T:
    """Declare a field of a config with its default and its check.

    Args:
        default: a dict is copied for each config.
        check: the check of its values; None for only that of the annotation.
        ours: whether the peers' files lack the field: it is written only if it is not the default.
    """
    metadata = declared(check) | ({"ours": True} if ours else {})
    if isinstance(default, dict):
        return cast("_T", dataclasses.field(default_factory=default.copy, metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def declared(check: Check | None) -> dict[str, object]:
    """Return the metadata with which a field without a default declares its check."""
    return {} if check is None else {"check": check}


@functools.cache
def checks(cls: Any) -> Mapping[str, tuple[Check, object]]:
    """Return the check and the default of each field of a config class that has a check."""
    found: dict[str, tuple[Check, object]] = {}
    for own in dataclasses.fields(cls):
        declared_in = [vars(c).get("__dataclass_fields__", {}).get(own.name) for c in cls.__mro__]
        named = [f.metadata["check"] for f in declared_in if f and "check" in f.metadata]
        if named:
            found[own.name] = named[0], own.default
        elif own.type in (bool, "bool"):
            found[own.name] = FLAG, own.default
    return found


@functools.cache
def naming_checks(cls: Any) -> Mapping[str, Check]:
    """Return the checks of the fields of a config class that name layers."""
    return {n: each for n, (each, _) in checks(cls).items() if type(each).below is not Check.below}


def check_fields(config: Any) -> None:
    """Check each field of a config by its declaration, and store the converted value.

    Raises:
        ConfigError: a value is not legal.
    """
    cls: Any = type(config)
    for name, (check, default) in checks(cls).items():
        kept = check(cls.__name__, name, getattr(config, name), default)
        object.__setattr__(config, name, Items(kept) if type(kept) is tuple else kept)


def refuse_missing_layers(config: Any, count: int) -> None:
    """Check that a model has the layers whose numbers are in a config.

    Args:
        config: of a method.
        count: of the model's layers.

    Raises:
        ConfigError: it lacks one.
    """
    for name, (check, _) in checks(cast("Any", type(config))).items():
        are_layers = any(type(c) is Layers for c in (check, *vars(check).values()))
        asked = getattr(config, name) if are_layers else ()
        if isinstance(asked, tuple) and (missing := [n for n in asked if n >= count]):
            kept = [n for n in asked if n < count] or [*range(count)][-1:]
            raise ConfigError(
                f"{type(config).__name__}({name}={[*asked]}): there is no block "
                f"{listing(missing)}; the model has {count}, numbered from 0. Write {name}={kept}."
            )
