"""A registry: names and the objects registered under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from .errors import DuplicateNameError, UnknownNameError, in_python, unknown_name

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping whose entries register themselves with `@registry.register("name")`."""

    def __init__(self, kind: str, decorates: str | None = None) -> None:
        """Start empty.

        Args:
            kind: what the entries are, for messages: `"config string"`, `"head type"`; the
                registry is named by its plural.
            decorates: the object that users decorate to add an entry; None if messages must not
                suggest that.
        """
        self.kind = kind
        self._decorates = decorates
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under each of the names.

        Raises:
            DuplicateNameError: a name belongs to another object.
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

    def find(self, name: object) -> T:
        """Return the entry of this name.

        Raises:
            UnknownNameError: nothing is registered under the name.
        """
        if isinstance(name, str) and name in self._entries:
            return self._entries[name]
        error = unknown_name("", self.kind, name, self._entries)
        if self._decorates is None:
            raise error
        decorator = f"@{self.kind.replace(' ', '_')}s.register({name!r})"
        own = (
            f" For one of your own write {decorator} above {self._decorates}, and import its file."
        )
        raise UnknownNameError(f"{error}{in_python(own)}")

    def __getitem__(self, name: str) -> T:
        """Return the entry of this name; see `find`."""
        return self.find(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of registration."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._entries)
