"""Every error that adapterzoo raises, and how its message is built.

```
AdapterZooError(Exception)
├── ConfigError(ValueError)                  a value, field or config string is not legal
│   ├── FieldError(TypeError)                there is no such field, or a value has the wrong type
│   └── MissingEntryError(KeyError)          a mapping has no value for a layer
├── SiteError(LookupError, ValueError)       the model has no place of the kind that was asked for
├── UnknownNameError(KeyError, ValueError)   no adapter, head or registry entry has this name
├── DuplicateNameError(ValueError)           the name is taken
├── CheckpointError(OSError, ValueError)     a file is missing, damaged, or does not fit the model
├── CompositionError(ValueError)             adapters cannot be combined in this way
│   ├── BatchError(IndexError)               the batch does not have the rows that they divide
│   └── SetupError(TypeError)                it is not a composition
├── StateError(RuntimeError, ValueError)     the model is not in a state that allows the call
├── KernelError(RuntimeError)                a kernel got operands that it cannot take
└── HubError(OSError, RuntimeError)          the Hub did not answer as it should
```

The classes of Python among the bases are those that `adapters` raises in the same places, so that
`except` clauses of its users keep working.

A message says what was asked, what is wrong (with the value), what is legal, and what to write.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar, cast

__all__ = [
    "AdapterZooError", "BaseModelWarning", "BatchError", "CheckpointError", "CompositionError",
    "ConfigError", "DuplicateNameError", "FieldError", "HubError", "KernelError",
    "MissingEntryError", "SetupError", "SiteError", "StateError", "UnknownNameError",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")

_SHOWN = 10
# characters of an argument in a message
_WIDTH = 80


class AdapterZooError(Exception):
    """Base of all errors of this library."""

    def __str__(self) -> str:
        """Return the message as it was written (`KeyError` would show its repr)."""
        return str(self.args[0]) if self.args else ""


class ConfigError(AdapterZooError, ValueError):
    """A config value, field or config string is not legal."""


class FieldError(ConfigError, TypeError):
    """A config has no such field, or a value or the config has the wrong type."""


class MissingEntryError(ConfigError, KeyError):
    """A mapping in a config has no value for a layer, and no default."""


class SiteError(AdapterZooError, LookupError, ValueError):
    """The model has no place of the kind that was asked for."""


class UnknownNameError(AdapterZooError, KeyError, ValueError):
    """No adapter, head or registry entry has this name."""


class DuplicateNameError(AdapterZooError, ValueError):
    """The name is taken."""


class CheckpointError(AdapterZooError, OSError, ValueError):
    """A file is missing, damaged, or does not fit the model."""


class CompositionError(AdapterZooError, ValueError):
    """Adapters cannot be combined in this way."""


class BatchError(CompositionError, IndexError):
    """The batch does not have the rows that a composition divides."""


class SetupError(CompositionError, TypeError):
    """A value is not a composition."""


class StateError(AdapterZooError, RuntimeError, ValueError):
    """The model is not in a state that allows the call."""


class KernelError(AdapterZooError, RuntimeError):
    """A kernel got operands that it cannot take."""


class HubError(AdapterZooError, OSError, RuntimeError):
    """The Hub did not answer as it should."""


class BaseModelWarning(UserWarning):
    """An adapter is loaded into another base model than the one that it was trained on."""


def short(value: object) -> str:
    """Return a value of a file as messages show it, at most 100 characters of it."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def listing(
    items: Iterable[object], *, limit: int = _SHOWN, show: Callable[[Any], str] = repr
) -> str:
    """Return the items as `'a', 'b', 'c' and 14 more`; the word `none` for an empty list.

    Args:
        items: what to show, in the order to show it.
        limit: how many are shown before the rest is counted.
        show: returns the text of an item.
    """
    shown = [show(item) for item in items]
    if not shown:
        return "none"
    rest = len(shown) - limit
    return ", ".join(shown[:limit]) + (f" and {rest} more" if rest > 0 else "")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, as `1 row` or `2 rows`.

    Args:
        count: how many there are.
        noun: in the singular; its plural ends with s.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def columns(rows: Iterable[Sequence[str]], right: Iterable[bool]) -> list[str]:
    """Return the rows of a table as lines.

    Args:
        rows: at least one, with one cell for each column.
        right: whether a column is aligned right.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    marks = zip(widths, right, strict=True)
    form = "  ".join(f"{{:{'>' if is_right else '<'}{width}}}" for width, is_right in marks)
    return [form.format(*row).rstrip() for row in rows]


def extend(error: AdapterZooError, more: str) -> None:
    """Add a sentence to the message of an error, before it is raised again.

    Args:
        error: the error, changed in place.
        more: what a caller of the function that raised it knows, with the space or line before it.
    """
    error.args = (f"{error}{more}", *error.args[1:])


def unknown_name(
    subject: str, kind: str, name: object, known: Iterable[str], kinds: str | None = None
) -> UnknownNameError:
    """Return the error for an unknown name, with the nearest known name and all others.

    Args:
        subject: of the message, e.g. a config; empty below a public function.
        kind: what the name should have been, e.g. `"adapter"`.
        name: the name that was not found.
        known: all the names that exist.
        kinds: the plural of `kind`; None: it ends with s, or with ies for y.
    """
    names = sorted(known)
    folded = {each.casefold(): each for each in names}
    near = [folded[each] for each in get_close_matches(str(name).casefold(), folded, n=1)]
    if kinds is None:
        kinds = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    hint = f"Did you mean {near[0]!r}?" if near else f"Known {kinds}: {listing(names)}."
    also = f" Known {kinds}: {listing(names)}." if near and len(names) > 1 else ""
    start = f"{subject}: " if subject else ""
    return UnknownNameError(f"{start}there is no {kind} {name!r}. {hint}{also}")


def no_attribute(
    module: str, name: str, known: Iterable[str], others: Callable[[str], list[str]]
) -> AttributeError | ImportError:
    """Return the error of a package's `__getattr__`, with what to write instead.

    It is an `ImportError` inside `from package import name`, which would replace the message of an
    `AttributeError`; `hasattr` returns False.

    Args:
        module: the package.
        name: that it does not have.
        known: its public names.
        others: returns what else can be written for the name.
    """
    # modules below the package are asked for before they are imported
    if name.startswith("__") or find_spec(f"{module}.{name}"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    folded = {each.casefold(): each for each in known}
    near = [folded[each] for each in get_close_matches(name.casefold(), folded, 1, 0.75)]
    hints = ", or ".join([*near, *others(name)] or [f"one of dir({module})"])
    # above __getattr__ is who asked
    is_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    kind = ImportError if is_import else AttributeError
    return kind(f"{module} has no {name!r}. Write {hints}.")


class _Calls(threading.local):
    """The outermost public call of a thread.

    Attributes:
        inside: whether one is running.
        spell: how its caller writes an argument; None: as in Python.
        takes: names of its arguments; None: all.
    """

    inside = False
    spell: Callable[[str, object], str] | None = None
    takes: frozenset[str] | None = None


_calls = _Calls()


@contextlib.contextmanager
def naming(
    call: str | Callable[[], str],
    spell: Callable[[str, object], str] | None = None,
    takes: frozenset[str] | None = None,
) -> Iterator[None]:
    """Prefix errors with the call that the user wrote; only the outermost call is named.

    Args:
        call: that call, e.g. `"add_adapter('a')"`, or a function that returns it.
        spell: how the user writes an argument, from its name and value; None: as in Python.
        takes: names of the arguments of the call; None: all.
    """
    if _calls.inside:
        yield
        return
    _calls.inside, _calls.spell, _calls.takes = True, spell, takes
    try:
        yield
    except AdapterZooError as error:
        error.args = (f"{call if isinstance(call, str) else call()}: {error}", *error.args[1:])
        raise
    finally:
        _calls.inside, _calls.spell, _calls.takes = False, None, None


def names_call(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: errors from inside it begin with the call the user wrote.

    `add_adapter('a', config)` gives `add_adapter('a'): …`; only the outermost decorated call is
    named, since that is what the user typed. Functions below need no name of their caller.

    Args:
        function: a function, or a method whose first parameter is `self` or `cls`.
    """
    signature = inspect.signature(function).parameters
    parameters = list(signature)
    is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
    takes = None if is_open else frozenset(parameters)
    is_method = parameters[:1] in (["self"], ["cls"])
    first = parameters[is_method : is_method + 1]
    # the user writes the name of the class
    path = function.__qualname__.split(".")
    written = path[-2] if path[-1] == "__init__" else path[-1]

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        def call() -> str:
            given = [*args[is_method:][:1], *(kwargs[name] for name in first if name in kwargs)]
            return f"{written}({_shortened(given[0]) if given else ''})"

        with naming(call, takes=takes):
            return function(*args, **kwargs)

    return cast("Callable[P, T]", named)


def names_calls(cls: type[T]) -> type[T]:
    """Decorate a class: `names_call` for each of its own public methods but `forward…`."""
    for name, member in list(vars(cls).items()):
        if inspect.isfunction(member) and not name.startswith(("_", "forward")):
            setattr(cls, name, names_call(member))
    return cls


def argument(name: str, value: object, of: str = "save_adapter") -> str:
    """Spell an argument as the reader writes it: `format='peft'`, or `--to peft` in a shell.

    Args:
        name: of the argument in Python.
        value: to write for it.
        of: a method that takes the argument, shown where the call of the user does not.
    """
    if _calls.spell is not None:
        return _calls.spell(name, value)
    spelled = f"{name}={value!r}"
    return spelled if _calls.takes is None or name in _calls.takes else f"{of}(…, {spelled})"


def in_python(text: str, otherwise: str = "") -> str:
    """Return the part of a hint that only a reader who writes Python can use.

    Args:
        text: that part.
        otherwise: the part for a reader who writes commands.
    """
    return text if _calls.spell is None else otherwise


def _shortened(value: Any) -> str:
    text = repr(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if "\n" in text:
        # such as a model, which prints a line for each layer
        return type(value).__name__
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def __dir__() -> list[str]:
    return __all__
