"""The check of `trainable_token_indices`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from adapterzoo.fields import Check


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
