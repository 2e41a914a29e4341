"""Names of adapters and heads, and of arguments that have several."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

from .errors import ConfigError, argument

FUSION = "fusion:"
"""Precedes the name of a fusion among those of adapters; no adapter can have such a name."""

BASE = "__base__"
"""In `adapter_names`, PEFT's name for a row without an adapter; None means the same."""

STATIC = "static"
"""The type of the head of a task class, and the key of the class in checkpoints."""

_LENGTH = 128
# file systems count bytes, 255 of them, and a temporary sibling has a longer name
_BYTES = 200
# a name is a part of a state-dict key, where dots separate parts, and the name of a folder, on
# Windows too
_FORBIDDEN = r"./\\:|()*?\"<>\x00-\x1f\x7f\ud800-\udfff"
LEGAL = re.compile(rf"[^\s{_FORBIDDEN}](?:[^{_FORBIDDEN}]*[^\s{_FORBIDDEN}])?")
"""The characters of names."""


@functools.cache
def _taken() -> frozenset[str]:
    """Return the attributes of a container: transformers finds modules by getattr."""
    from torch import nn

    # the last is that of our container itself
    return frozenset(dir(nn.ModuleDict())) | {"name_prefix"}


def check_name(name: object, other: str | None = None) -> str:
    """Return the name if it is legal for an adapter or a head.

    Args:
        name: 1 to 128 characters, at most 200 bytes in UTF-8; no dot, slash or other character
            that has a meaning in keys or paths; no blank at either end.
        other: the argument that gives another name, if this one is not the caller's.

    Raises:
        ConfigError: the name is not legal.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a name is a string, not {name!r}. Write 'my_task'.")
    why = ""
    try:
        with warnings.catch_warnings(action="error"):
            re.compile(f".{name}.")
    except (re.error, FutureWarning) as error:
        why = f"transformers reads it inside regular expressions, where it is not one: {error}"
    if len(name) > _LENGTH or len(name.encode(errors="replace")) > _BYTES:
        why = f"it is longer than {_LENGTH} characters or {_BYTES} bytes"
    elif not LEGAL.fullmatch(name):
        why = 'it is empty, or has one of . / \\ : | ( ) * ? " < > in it, or a blank at an end'
    elif name == BASE:
        why = "in adapter_names it means the base model"
    elif name in _taken():
        why = "the container of adapters and heads has an attribute of this name"
    if why:
        # a legal name that is like this one
        legal = re.sub(r"[^\w-]+", "_", name).strip("_")[:_LENGTH] or "my_task"
        legal = legal.encode()[:_BYTES].decode(errors="ignore")
        legal = f"{legal}_task" if legal in _taken() else legal
        advice = repr(legal) if other is None else argument(other, legal, "load_adapter")
        raise ConfigError(f"the name {name!r} cannot be used: {why}. Write {advice}.")
    return name


def one_of(**given: Any) -> Any:
    """Return the value of an argument with several names; None if it is not given.

    Args:
        **given: the names, with the values under each.

    Raises:
        ConfigError: the values differ.
    """
    found = [(name, value) for name, value in given.items() if value is not None]
    for name, value in found[:-1]:
        last, other = found[-1]
        if value is not other and value != other:
            raise ConfigError(
                f"{name}={value!r} and {last}={other!r} mean the same thing and differ. Write only "
                f"{last}={other!r}."
            )
    return found[-1][1] if found else None
