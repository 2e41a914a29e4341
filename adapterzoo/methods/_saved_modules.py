"""Whole modules that are trained beside an adapter: PEFT's `modules_to_save`."""

from __future__ import annotations

from typing import ClassVar

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.config_base import config_class
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import ConfigError, SiteError, listing
from adapterzoo.fields import field

from ._layer_copy import CopyConfig
from ._patterns import Modules, matches


class Saved(Modules):
    """Names of modules, which PEFT compares with the ends of paths, within words too."""

    def paths(self, anatomy: Anatomy) -> list[str]:
        """Return the paths of all modules with parameters."""
        layers = (site.path for site in (*anatomy, *anatomy.others))
        return [*dict.fromkeys(path for layer in layers for path in _around(layer))]

    @staticmethod
    def fits_in_peft(path: str, name: str) -> bool:
        """Return whether the path ends with the name."""
        return path.endswith(name)


@config_class
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
    return any(matches(each, wanted) for each in _around(path))


def _around(path: str) -> list[str]:
    """Return the paths of a layer and of the modules around it, outermost first."""
    names = path.split(".")
    return [".".join(names[:end]) for end in range(1, len(names) + 1)]


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


@config_class
class SavingConfig(AdapterConfig):
    """Base of the configs beside whose adapters whole modules can be trained.

    Attributes:
        modules_to_save: names of modules of which the adapter has copies of its own, or a regular
            expression; names of a module's layers, or of one around them.
        gives_way: whether the method has no adapter at such a layer, as in PEFT; otherwise it must
            not be one of the method's own.
    """

    gives_way: ClassVar[bool] = False

    modules_to_save: str | tuple[str, ...] | None = field(None, Saved(), ours=True)

    def all_placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return the placements of the method, and of what is trained beside it.

        Raises:
            ConfigError: the method is at a layer of its own that has a copy.
            SiteError: a name matches nothing, or nothing is left to adapt.
        """
        adapted, copies = self._adapted(anatomy)
        return [*adapted, *copies]

    def _adapted(self, anatomy: Anatomy) -> tuple[list[Placement], list[Placement]]:
        """Return the placements of the method, and those of copies, which other ones give way to.

        Raises:
            ConfigError: the method is at a layer of its own that has a copy.
            SiteError: a name matches nothing, or nothing is left to adapt.
        """
        own, names = self.placements(anatomy), self.modules_to_save
        copies = [] if names is None else SavedModulesConfig(names=names).placements(anatomy)
        copied = {p.site.path for p in copies}
        both = [p.site.path for p in own if p.site.path in copied]
        if both and not self.gives_way:
            raise ConfigError(
                f"{type(self).__name__}(modules_to_save={names!r}): the layer at {both[0]!r} is "
                f"one where the method acts itself. Write names that do not match it."
            )
        adapted = [p for p in own if p.site.path not in copied]
        if not adapted:
            raise SiteError(
                f"{type(self).__name__}(modules_to_save={self.modules_to_save!r}): these have "
                f"copies of all layers that the config would adapt. Write fewer."
            )
        return adapted, copies
