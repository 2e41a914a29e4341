"""An adapter's own table of tokens, which `train_adapter(…, train_embeddings=True)` trains.

E'(x) = T[x] · scale with T `[vocab_size, d]`, initially the values of the embedding E. After other
adapters in a stack it adds its change: y + E'(x) − E(x).

Differs from PEFT: `modules_to_save` replaces the layer, so that a second adapter in a call has no
effect or is refused. Differs from adapters: there `train_embeddings` trains the table of the base
model, for all adapters.
Cost: vocab_size · d parameters for each adapter, in memory; a file holds the rows that differ.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from adapterzoo.contracts import BaseLayer

from .base import Copy, looked_up


class Table(Copy):
    """The embedding with its own table.

    Attributes:
        table: holds the weight `[vocab_size, d]`. It is a module because transformers ties it, and
            would mistake the method `bias` of an adapter for a tensor.
    """

    noun: ClassVar[str] = "a table"

    def __init__(self, rows: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make the table; `init_from_layer` or a file fills it.

        Args:
            rows: tokens.
            width: features of each.
            device: of the table.
            dtype: of the layer.
        """
        super().__init__()
        values = torch.zeros(rows, width, device=device, dtype=dtype)
        # from_pretrained draws no random numbers
        self.table = nn.Embedding.from_pretrained(values, freeze=False)

    def identity_values(self, base: BaseLayer) -> dict[str, Tensor]:
        """Return the values of the embedding."""
        return {"table.weight": base.weight.mT}

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the rows of the tokens `x` `[*batch]` → `[*batch, d]`."""
        y, plain = base(x), base.original(x)
        own = looked_up(x, self.table.weight, base.padding_idx, base, y.dtype)  # [*batch, d]
        # if no adapter acted before, return the bits of the table
        return own if y is plain else y + (own - plain)

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + Tᵀ − Eᵀ, `[d, vocab_size]`."""
        own: Tensor = self.table.weight.to(w.dtype).mT
        return w + (own - base.weight.to(w.dtype))
