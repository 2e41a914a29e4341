"""What is trained beside an adapter, and belongs to it: PEFT's fields.

`modules_to_save`: whole modules; `trainable_token_indices`: rows of the table of tokens;
`bias`: biases. Each adds adapters of its own kind to those of the method.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import ConfigError, SiteError, listing
from adapterzoo.fields import Check, Choice, field

from ._layer_copy import CopyConfig
from ._own_bias import BiasConfig
from ._patterns import Modules, matches
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
class SavedModulesConfig(CopyConfig):
    """The part of a config that its `modules_to_save` add.

    Attributes:
        names: of modules; each layer in one gets a copy.
    """

    architecture: ClassVar[str] = "modules_to_save"

    names: str | tuple[str, ...] = ()

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each layer in the modules.

        Raises:
            SiteError: a name matches no module with parameters, or a layer cannot be copied.
        """
        sites = {s.path: s for s in (*anatomy, *anatomy.others)}
        # a string is one pattern, a tuple holds names
        given = (self.names,) if isinstance(self.names, str) else self.names
        for name in given:
            one = name if isinstance(self.names, str) else (name,)
            if not any(_is_in(path, one) for path in sites):
                known = sorted({name for path in sites for name in path.split(".")})
                names = [name for name in known if not name.isdecimal()]
                raise SiteError(
                    f"modules_to_save={self.names!r}: no module of the base model matches "
                    f"{name!r}. Names of modules: {listing(names, limit=30)}. Write some of "
                    f"these, or leave it out; a head is trained and saved without it."
                )
        found = [site for path, site in sites.items() if _is_in(path, self.names)]
        for site in found:
            _refuse_shared(site, anatomy)
        return [Placement(site, self, "modules_to_save") for site in found]


def _is_in(path: str, wanted: str | tuple[str, ...]) -> bool:
    """Return whether a layer, or a module around it, matches."""
    names = path.split(".")
    return any(matches(".".join(names[:end]), wanted) for end in range(1, len(names) + 1))


def _refuse_shared(site: Site, anatomy: Anatomy) -> None:
    group = next((group for group in anatomy.shared_tables if site.path in group), ())
    if group:
        raise SiteError(
            f"modules_to_save: the table at {site.path!r} is shared by {listing(group)}, so that a "
            f"copy of one would not act as the table. Write trainable_token_indices=[…], or "
            f"train_adapter(…, train_embeddings=True)."
        )
    if site.parameter is not None:
        raise SiteError(
            f"modules_to_save: {site.path!r} computes with parameters such as {site.parameter!r} "
            f"itself, and its copy could not run in its place. Leave it out."
        )


@dataclass(frozen=True, kw_only=True)
class SavingConfig(AdapterConfig):
    """Base of the configs beside whose adapters whole modules can be trained.

    Attributes:
        modules_to_save: names of modules of which the adapter has copies of its own, or a regular
            expression; names of a module's layers, or of one around them. Such a layer has no
            other adapter of this name, as in PEFT.
    """

    modules_to_save: str | tuple[str, ...] | None = field(None, Modules(), ours=True)

    def all_placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return the placements of the method, and of what is trained beside it.

        Raises:
            SiteError: a name matches nothing, or nothing is left to adapt.
        """
        adapted, copies = self._adapted(anatomy)
        return [*adapted, *copies]

    def _adapted(self, anatomy: Anatomy) -> tuple[list[Placement], list[Placement]]:
        """Return the placements of the method, and those of copies, which other ones give way to.

        Raises:
            SiteError: a name matches nothing, or nothing is left to adapt.
        """
        own, names = self.placements(anatomy), self.modules_to_save
        copies = [] if names is None else SavedModulesConfig(names=names).placements(anatomy)
        copied = {p.site.path for p in copies}
        adapted = [p for p in own if p.site.path not in copied]
        if not adapted:
            raise SiteError(
                f"{type(self).__name__}(modules_to_save={self.modules_to_save!r}): these have "
                f"copies of all layers that the config would adapt. Write fewer."
            )
        return adapted, copies


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
