"""Rows of the table of tokens, one set for each adapter: `trainable_token_indices`.

E'(t) = R[i] for the i-th token of the list, E(t) for all others; the rows R `[tokens, d]` start as
those of the table E. The padding token of the embedding gets no gradient there, as in torch. An
output layer that is tied to the table scores these tokens with R as well:
logits[t] = h · R[i] + b[t].

Differs from PEFT: the table is not copied in each forward; a bias of the output layer is kept;
several adapters can act in one call, and each row of a batch can have its own.
Cost: tokens · d parameters, in memory and in files, whatever the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.config import AdapterConfig, Placement, config_class
from adapterzoo.contracts import BaseLayer, replaced
from adapterzoo.errors import ConfigError, SiteError, listing
from adapterzoo.methods._init import DTYPES
from adapterzoo.patterns import matches

from .base import Copy, looked_up

ROWS = "token rows"
"""The location of the rows of a table; all modules that share the table share them."""


@config_class
class TokenRowsConfig(AdapterConfig):
    """The part of a config that its `trainable_token_indices` add, for one table.

    Attributes:
        table: name or end of the path of the embedding; None for the model's own table of tokens.
        tokens: their numbers, in ascending order.
        dtype: of the rows, by name; None for that of the table.
    """

    architecture: ClassVar[str] = "token_rows"

    table: str | None = None
    tokens: tuple[int, ...] = ()
    dtype: str | None = None

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each module that has the table.

        Raises:
            SiteError: there is no such table, or it has fewer tokens.
        """
        name = None if self.table is None else (self.table,)
        found = tables_in(anatomy, name, "{'name of an embedding': [ids]}")
        if len(found) > 1:
            paths = [path for group in found for path in group]
            raise SiteError(
                f"trainable_token_indices={{{self.table!r}: …}}: this is the name of "
                f"{listing(paths)}. Write the whole path of one."
            )
        return self.at(found[0], anatomy)

    def at(self, group: Sequence[str], anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each path of embeddings that share a table.

        Raises:
            SiteError: the table has fewer tokens.
        """
        tables = {site.path: site for site in anatomy if site.kind == "embedding"}
        size = tables[group[0]].d_in
        if outside := [token for token in self.tokens if token >= size]:
            raise SiteError(
                f"the table at {group[0]!r} has {size} tokens, without {listing(outside)}. Write "
                f"model.resize_token_embeddings({max(outside) + 1}) first, or smaller numbers."
            )
        return [Placement(tables[path], self, ROWS) for path in group]

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> TokenRows:
        """Return a fresh adapter for the site."""
        own = DTYPES[self.dtype] if self.dtype else dtype
        return TokenRows(self.tokens, site.d_out, device, own)


class TokenRows(Copy):
    """The table, or the output layer tied to it, with other rows for some tokens.

    Attributes:
        rows: R `[tokens, d]`.
        tokens: their numbers, in ascending order.
    """

    noun: ClassVar[str] = "a row of a table"
    stands_alone: ClassVar[bool] = True
    tokens: Tensor

    def __init__(
        self, tokens: tuple[int, ...], width: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the rows.

        Args:
            tokens: in ascending order.
            width: of the table.
            device: of the rows.
            dtype: of the rows.
        """
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(len(tokens), width, device=device, dtype=dtype))
        self.ids = tokens
        # the config has them, so that files need not
        numbers = torch.tensor(tokens, device=device, dtype=torch.long)
        self.register_buffer("tokens", numbers, persistent=False)

    def renumber(self) -> None:
        """Set the numbers again, after a model was made on the meta device."""
        self.tokens = torch.tensor(self.ids, device=self.rows.device, dtype=torch.long)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the embeddings `[*batch, d]` of tokens `x` `[*batch]`.

        In an output layer, return the logits `[*batch, vocab]` of features `x` `[*batch, d]`.
        """
        return self._scored(x, base) if x.is_floating_point() else self._embedded(x, base)

    def _embedded(self, x: Tensor, base: BaseLayer) -> Tensor:
        y, plain = base(x), base.original(x)
        ids = x.to(self.tokens.dtype).contiguous()
        at = torch.searchsorted(self.tokens, ids).clamp(max=len(self.tokens) - 1)  # [*batch]
        padding = base.padding_idx
        still = self.ids.index(padding) if padding in self.ids else None
        own = looked_up(at, self.rows, still, base, y.dtype)  # [*batch, d]
        listed = (self.tokens[at] == ids).unsqueeze(-1)  # [*batch, 1]
        return torch.where(listed, own if y is plain else y + (own - plain), y)

    def _scored(self, x: Tensor, base: BaseLayer) -> Tensor:
        y, plain = base(x), base.original(x)
        bias = None if base.bias is None else base.bias[self.tokens]  # [tokens]
        own = linear(x, self.rows.to(x.dtype), bias).to(y.dtype)  # [*batch, tokens]
        if y is not plain:
            own = own + (y - plain).index_select(-1, self.tokens)
        return y.index_copy(-1, self.tokens, own)

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the rows for a slot of the same tokens.

        Raises:
            ConfigError: it has rows of others.
        """
        if self.ids != slot.ids:
            raise ConfigError(
                f"the slot has rows of the tokens {listing(slot.ids)}, not of {listing(self.ids)}. "
                f"Write hotswap=False, overwrite_ok=True."
            )
        return super().in_slot(slot)

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight, `[d, vocab_size]`."""
        own, plain = self.rows.to(w.dtype).mT, base.weight[:, self.tokens].to(w.dtype)
        return w.index_copy(1, self.tokens, replaced(w[:, self.tokens], own, plain))

    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return the values of the table."""
        return {"rows": base.weight.mT[self.tokens]}


def tables_in(
    anatomy: Anatomy, names: str | tuple[str, ...] | None, hint: str
) -> list[tuple[str, ...]]:
    """Return the tables of a model, each as the paths of the embeddings that share it.

    Args:
        anatomy: of the model.
        names: of embeddings, as in `target_modules`; None: the model's own table of tokens.
        hint: how to name an embedding.

    Raises:
        SiteError: there is no such table.
    """
    tables = [site.path for site in anatomy if site.kind == "embedding"]
    if names is None:
        found = [path for path in tables if path == anatomy.own_table]
    else:
        found = [path for path in tables if matches(path, names)]
    parts = names if isinstance(names, tuple) else ()
    if not found or [name for name in parts if not any(matches(p, (name,)) for p in found)]:
        what = "table of tokens" if names is None else f"embedding {names!r}"
        raise SiteError(
            f"this model has no {what}, whose rows could be trained; embeddings: "
            f"{listing(tables)}. Write {hint}."
        )
    tied = {path: group for group in anatomy.shared_tables for path in group}
    return list(dict.fromkeys(tied.get(path, (path,)) for path in found))
