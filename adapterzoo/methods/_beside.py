"""What is trained beside an adapter, and belongs to it: PEFT's fields.

`modules_to_save`: whole modules; `trainable_token_indices`: rows of the table of tokens;
`bias`: biases. Each adds adapters of its own kind to those of the method.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from adapterzoo.anatomy import Anatomy
from adapterzoo.configs import Placement
from adapterzoo.errors import ConfigError
from adapterzoo.fields import Check, Choice, field

from ._own_bias import BiasConfig
from ._saved_modules import SavingConfig
from ._token_rows import TokenRowsConfig

BESIDE = frozenset({"modules_to_save", "trainable_token_indices", "bias"})
"""The fields that choose what is trained beside an adapter."""


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


@dataclass(frozen=True, kw_only=True)
class BesideConfig(SavingConfig):
    """Base of the configs beside whose adapters more can be trained.

    Attributes:
        trainable_token_indices: numbers of the tokens whose rows in the table the adapter has for
            itself, in a tied output layer too; or a dict from names of embeddings to such numbers.
        bias: "all": the adapter has all biases of the base model for itself; "lora_only": those
            of the layers that it adapts; "none".
    """

    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = field(
        None, TokenIds(), ours=True
    )
    bias: str = field("none", Choice("none", "all", "lora_only"), ours=True)

    def all_placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return the placements of the method, and of what is trained beside it.

        Raises:
            ConfigError: something would be trained in two ways.
            SiteError: a name matches nothing, or tokens are outside of the table.
        """
        adapted, copies = self._adapted(anatomy)
        copied = {p.site.path for p in copies}
        rows = [p for config in self._rows() for p in config.placements(anatomy)]
        for placement in rows:
            path = placement.site.path
            if path in copied or any(p.site.path == path for p in adapted):
                other = "modules_to_save" if path in copied else "target_modules"
                raise ConfigError(
                    f"{type(self).__name__}: trainable_token_indices and {other} both change the "
                    f"table at {path!r}. Leave one of them out there."
                )
        biases: list[Placement] = []
        if self.bias != "none":
            paths = dict.fromkeys(p.site.path for p in adapted) if self.bias != "all" else None
            config = BiasConfig(paths=None if paths is None else tuple(paths))
            biases = [p for p in config.placements(anatomy) if p.site.path not in copied]
        return [*adapted, *biases, *copies, *rows]

    def _rows(self) -> Iterator[TokenRowsConfig]:
        """Yield a config for each table."""
        given, dtype = self.trainable_token_indices, self.get("dtype")
        if isinstance(given, Mapping):
            for table, tokens in given.items():
                yield TokenRowsConfig(table=table, tokens=tokens, dtype=dtype)
        elif given is not None:
            yield TokenRowsConfig(tokens=given, dtype=dtype)
