"""What an adapter trains of the base model itself: PEFT's `modules_to_save`, token rows and `bias`.

Each adapts the model by copies (`copies`) beside the adapters of the method, and belongs to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from adapterzoo.anatomy import Anatomy
from adapterzoo.config import AdapterConfig, ConfigUnion, Placement, config_class, field
from adapterzoo.errors import ConfigError
from adapterzoo.patterns import Saved, TokenIds

from .biases import BiasConfig
from .layers import SavedModulesConfig
from .rows import TokenRowsConfig


def all_placements(config: AdapterConfig, anatomy: Anatomy) -> list[Placement]:
    """Return the placements of a config, and those of its copies.

    Args:
        config: without one of the fields it has no such copies.
        anatomy: of the model.

    Raises:
        ConfigError: something would be trained in two ways.
        SiteError: a name matches nothing, nothing is left to adapt, or tokens are outside of
            the table.
    """
    if isinstance(config, ConfigUnion):
        return [p for member in config.members for p in all_placements(member, anatomy)]
    own, call = config.placements(anatomy), type(config).__name__
    names, gives_way = config.get("modules_to_save"), getattr(config, "gives_way", False)
    copies = [] if names is None else SavedModulesConfig(names=names).placements(anatomy)
    copied = {p.site.path for p in copies}
    adapted = [p for p in own if p.site.path not in copied]
    if copied and (not adapted or (len(adapted) < len(own) and not gives_way)):
        path = next(p.site.path for p in own if p.site.path in copied)
        raise ConfigError(
            f"{call}(modules_to_save={names!r}): the layer at {path!r} is one that the method "
            f"adapts itself. Write names that do not match it, or adapt other layers too."
        )
    rows = [p for table in _rows(config) for p in table.placements(anatomy)]
    paths = copied | {p.site.path for p in adapted}
    if twice := [p.site.path for p in rows if p.site.path in paths]:
        other = "modules_to_save" if twice[0] in copied else "target_modules"
        raise ConfigError(
            f"{call}: trainable_token_indices and {other} both change the table at {twice[0]!r}. "
            f"Leave one of them out there."
        )
    biases: list[Placement] = []
    if (kind := config.get("bias", "none")) != "none":
        layers = None if kind == "all" else tuple(dict.fromkeys(p.site.path for p in adapted))
        biases = BiasConfig(paths=layers).placements(anatomy)
    return [*adapted, *(p for p in biases if p.site.path not in copied), *copies, *rows]


def _rows(config: AdapterConfig) -> Iterator[TokenRowsConfig]:
    """Yield a config for each table."""
    given, dtype = config.get("trainable_token_indices"), config.get("dtype")
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

    modules_to_save: str | tuple[str, ...] | None = field(None, Saved(), ours=True)
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = field(
        None, TokenIds(), ours=True
    )
