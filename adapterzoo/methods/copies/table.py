"""An adapter's own table of tokens, which `train_adapter(…, train_embeddings=True)` trains.

E'(x) = T[x] · scale with T `[vocab_size, d]`, initially the values of the embedding E. After other
adapters in a stack it adds its change: y + E'(x) − E(x).

Differs from PEFT: `modules_to_save` replaces the layer, so that a second adapter in a call has no
effect or is refused. Differs from adapters: there `train_embeddings` trains the table of the base
model, for all adapters.
Cost: vocab_size · d parameters for each adapter, in memory; a file holds the rows that differ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from adapterzoo.contracts import BaseLayer, WeightAdapter


class Table(WeightAdapter):
    """The embedding with its own table.

    Attributes:
        table: holds the weight `[vocab_size, d]`. It is a module because transformers ties it, and
            would mistake the method `bias` of an adapter for a tensor.
    """

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

    def init_from_layer(self, base: BaseLayer) -> None:
        """Take the values of the embedding."""
        with torch.no_grad():
            self.table.weight.copy_(base.weight.mT)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the rows of the tokens `x` `[*batch]` → `[*batch, d]`."""
        y, plain = base(x), base.original(x)
        own = embedding(x, self.table.weight, base.padding_idx)  # [*batch, d]
        scale = base.scale
        if isinstance(scale, Tensor):
            # cast like the families that have such a scale
            own = own * scale.to(own.dtype)
        elif scale != 1.0:
            own = own * scale
        own = own.to(y.dtype)
        # if no adapter acted before, return the bits of the table
        return own if y is plain else y + (own - plain)

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight w + Tᵀ − Eᵀ, `[d, vocab_size]`."""
        own: Tensor = self.table.weight.to(w.dtype).mT
        return w + (own - base.weight.to(w.dtype))
