"""The check of `trainable_token_indices`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adapterzoo.anatomy import Anatomy
from adapterzoo.errors import ConfigError, listing
from adapterzoo.fields import Check

from ._patterns import matches, names_below


class TokenIds(Check):
    """Numbers of tokens, or a mapping from names of embeddings to them; they are sorted."""

    legal = (
        "a list of different token numbers from 0, or a dict from names of embeddings to such lists"
    )

    def convert(self, value: object) -> object:
        """Return sorted tuples."""
        if isinstance(value, Mapping):
            return {name: _sorted(ids) for name, ids in value.items()}
        return _sorted(value)

    def below(self, value: Any, prefix: str, anatomy: Anatomy) -> Any:
        """Return a mapping with names of the same embeddings; see `Check.below`.

        Raises:
            ConfigError: in PEFT, only some of the embeddings that share a table get the rows.
        """
        if not isinstance(value, Mapping):
            return value
        paths = [site.path for site in anatomy if site.kind == "embedding"]
        names = {key: names_below((key,), prefix, paths, str.endswith) for key in value}
        for key, each in names.items():
            group = next((g for g in anatomy.shared_tables for p in g if matches(p, each)), ())
            own = anatomy.own_table
            if own in group and not matches(own, each):
                raise ConfigError(
                    f"trainable_token_indices={{{key!r}: …}}: the table is shared by "
                    f"{listing(group)}, and in PEFT the others would keep their rows. Write "
                    f"trainable_token_indices={{{own!r}: …}} for all of them."
                )
        found = {name: ids for key, ids in value.items() for name in names[key]}
        return value if found == value else found

    def fits(self, value: object) -> bool:
        """Return whether there are any numbers, each a whole one from 0 and there once."""
        if value is None:
            return True
        if isinstance(value, Mapping):
            return bool(value) and all(
                isinstance(name, str) and bool(name) and _are_ids(ids)
                for name, ids in value.items()
            )
        return _are_ids(value)

    def nearest(self, value: object, default: object) -> object:
        """Return the legal numbers among them."""
        ids = value if isinstance(value, Iterable) and not isinstance(value, Mapping | str) else ()
        return sorted({n for n in ids if type(n) is int and n >= 0}) or [0, 1]


def _sorted(value: object) -> object:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    listed = tuple(value)
    return tuple(sorted(listed)) if all(type(n) is int for n in listed) else listed


def _are_ids(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(type(n) is int and n >= 0 for n in value)
        and len({*value}) == len(value)
    )
