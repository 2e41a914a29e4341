"""What is trained beside an adapter, and belongs to it: PEFT's fields.

`modules_to_save`: whole modules; `trainable_token_indices`: rows of the table of tokens;
`bias`: biases. Each adds adapters of its own kind to those of the method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import ConfigError, SiteError, listing
from adapterzoo.fields import Choice, field

from ._layer_copy import CopyConfig
from ._own_bias import BiasConfig
from ._patterns import Modules, matches
from ._token_ids import TokenIds
from ._token_rows import TokenRowsConfig

BESIDE = frozenset({"modules_to_save", "trainable_token_indices", "bias"})
"""The fields that choose what is trained beside an adapter."""


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
class BesideConfig(AdapterConfig):
    """Base of the configs beside whose adapters more can be trained.

    Attributes:
        modules_to_save: names of modules of which the adapter has copies of its own, or a regular
            expression; names of a module's layers, or of one around them.
        trainable_token_indices: numbers of the tokens whose rows in the table the adapter has for
            itself, in a tied output layer too; or a dict from names of embeddings to such numbers.
    """

    # what else may change a table, for messages
    _changing: ClassVar[str] = "the method"

    modules_to_save: str | tuple[str, ...] | None = field(None, Modules(), ours=True)
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = field(
        None, TokenIds(), ours=True
    )

    def all_placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return the placements of the method, and of what is trained beside it.

        Raises:
            ConfigError: something would be trained in two ways.
            SiteError: a name matches nothing, or tokens are outside of the table.
        """
        names = self.modules_to_save
        copies = [] if names is None else SavedModulesConfig(names=names).placements(anatomy)
        copied = {p.site.path for p in copies}
        own = self._beside_copies(self.placements(anatomy), copied)
        taken = {p.site.path for p in own}
        for placement in copies:
            if (path := placement.site.path) in taken:
                raise ConfigError(
                    f"{type(self).__name__}(modules_to_save={names!r}): the layer at {path!r} is "
                    f"one where the method acts itself. Write names that do not match it."
                )
        rows = [p for config in self._rows() for p in config.placements(anatomy)]
        for placement in rows:
            path = placement.site.path
            if path in copied or path in taken:
                other = "modules_to_save" if path in copied else self._changing
                raise ConfigError(
                    f"{type(self).__name__}: trainable_token_indices and {other} both change the "
                    f"table at {path!r}. Leave one of them out there."
                )
        return [*own, *self._biases(own, copied, anatomy), *copies, *rows]

    def _beside_copies(self, own: list[Placement], copied: Set[str]) -> list[Placement]:
        """Return the placements of the method where layers at these paths have copies."""
        return own

    def _biases(self, own: list[Placement], copied: Set[str], anatomy: Anatomy) -> list[Placement]:
        """Return the placements of biases."""
        return []

    def _rows(self) -> Iterator[TokenRowsConfig]:
        """Yield a config for each table."""
        given, dtype = self.trainable_token_indices, self.get("dtype")
        if isinstance(given, Mapping):
            for table, tokens in given.items():
                yield TokenRowsConfig(table=table, tokens=tokens, dtype=dtype)
        elif given is not None:
            yield TokenRowsConfig(tokens=given, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class LayersBesideConfig(BesideConfig):
    """Base of the configs of methods at layers, whose biases can be trained too.

    A layer in `modules_to_save` has no other adapter of this name, as in PEFT.

    Attributes:
        bias: "all": the adapter has all biases of the base model for itself; "lora_only": those
            of the layers that it adapts; "none".
    """

    _changing: ClassVar[str] = "target_modules"

    bias: str = field("none", Choice("none", "all", "lora_only"), ours=True)

    def _beside_copies(self, own: list[Placement], copied: Set[str]) -> list[Placement]:
        adapted = [p for p in own if p.site.path not in copied]
        if not adapted:
            raise SiteError(
                f"{type(self).__name__}(modules_to_save={self.modules_to_save!r}): these have "
                f"copies of all layers that the config would adapt. Write fewer."
            )
        return adapted

    def _biases(self, own: list[Placement], copied: Set[str], anatomy: Anatomy) -> list[Placement]:
        if self.bias == "none":
            return []
        paths = dict.fromkeys(p.site.path for p in own) if self.bias != "all" else None
        config = BiasConfig(paths=None if paths is None else tuple(paths))
        return [p for p in config.placements(anatomy) if p.site.path not in copied]
