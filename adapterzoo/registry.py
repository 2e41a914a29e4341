"""A registry: names to the things that registered themselves under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from .errors import DuplicateNameError, UnknownNameError, unknown_name

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Names to things; a thing enters by the decorator `@registry.register("name")`."""

    def __init__(self, kind: str, decorates: str | None = None) -> None:
        """Start empty.

        Args:
            kind: what the entries are, for messages: `"config string"`, `"head type"`; the name
                of the registry is this in the plural.
            decorates: above what those who add an entry of their own write `register`, where
                messages shall say so.
        """
        self.kind = kind
        self._decorates = decorates
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """A decorator that enters what it decorates under each of the names.

        Raises:
            DuplicateNameError: a name belongs to something else already.
        """

        def enter(entry: T) -> T:
            for name in names:
                if self._entries.get(name, entry) is not entry:
                    raise DuplicateNameError(
                        f"register({name!r}): this {self.kind} is taken by "
                        f"{self._entries[name]!r}. Write another name."
                    )
            self._entries.update(dict.fromkeys(names, entry))
            return entry

        return enter

    def find(self, name: object, call: str) -> T:
        """The entry of this name.

        Args:
            name: as the user wrote it.
            call: what the user called, for the message.

        Raises:
            UnknownNameError: nothing is registered under the name.
        """
        if not isinstance(name, str) or name not in self._entries:
            error = unknown_name(call, self.kind, name, self._entries)
            if self._decorates is None:
                raise error
            raise UnknownNameError(
                f"{error} For one of your own write @{self.kind}s.register({name!r}) above "
                f"{self._decorates}, and import its file."
            )
        return self._entries[name]

    def __getitem__(self, name: str) -> T:
        """The entry of this name."""
        return self.find(name, f"{self.kind} lookup")

    def __iter__(self) -> Iterator[str]:
        """The names, in the order of registration."""
        return iter(self._entries)

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._entries)
