"""A registry: names and the objects registered under them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from .errors import DuplicateNameError, extend, in_python, unknown_name

RECOMMENDED = "lora"
"""The config string for those who name no method, as `docs/choosing.md` explains."""

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping whose entries register themselves with `@registry.register("name")`.

    The first look-up imports the package whose files register the entries, so that a registry is
    complete whatever has been imported before.
    """

    def __init__(
        self, kind: str, decorates: str | None = None, filled_by: str | None = None
    ) -> None:
        """Start empty.

        Args:
            kind: what the entries are, for messages: `"config string"`, `"head type"`; the
                registry is named by its plural.
            decorates: the object that users decorate to add an entry; None if messages must not
                suggest that.
            filled_by: the package that registers the entries when it is imported; None if the
                module of the registry imports it.
        """
        self.kind = kind
        self._filled_by = filled_by
        self._decorates = decorates
        self._own: dict[str, T] = {}

    @property
    def _entries(self) -> dict[str, T]:
        if self._filled_by is not None:
            importlib.import_module(self._filled_by)
        return self._own

    def register(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under each of the names.

        Raises:
            DuplicateNameError: a name belongs to another object.
        """

        def enter(entry: T) -> T:
            for name in names:
                if self._own.get(name, entry) is not entry:
                    raise DuplicateNameError(
                        f"register({name!r}): this {self.kind} is taken by "
                        f"{self._own[name]!r}. Write another name."
                    )
            self._own.update(dict.fromkeys(names, entry))
            return entry

        return enter

    def find(self, name: object) -> T:
        """Return the entry of this name.

        Raises:
            UnknownNameError: nothing is registered under the name.
        """
        entries = self._entries
        if isinstance(name, str) and name in entries:
            return entries[name]
        error = unknown_name("", self.kind, name, entries)
        if self._decorates is not None:
            decorator = f"@{self.kind.replace(' ', '_')}s.register({name!r})"
            own = f" For one of your own write {decorator} above {self._decorates}."
            extend(error, in_python(own))
        raise error

    def __getitem__(self, name: str) -> T:
        """Return the entry of this name; see `find`."""
        return self.find(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of registration."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._entries)
