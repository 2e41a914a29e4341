"""The base of all configs: their dicts, JSON files and strings, and mapping access."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import os
import re
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast, dataclass_transform

from .errors import ConfigError, FieldError, listing, unknown_name
from .fields import check_fields
from .registry import Registry

_T = TypeVar("_T")
_CONFIG_STRING = re.compile(r"(?P<name>[^\[\]|]+)(?:\[(?P<fields>.*)\])?", re.DOTALL)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def config_class(cls: type[_T]) -> type[_T]:
    """Make a class below `Config` a frozen dataclass whose fields are given by their names.

    `@dataclass(frozen=True, kw_only=True)` does the same, and takes twice as long: it also compiles
    `__eq__` and `__repr__` for each class, which `Config` has for all.
    """
    # `dataclass` refuses to freeze a class with a `__setattr__` of its own, as `Config` has
    frozen = "__setattr__" not in vars(cls)
    return dataclass(frozen=frozen, kw_only=True, eq=False, repr=False)(cls)


class ConfigType(ABCMeta):
    """Type of config dataclasses: a call with wrong fields raises `ConfigError`.

    A call with fields that stand for another class makes a config of that one: `Config._resolved`.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        """Set an attribute of the class, which `dataclass` does too.

        Users may write `@dataclass(frozen=True)` or `@dataclass`: `Config` freezes all objects.
        """
        if name in ("__setattr__", "__delattr__"):
            return
        super().__setattr__(name, value)
        if name == "__dataclass_params__":
            # `dataclass` refuses to mix the two kinds, by the same flag of the bases
            for base in cls.__mro__[1:]:
                if own := vars(base).get(name):
                    own.frozen = value.frozen

    # type checkers read the signature of the dataclass instead
    if not TYPE_CHECKING:

        def __call__(cls, *values: Any, **fields: Any) -> Any:
            """Make a config.

            Raises:
                ConfigError: a field is unknown, missing or without its name.
            """
            found, fields = cls._resolved(fields)
            if found is not cls:
                return found(*values, **fields)
            try:
                return super().__call__(*values, **fields)
            except ConfigError:
                raise
            except TypeError:
                # errors inside the class itself are not changed
                _check_names(cls, None, values, fields)
                raise

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the constructor, not of `__call__` above."""
        return _signature(cls)


@functools.cache
def _signature(cls: type) -> inspect.Signature:
    _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    return inspect.Signature(parameters)


def _check_names(
    cls: type, shown: str | None, values: tuple[Any, ...], fields: Mapping[str, Any]
) -> None:
    """Check the names of the fields in a call; `shown` begins the message instead of the call.

    Raises:
        FieldError: one is unknown, missing or without its name.
    """
    known = inspect.signature(cls)
    try:
        known.bind(*values, **fields)
    except TypeError as error:
        legal = sorted(n for n, p in known.parameters.items() if p.kind is not p.VAR_POSITIONAL)
        unknown = sorted(fields.keys() - {*legal}, key=str)
        given = [*map(repr, values), *(f"{name}={fields[name]!r}" for name in unknown)]
        if unknown:
            what = f"there is no field {listing(unknown)}"
        elif values:
            what = "each field is given by its name"
        else:
            missing = [n for n, p in known.parameters.items() if p.default is p.empty]
            what = f"{listing(n for n in missing if n not in fields)} must be given"
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
        kind_field: the key of `to_dict` that names the class of a dict; empty if there is one
            class.
        kinds: values of that key → classes.
        default_kind: the kind of a dict without that key; None if it must be there.
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
        """
        check_fields(self)

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field that has no value yet.

        Raises:
            FrozenInstanceError: it has, or is not a field.
        """
        if name not in fields_of(type(self)) or name in vars(self):
            raise dataclasses.FrozenInstanceError(
                f"{type(self).__name__}.{name} = {value!r}: a config does not change. Write "
                f"config.replace({name}={value!r}), or declare the field in a class of your own."
            )
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse to delete an attribute.

        Raises:
            FrozenInstanceError: always.
        """
        raise dataclasses.FrozenInstanceError(
            f"del {type(self).__name__}.{name}: a config does not change. Write config.replace(…)."
        )

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
            UnknownNameError: nothing is registered for its kind.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"config={values!r}: a config in a file or a union is a dict of its fields, not a "
                f"{type(values).__name__}. Write {_example(cls)}."
            )
        fields = dict(values)
        given = fields.pop(cls.kind_field, None) if cls.kind_field else None
        own = cls._kind()
        if own is None and cls.kinds is not None:
            found: Any = cls.kinds.find(given or cls.default_kind)
            made: Self = found._from_fields(fields)
            return made
        if given is not None and given != own:
            root = next(c for c in reversed(cls.__mro__) if vars(c).get("kind_field"))
            raise ConfigError(
                f"{cls.__name__}.from_dict: the dict has {cls.kind_field}={given!r}, not {own!r}. "
                f"Write {root.__name__}.from_dict(…)."
            )
        return cls._from_fields(fields)

    @classmethod
    def _kind(cls) -> Any:
        return getattr(cls, cls.kind_field, None) if cls.kind_field else None

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        made = cls._made(cls.__name__, {name: _as_field(v) for name, v in fields.items()})
        return cast("Self", made)

    @classmethod
    def _made(cls, shown: str, fields: Mapping[str, Any]) -> Any:
        """Return a config with these fields; `shown` begins the messages.

        Raises:
            ConfigError: there is no such field, or a value is not legal.
        """
        found, fields = cls._resolved(fields)
        _check_names(found, shown, (), fields)
        try:
            return found(**fields)
        except ConfigError:
            raise
        except TypeError as error:
            raise ConfigError(
                f"{shown}: {error}. Its fields: {listing(sorted(fields_of(found)), limit=40)}. "
                f"Write legal values for these."
            ) from error

    @classmethod
    def _resolved(cls, fields: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return the class that the fields of a constructor call stand for, and its fields."""
        return cls, fields

    def replace(self, **changes: Any) -> Self:
        """Return the same config with some fields changed.

        Raises:
            ConfigError: a field is unknown, or a value is not legal.
        """
        return self._changed(type(self).__name__, changes)

    def _changed(self, shown: str, changes: Mapping[str, Any]) -> Self:
        """Return the config with some fields changed; errors begin with what the user wrote."""
        return cast("Self", self._made(shown, {**_values(self), **changes}))

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
            UnknownNameError: the config string names nothing that is registered.
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
                f"config={asked!r}: a {type(asked).__name__} is not a {cls.__name__}, a config "
                f"string, a dict or the path of a JSON file. Write config={cls.default!r}."
            )
        given = {name: value for name, value in changes.items() if value is not None}
        return found.replace(**given) if given else found

    @classmethod
    def _parse(cls, text: str) -> Any:
        match = _CONFIG_STRING.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"config={text!r}: not a config string. Write a name, with fields in brackets if "
                f"any: {_string_example(str(cls.default), cls.load())!r}."
            )
        config: Config = cls.strings.find(match["name"])()
        keywords: list[ast.keyword] | None = None
        try:
            call = ast.parse(f"f({match['fields'] or ''}\n)", mode="eval").body
            # one call of fields: not f(…)(…), nor f(…) + g(…)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
                keywords = call.keywords
            # literal_eval accepts only constants, so no code of the string runs
            fields = {str(k.arg): ast.literal_eval(k.value) for k in keywords or ()}
        # the last three: keys that cannot be, and too many brackets or signs
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            keywords, fields = None, {}
        if keywords is None or len(fields) < len(keywords):
            raise ConfigError(
                f"config={text!r}: the brackets hold field=value pairs, each field once, with "
                f"values such as 8, True, 'relu' or [1,2]. "
                f"Write {_string_example(match['name'], config)!r}."
            )
        return config._changed(f"config={text!r}", {n: _as_field(v) for n, v in fields.items()})

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
            raise unknown_name(
                f"{type(self).__name__}(…)[{key!r}]", "field", key, self.field_names()
            )
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
            f"config={os.fspath(path)!r}: not a JSON file ({error}). Write the path of a file with "
            f"a config's dict, as json.dumps(config.to_dict()) gives it."
        ) from error
    # as saved beside an adapter
    inner = document.get("config") if isinstance(document, dict) else None
    return inner if isinstance(inner, dict) else document


def _example(cls: type[Config]) -> str:
    kind = cls._kind() or next(iter(cls.kinds or ()), None)
    return f"{{{cls.kind_field!r}: {kind!r}, …}}" if kind else f"{cls.__name__}().to_dict()"


def _string_example(name: str, config: Config) -> str:
    """Return a config string that sets a field: a whole number, another number or a flag."""
    fields = _values(config)
    # a field that a class declares itself is more specific than one that it inherits
    names = [
        n for c in type(config).__mro__ for n in vars(c).get("__annotations__", ()) if n in fields
    ]
    plain = [n for kind in (int, float, bool) for n in names if type(fields[n]) is kind]
    return f"{name}[{plain[0]}={fields[plain[0]]!r}]" if plain else name


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
