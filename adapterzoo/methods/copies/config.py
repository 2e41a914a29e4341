"""What an adapter trains of the base model itself: PEFT's `modules_to_save`, token rows and `bias`.

Each adapts the model by copies (`copies`) beside the adapters of the method, and belongs to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

from adapterzoo.anatomy import Anatomy
from adapterzoo.config_base import config_class
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import ConfigError, SiteError
from adapterzoo.fields import field

from .biases import BiasConfig
from .layers import Saved, SavedModulesConfig
from .rows import TokenIds, TokenRowsConfig

Names: TypeAlias = str | tuple[str, ...] | None
Tokens: TypeAlias = tuple[int, ...] | Mapping[str, tuple[int, ...]] | None

COPIES = frozenset({"modules_to_save", "trainable_token_indices", "bias"})
"""The fields that choose the copies."""


def with_copies(config: Any, anatomy: Anatomy) -> list[Placement]:
    """Return the placements of the method, and of the copies.

    Args:
        config: a `ConfigWithCopies`, or another config with these fields; without the field `bias`
            there are no copies of biases.
        anatomy: of the model.

    Raises:
        ConfigError: something would be trained in two ways.
        SiteError: a name matches nothing, nothing is left to adapt, or tokens are outside of
            the table.
    """
    own, names = config.placements(anatomy), config.modules_to_save
    copies = [] if names is None else SavedModulesConfig(names=names).placements(anatomy)
    copied = {p.site.path for p in copies}
    adapted = [p for p in own if p.site.path not in copied]
    if len(adapted) < len(own) and not config.gives_way:
        path = next(p.site.path for p in own if p.site.path in copied)
        raise ConfigError(
            f"{type(config).__name__}(modules_to_save={names!r}): the layer at {path!r} is "
            f"one where the method acts itself. Write names that do not match it."
        )
    if not adapted:
        raise SiteError(
            f"{type(config).__name__}(modules_to_save={names!r}): these have copies of all "
            f"layers that the config would adapt. Write fewer."
        )
    rows = [p for table in _rows(config) for p in table.placements(anatomy)]
    paths = {p.site.path for p in adapted}
    for path in (p.site.path for p in rows):
        if path in copied or path in paths:
            method = "target_modules" if config.gives_way else "the method"
            raise ConfigError(
                f"{type(config).__name__}: trainable_token_indices and "
                f"{'modules_to_save' if path in copied else method} both change the "
                f"table at {path!r}. Leave one of them out there."
            )
    biases: list[Placement] = []
    if (kind := config.get("bias", "none")) != "none":
        layers = None if kind == "all" else tuple(dict.fromkeys(p.site.path for p in adapted))
        biases = BiasConfig(paths=layers).placements(anatomy)
    return [*adapted, *(p for p in biases if p.site.path not in copied), *copies, *rows]


def _rows(config: Any) -> Iterator[TokenRowsConfig]:
    """Yield a config for each table."""
    given, dtype = config.trainable_token_indices, config.get("dtype")
    if isinstance(given, Mapping):
        for table, tokens in given.items():
            yield TokenRowsConfig(table=table, tokens=tokens, dtype=dtype)
    elif given is not None:
        yield TokenRowsConfig(tokens=given, dtype=dtype)


@config_class
class ConfigWithCopies(AdapterConfig):
    """Base of the configs whose adapters can have copies of parts of the base model.

    Attributes:
        modules_to_save: names of modules of which the adapter has copies of its own, or a regular
            expression; names of a module's layers, or of one around them.
        trainable_token_indices: numbers of the tokens whose rows in the table the adapter has for
            itself, in a tied output layer too; or a dict from names of embeddings to such numbers.
        gives_way: whether the method has no adapter at a copied layer, as in PEFT; otherwise a
            layer of the method cannot be copied.
    """

    gives_way: ClassVar[bool] = False

    modules_to_save: Names = field(None, Saved(), ours=True)
    trainable_token_indices: Tokens = field(None, TokenIds(), ours=True)

    def all_placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return the placements of the method, and of the copies; see `with_copies`."""
        return with_copies(self, anatomy)
