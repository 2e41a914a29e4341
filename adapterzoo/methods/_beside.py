"""What is trained beside an adapter, and belongs to it: PEFT's fields.

`modules_to_save`: whole modules; `trainable_token_indices`: rows of the table of tokens;
`bias`: biases. Each adds adapters of its own kind to those of the method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import ClassVar

from adapterzoo.anatomy import Anatomy
from adapterzoo.config_base import config_class
from adapterzoo.configs import Placement
from adapterzoo.errors import ConfigError
from adapterzoo.fields import Choice, field

from ._own_bias import BiasConfig
from ._saved_modules import SavingConfig
from ._token_ids import TokenIds
from ._token_rows import TokenRowsConfig

BESIDE = frozenset({"modules_to_save", "trainable_token_indices", "bias"})
"""The fields that choose what is trained beside an adapter."""


@config_class
class BesideConfig(SavingConfig):
    """Base of the configs beside whose adapters more can be trained.

    Attributes:
        trainable_token_indices: numbers of the tokens whose rows in the table the adapter has for
            itself, in a tied output layer too; or a dict from names of embeddings to such numbers.
    """

    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = field(
        None, TokenIds(), ours=True
    )

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
                method = "target_modules" if self.gives_way else "the method"
                other = "modules_to_save" if path in copied else method
                raise ConfigError(
                    f"{type(self).__name__}: trainable_token_indices and {other} both change the "
                    f"table at {path!r}. Leave one of them out there."
                )
        return [*adapted, *self._biases(adapted, copied, anatomy), *copies, *rows]

    def _biases(
        self, adapted: list[Placement], copied: Set[str], anatomy: Anatomy
    ) -> list[Placement]:
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


@config_class
class LayersBesideConfig(BesideConfig):
    """Base of the configs of methods at layers, whose biases can be trained too.

    Attributes:
        bias: "all": the adapter has all biases of the base model for itself; "lora_only": those
            of the layers that it adapts; "none".
    """

    gives_way: ClassVar[bool] = True

    bias: str = field("none", Choice("none", "all", "lora_only"), ours=True)

    def _biases(
        self, adapted: list[Placement], copied: Set[str], anatomy: Anatomy
    ) -> list[Placement]:
        if self.bias == "none":
            return []
        paths = dict.fromkeys(p.site.path for p in adapted) if self.bias != "all" else None
        config = BiasConfig(paths=None if paths is None else tuple(paths))
        return [p for p in config.placements(anatomy) if p.site.path not in copied]
