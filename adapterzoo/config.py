"""Configs: the declarations of their fields, their dicts, files and strings, and their registries.

```python
@method_config("mine")
class MyConfig(AdapterConfig):
    r: int = field(8, Range(1, MAX_WIDTH))
    dropout: float = field(0.0, Share())
```

A config is a frozen, keyword-only dataclass in the file of its method. It declares the legal values
of its fields, returns the placements of its adapters (`placements`) and builds each (`build`).
Fields annotated `bool` are checked without a declaration. A class that changes the default of an
inherited field keeps the field's check.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import inspect
import json
import math
import os
import re
import warnings
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard, TypeVar, cast, dataclass_transform

from . import peft_arguments
from .errors import (
    CompositionError,
    ConfigError,
    FieldError,
    SiteError,
    extend,
    listing,
    unknown_name,
)
from .registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .anatomy import Anatomy, Site
    from .averaging import Combination
    from .contracts import Adapter, InputPlan, WeightPlan

_T = TypeVar("_T")

# far above any published use; stops typos before they allocate memory
MAX_WIDTH = 65_536


def is_number(value: object, *types: type) -> TypeGuard[float]:
    """Return whether a value is an int or a float, or of the given types; bool is neither."""
    return type(value) in (types or (int, float))


class Check(metaclass=ABCMeta):
    """The legal values of a field.

    Attributes:
        legal: the legal values in words, after "`field` is".
        example: the legal value that messages suggest; None: the default of the field.
    """

    legal: str
    example: ClassVar[object] = None

    @abstractmethod
    def fits(self, value: object) -> bool:
        """Return whether the value is legal."""

    def convert(self, value: object) -> object:
        """Return the value as configs store it."""
        return value

    def nearest(self, value: object, default: object) -> object:
        """Return a legal value to suggest instead."""
        return default if self.example is None else self.example

    def below(self, value: Any, prefix: str, anatomy: Any) -> Any:
        """Return a legal value with names of layers as names below the base model.

        Args:
            value: names and expressions for paths in the whole model, as PEFT reads them.
            prefix: what precedes the paths of the base model, such as "model.".
            anatomy: the `Anatomy` of the base model.
        """
        return value

    def __call__(self, config: str, name: str, value: object, default: object = None) -> object:
        """Return the value to keep.

        Args:
            config: the name of the config's class.
            name: the name of the field.
            value: the value as the user gave it.
            default: the default of the field.

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
    """A number with `low ≤ value ≤ high`; a whole number if both bounds are."""

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
        """Return the bound that the value exceeds, or the default."""
        if not is_number(value):
            return default
        return self.low if value < self.low else self.high if value > self.high else default

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


class Density(Check):
    """A number above 0, up to 1."""

    legal = "a number above 0, up to 1"

    def fits(self, value: object) -> bool:
        """Return whether the value is legal."""
        return is_number(value) and 0 < value <= 1


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
        meaning: what None means, such as "that of the model".
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
    example: ClassVar[object] = [0, 1]

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


class StackLayers(Layers):
    """Numbers of layers, counted from 0 in each stack of blocks, as in paths."""


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


def field(default: _T, check: Check | None = None, *, ours: bool = False, needs: str = "") -> _T:
    """Declare a field of a config with its default and its check.

    Args:
        default: a dict is copied for each config.
        check: the check of its values; None: only that of the annotation.
        ours: whether the peers' files lack the field; it is written only if it is not the default.
        needs: values of other fields, such as `"use_gating=True"`, without which this one has no
            effect; a warning says so. Several are joined by ", ".
    """
    declared = {"check": check, "ours": ours, "needs": needs and (needs, default)}
    metadata = {key: value for key, value in declared.items() if value}
    if isinstance(default, dict):
        return cast("_T", dataclasses.field(default_factory=default.copy, metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def declarations(cls: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return what a config class and its bases declare for each field; the class has precedence."""
    found: dict[str, dict[str, Any]] = {}
    for c in reversed(cls.__mro__):
        for name, own in vars(c).get("__dataclass_fields__", {}).items():
            flag = {"check": FLAG} if own.type in (bool, "bool") else {}
            found[name] = flag | found.get(name, {}) | dict(own.metadata)
    return {name: found[name] for name in fields_of(cls)}


@functools.cache
def checks(cls: Any) -> Mapping[str, tuple[Check, object]]:
    """Return the check and the default of each field of a config class that has a check.

    Raises:
        ConfigError: the class has fields, but no decorator.
    """
    if any(isinstance(value, dataclasses.Field) for value in vars(cls).values()):
        raise ConfigError(
            f"{cls.__name__} declares fields without a decorator. Write @method_config('name')."
        )
    found = {name: own.get("check") for name, own in declarations(cls).items()}
    return {name: (c, fields_of(cls)[name].default) for name, c in found.items() if c}


@functools.cache
def needs_of(cls: Any) -> Mapping[str, tuple[str, object]]:
    """Return, for fields that need others to have an effect, what they need and the default."""
    return {name: own["needs"] for name, own in declarations(cls).items() if "needs" in own}


def without_idle(cls: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for a config of a class, without those that would have no effect."""
    values = {**defaults(cls), **fields}
    idle = {name for name, (need, _) in needs_of(cls).items() if not _is_met(need, values)}
    return {name: value for name, value in fields.items() if name not in idle}


def _is_met(need: str, values: Mapping[str, Any]) -> bool:
    """Return whether fields have the values in a text such as "coft=True"."""
    pairs = (each.partition("=") for each in need.split(", "))
    return all(repr(values[name]) == value for name, _, value in pairs)


def refuse_missing_layers(config: Any, count: int) -> None:
    """Check that a model has the layers whose numbers are in a config.

    Args:
        config: the config of a method.
        count: the number of the model's layers.

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
                f"{listing(missing)}; the model has {count}. Write {name}={kept}."
            )


# --- the base of all configs ---

_CONFIG_STRING = re.compile(r"(?P<name>[^\[\]|]+)(?:\[(?P<fields>.*)\])?", re.DOTALL)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def config_class(cls: type[_T]) -> type[_T]:
    """Make a subclass of `Config` a frozen dataclass whose fields are given by name.

    `@dataclass(frozen=True, kw_only=True)` does the same, but takes twice as long: it also compiles
    `__eq__` and `__repr__` for each class, which all classes have from `Config`.
    """
    # `dataclass` refuses to freeze a class with a `__setattr__` of its own, as `Config` has
    frozen = "__setattr__" not in vars(cls)
    return dataclass(frozen=frozen, kw_only=True, eq=False, repr=False)(cls)


class ConfigType(ABCMeta):
    """Type of config dataclasses: a call with wrong fields raises `ConfigError`.

    A call with fields of another class makes a config of that class, see `Config._resolved`.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        """Set an attribute of the class, as `dataclass` does.

        Users may write `@dataclass(frozen=True)` or `@dataclass`: `Config` freezes all objects.
        """
        if name in ("__setattr__", "__delattr__"):
            return
        super().__setattr__(name, value)
        if name == "__dataclass_params__":
            # `dataclass` refuses a class that is frozen when its bases are not, or the reverse
            for base in cls.__mro__[1:]:
                if own := vars(base).get(name):
                    own.frozen = value.frozen

    # type checkers read the signature of the dataclass instead
    if not TYPE_CHECKING:

        def __call__(cls, *values: Any, **fields: Any) -> Any:
            """Make a config.

            Raises:
                ConfigError: a field is unknown, missing or given without its name.
            """
            found, fields = cls._resolved(fields)
            if found is not cls:
                return found(*values, **fields)
            try:
                return super().__call__(*values, **fields)
            except TypeError:
                # raises if the call is wrong; an error inside the class is raised as it is
                _check_names(cls, None, values, fields)
                raise

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the constructor, instead of that of `__call__`."""
        return _signature(cls)


@functools.cache
def _signature(cls: type) -> inspect.Signature:
    _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    return inspect.Signature(parameters)


def _check_names(
    cls: type, shown: str | None, values: tuple[Any, ...], fields: Mapping[str, Any]
) -> None:
    """Check the names of the fields in a call; messages begin with `shown`, or else with the call.

    Raises:
        FieldError: a field is unknown, missing or given without its name.
    """
    known = inspect.signature(cls)
    try:
        known.bind(*values, **fields)
    except TypeError as error:
        legal = sorted(n for n, p in known.parameters.items() if p.kind is not p.VAR_POSITIONAL)
        unknown = sorted(fields.keys() - {*legal}, key=str)
        given = [*map(repr, values), *(f"{name}={fields[name]!r}" for name in unknown)]
        what = f"there is no field {listing(unknown)}" if unknown else str(error)
        near = [n for name in unknown for n in get_close_matches(str(name), legal, n=1)]
        close = f" Did you mean {listing(dict.fromkeys(near))}?" if near else ""
        call = shown or f"{cls.__name__}({', '.join(given)})"
        raise FieldError(
            f"{call}: {what}.{close} Its fields: {listing(legal, limit=40)}. Write one of these."
        ) from error


@config_class
class Config(Mapping[str, Any], metaclass=ConfigType):
    """Base of all configs: of adapters, fusion layers and heads.

    Two configs are equal if their dicts are. A config is a mapping: `config["r"]`,
    `config.get("r")` and `dict(config)` read the fields, and the kind under its name in files.

    Attributes:
        kind_field: the key of `to_dict` that names the class; empty if there is only one class.
        kinds: values of that key → classes.
        default_kind: the kind of a dict without that key; None: the key must be there.
        strings: names that `load` accepts → functions that build the config.
        default: the config that `load` returns for None.
    """

    kind_field: ClassVar[str] = ""
    kinds: ClassVar[Registry[Any] | None] = None
    default_kind: ClassVar[str | None] = None
    strings: ClassVar[Registry[Any]] = Registry("config string")
    default: ClassVar[object] = None

    def __init_subclass__(cls) -> None:
        """Keep `@dataclass` from replacing the comparison and the text."""
        super().__init_subclass__()
        for name in ("__eq__", "__hash__", "__repr__"):
            if name not in vars(cls):
                setattr(cls, name, getattr(cls, name))

    def __post_init__(self) -> None:
        """Check each field by its declaration; checks across fields come later.

        Raises:
            ConfigError: a value is not legal.

        Warns:
            UserWarning: a field has no effect.
        """
        cls: Any = type(self)
        for name, (check, default) in checks(cls).items():
            kept = check(cls.__name__, name, getattr(self, name), default)
            object.__setattr__(self, name, Items(kept) if type(kept) is tuple else kept)
        for name, (need, default) in needs_of(cls).items():
            value = getattr(self, name)
            if value not in (default, defaults(cls)[name]) and not _is_met(need, vars(self)):
                warnings.warn(
                    f"{cls.__name__}({name}={value!r}): has an effect only with {need}. Write "
                    f"{name}={default!r}.",
                    stacklevel=4,
                )

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field that has no value yet.

        Raises:
            FrozenInstanceError: it has a value, or it is not a field.
        """
        if name not in fields_of(type(self)) or name in vars(self):
            raise dataclasses.FrozenInstanceError(
                f"{type(self).__name__}.{name}: a config is frozen. Write config.replace({name}=…)."
            )
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse to delete an attribute.

        Raises:
            FrozenInstanceError: always.
        """
        raise dataclasses.FrozenInstanceError(f"{type(self).__name__}.{name}: a config is frozen.")

    # --- dicts ---

    def to_dict(self) -> dict[str, Any]:
        """Return the config as JSON types, with its kind; `from_dict` reads it back."""
        fields = {
            f.name: _as_json(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if not ("ours" in f.metadata and getattr(self, f.name) == f.default)
        }
        return {self.kind_field: self._kind(), **fields} if self.kind_field else fields

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Return the config that `to_dict` wrote; a base class finds the class of the dict.

        Raises:
            ConfigError: a field is unknown, or a value is not legal.
            UnknownNameError: its kind is unknown.
        """
        if not isinstance(values, Mapping):
            kind = cls._kind() or next(iter(cls.kinds or ()), None)
            hint = f"{{{cls.kind_field!r}: {kind!r}, …}}" if kind else f"{cls.__name__}().to_dict()"
            raise ConfigError(f"config={values!r} is not a dict of fields. Write {hint}.")
        fields = dict(values)
        given = fields.pop(cls.kind_field, None) if cls.kind_field else None
        own = cls._kind()
        if own is None and cls.kinds is not None:
            found: Any = cls.kinds.find(given or cls.default_kind)
            try:
                return cast("Self", found._from_fields(fields))
            except FieldError as error:
                if given is None:
                    extend(error, f" For another method, add {cls.kind_field!r} to the dict.")
                raise
        if given is not None and given != own:
            root = next(c for c in reversed(cls.__mro__) if vars(c).get("kind_field"))
            raise ConfigError(
                f"{cls.__name__}.from_dict: the dict has {cls.kind_field}={given!r}. Write "
                f"{root.__name__}.from_dict(…)."
            )
        return cls._from_fields(fields)

    @classmethod
    def _kind(cls) -> Any:
        return getattr(cls, cls.kind_field, None) if cls.kind_field else None

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls._made(cls.__name__, {name: _as_field(v) for name, v in fields.items()})

    @classmethod
    def _made(cls, shown: str, fields: Mapping[str, Any]) -> Self:
        """Return a config with these fields; `shown` begins the messages.

        Raises:
            ConfigError: there is no such field, or a value is not legal.
        """
        found, fields = cls._resolved(fields)
        _check_names(found, shown, (), fields)
        return cast("Self", found(**fields))

    @classmethod
    def _resolved(cls, fields: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return the class that a constructor call with these fields means, and its fields."""
        return cls, fields

    def replace(self, **changes: Any) -> Self:
        """Return the same config with some fields changed.

        Raises:
            ConfigError: a field is unknown, or a value is not legal.
        """
        return self._changed(type(self).__name__, changes)

    def _changed(self, shown: str, changes: Mapping[str, Any]) -> Self:
        """Return the config with some fields changed; `shown` begins the messages."""
        return self._made(shown, {**_values(self), **changes})

    # --- values of `config=` ---

    @classmethod
    def load(cls, config: object = None, **changes: Any) -> Self:
        """Return the config that a user means.

        Args:
            config: a config; a config string, `"name"` or `"name[field=value,…]"`; a dict from
                `to_dict`; the path of a JSON file with such a dict; None for the default.
            **changes: fields to change; None leaves a field as it is.

        Raises:
            ConfigError: it is none of these, or a value in it is not legal.
            UnknownNameError: the name in the config string is unknown.
        """
        asked: Any = cls.default if config is None else config
        if isinstance(asked, cls):
            found = asked
        elif isinstance(asked, Mapping) and not isinstance(asked, Config):
            found = cls.from_dict(asked)
        elif isinstance(asked, os.PathLike) or (
            isinstance(asked, str) and asked not in cls.strings and asked.endswith(".json")
        ):
            found = cls.from_dict(_read(asked))
        elif isinstance(asked, str):
            found = cls._parse(asked)
        else:
            raise ConfigError(
                f"config={asked!r} is not a {cls.__name__}, a config string, a dict or the path of "
                f"a JSON file. Write config={cls.default!r}."
            )
        given = {name: value for name, value in changes.items() if value is not None}
        return found.replace(**given) if given else found

    @classmethod
    def _parse(cls, text: str) -> Any:
        name, fields = parse_string(text)
        return cls.strings.find(name)()._changed(f"config={text!r}", fields)

    # --- as the peers' configs, which are mappings ---

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the fields, the kind's first."""
        kind = (self.kind_field,) if self.kind_field else ()
        return (*kind, *fields_of(type(self)))

    def __getitem__(self, key: str) -> Any:
        """Return the value of a field.

        Raises:
            UnknownNameError: there is no such field.
        """
        if key not in self.field_names():
            raise unknown_name(f"{type(self).__name__}[{key!r}]", "field", key, self.field_names())
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the fields."""
        return iter(self.field_names())

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.field_names())

    @recursive_repr()
    def __repr__(self) -> str:
        """Return a constructor call with the fields that differ from their defaults."""
        default = defaults(type(self))
        changed = {n: v for n, v in _values(self).items() if n not in default or v != default[n]}
        return f"{type(self).__qualname__}({', '.join(f'{n}={v!r}' for n, v in changed.items())})"

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same dict."""
        if not isinstance(other, Config) or other.kind_field != self.kind_field:
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        """Return a hash that equal configs share."""
        return hash(_hashable(self.to_dict()))


@functools.cache
def fields_of(cls: Any) -> Mapping[str, dataclasses.Field[Any]]:
    """Return the fields of a config class by name."""
    return {f.name: f for f in dataclasses.fields(cls)}


@functools.cache
def defaults(cls: Any) -> Mapping[str, Any]:
    """Return the defaults of the fields that have one, of a config class."""
    made = {
        name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for name, f in fields_of(cls).items()
    }
    return {name: value for name, value in made.items() if value is not dataclasses.MISSING}


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        document = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"config={os.fspath(path)!r}: not a JSON file ({error}). Write the path of one."
        ) from error
    # a file that was saved with an adapter has the config under this key
    inner = document.get("config") if isinstance(document, dict) else None
    return inner if isinstance(inner, dict) else document


def split_string(text: str) -> list[str]:
    """Return the config strings of the members of a union; that of a method alone is the only one.

    Args:
        text: config strings with `|` between them.
    """
    # quoted text may contain any characters, also the separators of a union
    blank = _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), text)
    bars = [match.start() for match in re.finditer(r"\|(?![^\[]*\])", blank)]
    ends = zip([-1, *bars], [*bars, len(text)], strict=True)
    return [text[bar + 1 : end].strip() for bar, end in ends]


def parse_string(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name in a config string, and the values of the fields in its brackets.

    Args:
        text: `"name"` or `"name[field=value,…]"`; any other text is an unknown name.

    Raises:
        ConfigError: the brackets do not hold fields and values.
    """
    match = _CONFIG_STRING.fullmatch(text)
    name, brackets = (match["name"], match["fields"]) if match else (text, None)
    keywords: list[ast.keyword] | None = None
    try:
        call = ast.parse(f"f({brackets or ''}\n)", mode="eval").body
        # one call of fields: not f(…)(…), nor f(…) + g(…)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            keywords = call.keywords
        # literal_eval accepts only constants, so no code of the string runs
        fields = {str(k.arg): ast.literal_eval(k.value) for k in keywords or ()}
    # the last three: unhashable keys, and too many brackets or signs
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        keywords, fields = None, {}
    if keywords is None or len(fields) < len(keywords):
        raise ConfigError(
            f"config={text!r}: the brackets hold field=value pairs, each field once, with values "
            f"as in Python: 8, True or 'text' in quotes. Write {name!r} without them."
        )
    return name, {field: _as_field(value) for field, value in fields.items()}


def _values(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in fields_of(type(config))}


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_json(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _as_json(v) for k, v in value.items()}
    return value


def _as_field(value: Any) -> Any:
    return tuple(map(_as_field, value)) if isinstance(value, list) else value


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return frozenset((key, _hashable(v)) for key, v in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


# --- configs of adapters ---

METHODS = "adapterzoo.methods"
"""The package that fills the registries below."""

architectures: Registry[Any] = Registry("architecture", "its config class", filled_by=METHODS)
"""The `architecture` of a config on disk → its class."""

config_strings: Registry[Any] = Registry("config string", filled_by=METHODS)
"""The short names that users write → functions that make the configs."""

change_forms: Registry[Any] = Registry("conversion method", filled_by=METHODS)
"""Methods that can express any change of a weight → their config classes.

Such a class has `at_sites_of(config, anatomy)`, `at_layers(paths)` and `of_ranks(ranks)`, and its
adapters are `contracts.FactoredAdapter`s.
"""

DEFAULT_CHANGE_FORM = "lora"

variants: dict[type[Any], Any] = {}
"""Config classes that are one class in `adapters` → their `AdapterHubSpelling`.

`LoRAConfig(use_dora=True)` of `adapters` has a class of its own here.
"""

# quoted text in a config string
_QUOTED = re.compile(r"""(["'])(?:\\.|(?!\1).)*\1""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Placement:
    """A site and the config of its adapter.

    Attributes:
        site: the place of the adapter.
        config: the config that builds the adapter.
        location: its key in `get_adapter`, such as "output_adapter"; if empty, the site's role.
    """

    site: Site
    config: AdapterConfig
    location: str = ""


@config_class
class AdapterConfig(Config):
    """Base of all adapter configs.

    `architecture` is the name of the method in files, and `adapter_class` the class that `build`
    calls. `training_fields` do not change what a trained adapter computes.
    """

    kind_field: ClassVar[str] = "architecture"
    kinds: ClassVar[Registry[Any] | None] = architectures
    # the oldest files of `adapters` name none
    default_kind: ClassVar[str | None] = "bottleneck"
    strings: ClassVar[Registry[Any]] = config_strings
    default: ClassVar[object] = "seq_bn"

    architecture: ClassVar[str]
    adapter_class: ClassVar[Callable[..., Any]]
    training_fields: ClassVar[frozenset[str]] = frozenset(
        {"dropout", "init_weights", "init_weights_seed", "dtype"}
    )

    @classmethod
    def _resolved(cls, fields: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return the class that fields of `adapters` or PEFT mean, and its fields.

        Raises:
            ConfigError: there is no such method.
        """
        found, fields = peft_arguments.resolved(cls, fields)
        return (found, fields) if found is not cls else _variant(cls, fields)

    def _changed(self, shown: str, changes: Mapping[str, Any]) -> Self:
        """Return the config with some fields changed, which may have PEFT's names."""
        if type(self) in peft_arguments.classes_of_peft:
            changes = peft_arguments.translated(type(self), changes)
        return super()._changed(shown, changes)

    @property
    def slot_fields(self) -> frozenset[str]:
        """The fields in which an adapter may differ from the slot that takes its values.

        Smaller sizes are padded with zeros, and `Adapter.in_slot` makes up for other differences.
        Sites are compared in any case.
        """
        return frozenset()

    def of_rank(self, rank: int) -> Self:
        """Return the config of a slot for adapters up to this rank; itself if it has no rank.

        Raises:
            ConfigError: its own rank is larger.
        """
        return self

    @property
    def starts_as_identity(self) -> bool:
        """Whether a fresh adapter leaves the model's output unchanged, bit for bit."""
        return getattr(self, "init_weights", True) is not False

    @property
    def gradients_are_exact(self) -> bool:
        """Whether autograd gives the derivative of the output for every parameter.

        False for a method that deliberately treats a part of its formula as a constant.
        """
        return True

    @abstractmethod
    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return a placement for every site of the model that gets an adapter.

        Raises:
            SiteError: the model, or one of its blocks, lacks the sites.
        """

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Adapter:
        """Return a fresh adapter for the site, its parameters on the device and of the dtype.

        Raises:
            ConfigError: a value does not fit the site's widths, or the method cannot adapt it.
        """
        convolves = getattr(self.adapter_class, "adapts_convolutions", False)
        if site.kind == "convolution" and not convolves:
            raise ConfigError(
                f"{type(self).__name__} at {site.path!r}: it cannot adapt a convolution. Write "
                f"exclude_modules=[{site.path!r}], or LoRAConfig(…)."
            )
        made: Adapter = self.adapter_class(self, site, device, dtype)
        return made

    @property
    def members(self) -> tuple[AdapterConfig, ...]:
        """This config, or the members of a union."""
        return (self,)

    def below(self, prefix: str, anatomy: Anatomy) -> Self:
        """Return the config with names of layers as names below the base model.

        Users name layers as PEFT does, by their paths in the whole model.

        Args:
            prefix: what precedes the paths of the base model, such as "model.".
            anatomy: the anatomy of the base model.

        Raises:
            ConfigError: the fields would mean other layers than in PEFT.
        """
        changes = {}
        for name, (check, _) in checks(type(self)).items():
            given = getattr(self, name)
            if (found := check.below(given, prefix, anatomy)) != given:
                changes[name] = found
        return self.replace(**changes) if changes else self

    def shared(
        self, placements: Sequence[Placement], device: torch.device, dtype: torch.dtype
    ) -> nn.Module | None:
        """Return a module that all layers of the adapter share as `base.shared`; None: none.

        It is made, moved, copied, trained and saved once for each adapter.

        Args:
            placements: the placements of this config, in model order.
            device: the device of its tensors.
            dtype: the dtype of its parameters.

        Raises:
            ConfigError: a value does not fit the placements.
        """
        return None

    @property
    def plain(self) -> AdapterConfig:
        """The config of the equal adapter that the peers' files hold; see `plain_tensors`."""
        return self

    def plain_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of one place for an adapter of `plain`, by parameter.

        Args:
            tensors: those of an adapter of this config.
        """
        return tensors

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of one place, by parameter; undoes `plain_tensors`.

        Args:
            tensors: those of an adapter of `plain`.
        """
        return tensors

    def init_plan(self, anatomy: Anatomy) -> InputPlan | WeightPlan | None:
        """Return which inputs or original weights the initial values need; None: none."""
        return None

    @property
    def averages_shared(self) -> bool:
        """Whether shared parameters are averaged; otherwise they must be equal."""
        return False

    def init_from_text(self, shared: nn.Module, embedded: Callable[[str | int], Tensor]) -> None:
        """Initialize the shared module from a text, if the config asks for it.

        It is called once, for a fresh adapter that is not filled from a file.

        Args:
            shared: the module that `shared` made.
            embedded: returns the rows `[tokens, d]` of the model's table for a text, or for a
                number of random tokens.

        Raises:
            ConfigError: the text has no tokens.
        """

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> AdapterConfig:
        """Return the config of a combination of several adapters.

        Args:
            configs: the configs of the adapters, at least one, of this architecture.
            strategy: how the adapters are combined.
            anatomy: the anatomy of the model.

        Raises:
            CompositionError: configs that differ in this way cannot be combined.
        """
        strategy.refuse_differing([config.to_dict() for config in configs], cls.training_fields)
        return configs[0]

    @classmethod
    def _parse(cls, text: str) -> Any:
        return union_of([super(AdapterConfig, cls)._parse(part) for part in split_string(text)])


def _variant(cls: Any, fields: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the class that fields of `adapters` mean, and its fields."""
    own = variants.get(cls)
    if own is None:
        return cls, fields
    group = {c: v for c, v in variants.items() if v.architecture[0] == own.architecture[0]}
    default = defaults(cls)
    extra = {n for v in group.values() for n in v.identifying} & fields.keys() - default.keys()
    if not extra:
        return cls, fields
    values = {**own.fixed, **default, **fields}
    found = [c for c, variant in group.items() if not variant.differing(values)]
    if all(own.fixed[name] == fields[name] for name in extra & own.fixed.keys()):
        found.append(cls)
    if not found:
        shown = ", ".join(f"{name}={fields[name]!r}" for name in sorted(extra))
        raise ConfigError(
            f"{cls.__name__}({shown}): there is no method with these fields. Write one of "
            f"{listing(sorted(c.__name__ for c in group))}."
        )
    chosen: Any = max(found, key=lambda c: group[c].strictness)
    variant, legal = group[chosen], defaults(chosen)
    # drop the fields that only tell the methods apart
    read = {**variant.fixed, **variant.constants, **(default if chosen is not cls else {})}
    kept = {n: v for n, v in fields.items() if n in legal or n not in read or read[n] != v}
    if chosen is cls:
        return cls, kept
    # fields that were not given get the defaults of the class that was called, except fields of
    # training, since each method has initial values of its own
    same = {n: v for n, v in default.items() if n in legal.keys() - chosen.training_fields}
    given = {n: v for n, v in kept.items() if n not in default or default[n] != v}
    return chosen, {**same, **variant.as_another, **given}


def check_blocks(anatomy: Anatomy, config: str) -> None:
    """Check that a model has transformer blocks.

    Args:
        anatomy: the anatomy of the model.
        config: the name of the config that needs them.

    Raises:
        SiteError: it has none.
    """
    if not anatomy.blocks:
        raise SiteError(
            f"{config}: this model has no transformer blocks: {anatomy.reason}. Write a config "
            f"with names of layers, such as LoRAConfig(target_modules=[…])."
        )


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def method_config(architecture: str) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that registers the config of a method, and is `config_class` otherwise.

    Args:
        architecture: the name of the method, in files and as a config string.
    """

    def enter(cls: type[_T]) -> type[_T]:
        cls.architecture = architecture  # type: ignore[attr-defined]
        made = config_class(cls)
        architectures.register(architecture)(made)
        config_strings.register(architecture)(made)
        return made

    return enter


@config_class
class MultiTaskConfig(AdapterConfig):
    """Base of the configs of methods for several tasks, which can share parameters.

    Attributes:
        shareable: names of the parameters of a layer that `share_parameters` shares.
    """

    shareable: ClassVar[tuple[str, ...]] = ()


@method_config("union")
class ConfigUnion(AdapterConfig):
    """Several configs under one adapter name: `ConfigUnion(config, other_config)`."""

    configs: tuple[AdapterConfig, ...] = ()

    def __init__(self, *configs: AdapterConfig) -> None:
        """Join the configs.

        Args:
            configs: two or more; a union counts as its members. If two adapt one layer, the
                earlier one acts first.

        Raises:
            ConfigError: there are fewer than two, or one is not a config.
        """
        known = all(isinstance(config, AdapterConfig) for config in configs)
        members = [member for config in configs for member in config.members] if known else []
        if len(members) < 2:
            raise FieldError(
                f"ConfigUnion{configs!r}: not two or more configs. Write "
                f"ConfigUnion(config, other_config)."
            )
        # adapters are told apart by the config object that makes them
        distinct = {id(member): member for member in members}
        each = [distinct.pop(id(c)) if id(c) in distinct else copy.copy(c) for c in members]
        object.__setattr__(self, "configs", tuple(each))

    @property
    def members(self) -> tuple[AdapterConfig, ...]:
        """The joined configs."""
        return self.configs

    def below(self, prefix: str, anatomy: Anatomy) -> Self:
        """Return the union of the members with names below the base model."""
        return type(self)(*(config.below(prefix, anatomy) for config in self.configs))

    @property
    def starts_as_identity(self) -> bool:
        """Whether all members start as the identity."""
        return all(config.starts_as_identity for config in self.configs)

    @property
    def gradients_are_exact(self) -> bool:
        """Whether the gradients of all members are exact."""
        return all(config.gradients_are_exact for config in self.configs)

    def of_rank(self, rank: int) -> Self:
        """Return the union of the members' configs for slots of a rank."""
        return type(self)(*(config.of_rank(rank) for config in self.configs))

    @property
    def plain(self) -> AdapterConfig:
        """The union of the members' `plain` configs."""
        return ConfigUnion(*(config.plain for config in self.configs))

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return the placements of all members, in their order."""
        return [placement for config in self.configs for placement in config.placements(anatomy)]

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> AdapterConfig:
        """Return the union of the members' combinations."""
        unions = [config.configs for config in configs if isinstance(config, ConfigUnion)]
        kinds = {tuple(member.architecture for member in members) for members in unions}
        if len(kinds) > 1:
            shown = listing("|".join(kind) for kind in sorted(kinds))
            raise CompositionError(f"unions of different methods cannot be combined: {shown}.")
        members = zip(*unions, strict=True)
        return cls(*(type(each[0]).combined(each, strategy, anatomy) for each in members))

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the members' fields, "0.r" for `r` of the first."""
        return tuple(f"{i}.{name}" for i, c in enumerate(self.configs) for name in c.field_names())

    def __getitem__(self, key: str | int) -> Any:
        """Return a member by its number, a field of one by `"0.r"`, or a field of the union.

        Raises:
            UnknownNameError: there is no such field.
            IndexError: there is no such member.
        """
        if isinstance(key, int):
            return self.configs[key]
        if key in ("architecture", "configs"):
            return getattr(self, key)
        if key not in self.field_names():
            return super().__getitem__(key)
        number, _, name = key.partition(".")
        return self.configs[int(number)][name]

    def to_dict(self) -> dict[str, Any]:
        """Return the members' dicts under `configs`."""
        return {"architecture": "union", "configs": [c.to_dict() for c in self.configs]}

    def _changed(self, shown: str, changes: Mapping[str, Any]) -> Self:
        """Return the union with the changes in each member."""
        return type(self)(*(c._changed(shown, changes) for c in self.configs))

    def __repr__(self) -> str:
        """Return a constructor call."""
        return f"{type(self).__name__}({', '.join(map(repr, self.configs))})"

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        members = fields.pop("configs", [])
        if fields or not isinstance(members, Sequence):
            raise ConfigError(f"{fields!r}, configs={members!r}: not the dict of a union.")
        return cls(*(AdapterConfig.from_dict(c) for c in members))


def union_of(configs: Sequence[AdapterConfig]) -> AdapterConfig:
    """Return a union of the configs, or the only one."""
    return configs[0] if len(configs) == 1 else ConfigUnion(*configs)
