"""Language modelling heads of a model whose vocabulary gets another size."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.contracts import compute_dtype
from adapterzoo.heads import PredictionHead

from .hf.backbone import describe
from .shelf import ShelfMixin


class VocabularyMixin(ShelfMixin):
    """`resize_token_embeddings` of models with named heads."""

    @torch.no_grad()
    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Any:
        """Give the table of tokens another size, and with it all language modelling heads.

        A head whose config says a `vocab_size` keeps it, and shares the table no more.

        Differs from transformers: heads that are not active are resized as well; new rows of a
        head are the mean of the old ones, without noise of a variance 10⁻⁹ times theirs.

        Args:
            new_num_tokens: rows of the table; None for as many as there are.
            pad_to_multiple_of: rounds the number up.
            mean_resizing: whether new rows are the mean of the old ones; else they are drawn, as
                those of a fresh head.

        Raises:
            StateError: an adapter sits at the embedding.
        """
        model, plan = cast("Any", self), self._active.plan
        table = model.get_input_embeddings().weight
        heads = cast("list[PredictionHead]", list(self.heads.values()))
        # tying them anew changes heads that share the table
        before = [(head, *_output(layer)) for head in heads if (layer := head.output_embeddings)]
        # transformers would resize the layer of one active head, whatever its config says
        with self._active.overridden(dataclasses.replace(plan, heads=())):
            resized = super().resize_token_embeddings(
                new_num_tokens, pad_to_multiple_of, mean_resizing
            )
        if new_num_tokens is None and pad_to_multiple_of is None:
            return resized
        backbone = describe(self)
        std = None if mean_resizing else backbone.init_std
        for head, weight, bias in before:
            shared = weight is table
            rows = resized.weight.shape[0] if shared else backbone.vocab_size
            rows = head.config.get("vocab_size") or rows or weight.shape[0]
            if shared and rows == resized.weight.shape[0]:
                weight = resized.weight
            elif shared or rows != weight.shape[0]:
                head.of_checkpoint = False
                weight = nn.Parameter(with_rows(weight, rows, std), weight.requires_grad)
            if bias is not None and bias.shape[0] != rows:
                bias = with_rows(bias, rows, None if mean_resizing else 0.0)
            head.resize_output(weight, bias)
        self._list_tied()
        return resized


def with_rows(old: Tensor, count: int, std: float | None) -> Tensor:
    """A new tensor of the first rows, and of new ones where there are not as many.

    Args:
        old: `[tokens, *width]`.
        count: rows of the result, `[count, *width]`.
        std: new ones are drawn from a normal distribution around 0; None: they are the mean.
    """
    kept = old[:count]
    added = old.new_empty(count - len(kept), *old.shape[1:])
    if std is None:
        added.copy_(old.mean(0, dtype=compute_dtype(old.dtype)).expand_as(added))
    else:
        added.normal_(std=std)
    return torch.cat([kept, added])


def _output(layer: nn.Linear) -> tuple[Any, Tensor | None]:
    # types of torch say that there always is one
    bias = cast("Tensor | None", layer.bias)
    return layer.weight, None if bias is None else bias.detach()
