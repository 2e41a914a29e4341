"""The fields of a config: an unknown, missing or unnamed one is a `ConfigError` that names it."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABCMeta
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .errors import ConfigError, listing

_T = TypeVar("_T")
_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class ConfigType(ABCMeta):
    """Type of config dataclasses: a call with wrong fields raises `ConfigError`."""

    # type checkers read the signature of the dataclass instead
    if not TYPE_CHECKING:

        def __call__(cls, *values: Any, **fields: Any) -> Any:
            """Make a config.

            Raises:
                ConfigError: a field is unknown, missing or without its name.
            """
            try:
                return super().__call__(*values, **fields)
            except TypeError:
                # what the class itself got wrong stays as it is
                _refuse_wrong_fields(cls, None, values, fields)
                raise

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor, and not of `__call__` above."""
        _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return inspect.Signature(parameters)


def construct(cls: type[_T], shown: str, fields: Mapping[str, Any]) -> _T:
    """A config of the class with these fields; `shown` begins the message.

    Raises:
        ConfigError: there is no such field, or a value is not legal.
    """
    _refuse_wrong_fields(cls, shown, (), fields)
    try:
        return cls(**fields)
    except TypeError as error:
        legal = sorted(f.name for f in dataclasses.fields(cast("Any", cls)))
        known = f"Its fields: {listing(legal, limit=40)}. Write legal values for these."
        raise ConfigError(f"{shown}: {error}. {known}") from error


def _refuse_wrong_fields(
    cls: type, shown: str | None, values: tuple[Any, ...], fields: Mapping[str, Any]
) -> None:
    signature = inspect.signature(cls)
    try:
        signature.bind(*values, **fields)
    except TypeError as error:
        known = [p for p in signature.parameters.values() if p.kind in _NAMED]
        legal = sorted(p.name for p in known)
        unknown = sorted(set(fields) - set(legal), key=str)
        missing = [p.name for p in known if p.default is p.empty and p.name not in fields]
        given = [repr(value) for value in values]
        if unknown:
            what = f"there is no field {listing(unknown)}"
            given += [f"{name}={fields[name]!r}" for name in unknown]
        elif values:
            what = "each field is given by its name"
        else:
            what = f"without {listing(missing)} it is not whole"
        near = [n for name in unknown for n in get_close_matches(str(name), legal, n=1)]
        close = f" Did you mean {listing(dict.fromkeys(near))}?" if near else ""
        call = shown or f"{cls.__name__}({', '.join(given)})"
        raise ConfigError(
            f"{call}: {what}.{close} Its fields: {listing(legal, limit=40)}. Write one of these."
        ) from error
