"""The names of adapters and heads: which are legal, and their check."""

from __future__ import annotations

import re

from torch import nn

from .errors import ConfigError

FUSION = "fusion:"
"""Precedes the name of a fusion among those of adapters; no adapter can have such a name."""

_LENGTH = 128
# file systems count bytes, 255 of them, and a temporary sibling has a longer name
_BYTES = 200
# a name is a folder name, a part of a state-dict key, which transformers reads as a regular
# expression, and an element of a comma-joined list
_FORBIDDEN = r"./\\,:;|()\[\]*?\"'<>\x00-\x1f\x7f\ud800-\udfff"
_LEGAL = re.compile(rf"[^\s{_FORBIDDEN}](?:[^{_FORBIDDEN}]*[^\s{_FORBIDDEN}])?")

# transformers finds modules by getattr
_TAKEN = frozenset(dir(nn.ModuleDict()))


def check_name(name: object) -> str:
    """Return the name if it is legal for an adapter or a head.

    Args:
        name: 1 to 128 characters, at most 200 bytes in UTF-8; no dot, slash, comma or other
            character that has a meaning in paths, keys or lists; no blank at either end.

    Raises:
        ConfigError: the name is not legal.
    """
    if not isinstance(name, str):
        raise ConfigError(
            f"a name is a string, got {name!r} of type {type(name).__name__}. Write 'my_task'."
        )
    if name in _TAKEN:
        raise ConfigError(
            f"the name {name!r} cannot be used: the container of adapters and heads has "
            f"an attribute of this name. Write {name + '_task'!r}."
        )
    if len(name) <= _LENGTH and _LEGAL.fullmatch(name) and len(name.encode()) <= _BYTES:
        return name
    legal = re.sub(r"[^\w-]+", "_", name).strip("_")[:_LENGTH] or "my_task"
    legal = legal.encode()[:_BYTES].decode(errors="ignore")
    legal = f"{legal}_task" if legal in _TAKEN else legal
    raise ConfigError(
        f"the name {name!r} cannot be used: it becomes a folder and a part of parameter "
        f"names. Legal are 1 to {_LENGTH} characters, at most {_BYTES} bytes in UTF-8, without "
        f"blanks at the ends and without . / \\ , : ; | ( ) [ ] * ? quotes < >. Write {legal!r}."
    )
