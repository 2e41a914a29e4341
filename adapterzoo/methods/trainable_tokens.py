"""Trainable tokens — rows of an embedding that each adapter trains for itself.

No paper; PEFT's method of that name. E'(t) = R[i] for the i-th token of the list, E(t) for all
others; an output layer tied to the table also scores these tokens with R. The field
`trainable_token_indices` of other methods trains the same in addition to an adapter.

Differs from PEFT: the table is not copied in each forward; a tied output layer keeps its bias;
adapters with the same tokens can act in one call.
Cost: tokens · d parameters, in memory and in files, whatever the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from adapterzoo.anatomy import Anatomy
from adapterzoo.config import AdapterConfig, Placement, architectures, config_class, field
from adapterzoo.errors import ConfigError
from adapterzoo.patterns import Modules, TokenIds
from adapterzoo.peft_arguments import PeftArgument, PeftArguments
from adapterzoo.spelling import PeftSpelling, spelled

from ._copies import TokenRowsConfig, tables_in
from ._init import DTYPE
from ._peft import TARGETS


class ListedTokens(TokenIds):
    """Token ids; they are sorted."""

    legal = "a list of different token ids from 0"

    def fits(self, value: object) -> bool:
        """Return whether the value is a non-empty list of different integers from 0."""
        return not isinstance(value, Mapping) and super().fits(value)


@architectures.register("trainable_tokens")
@spelled(
    lambda config: PeftSpelling(
        config=config,
        peft_type="TRAINABLE_TOKENS",
        rows_field="token_indices",
        arguments=PeftArguments(
            class_name="TrainableTokensConfig",
            fields={
                "token_indices": PeftArgument([], "token_indices"),
                "target_modules": TARGETS["target_modules"],
                "init_weights": PeftArgument(True, "init_weights"),
            },
        ),
    )
)
@config_class
class TrainableTokensConfig(AdapterConfig):
    """Config of trainable tokens.

    Attributes:
        token_indices: ids of the tokens whose rows the adapter has for itself.
        target_modules: names or last parts of paths of embeddings, or a regular expression for
            whole paths; None: the model's own table of tokens.
        init_weights: whether rows start as copies of the table's; False: normal with deviation 1.
        dtype: dtype of the rows, by name ("float32"); None for that of the table.
    """

    architecture: ClassVar[str] = "trainable_tokens"

    token_indices: tuple[int, ...] | None = field(None, ListedTokens())
    target_modules: str | tuple[str, ...] | None = field(None, Modules())
    init_weights: bool = True
    dtype: str | None = field(None, DTYPE)

    @property
    def slot_fields(self) -> frozenset[str]:
        """All fields, because tokens and tables themselves are compared."""
        return frozenset(self.field_names())

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each module with one of the tables.

        Raises:
            ConfigError: there are no tokens.
            SiteError: there is no such table, or it has fewer tokens.
        """
        tokens = self.token_indices
        if tokens is None:
            raise ConfigError("there are no tokens to train. Write token_indices=[…].")
        found: list[Placement] = []
        for group in tables_in(anatomy, self.target_modules, "target_modules=['name']"):
            rows = TokenRowsConfig(
                table=group[0], tokens=tokens, dtype=self.dtype, init_weights=self.init_weights
            )
            found += rows.at(group, anatomy)
        return found
