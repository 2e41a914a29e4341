"""Heads whose last layer is onto the vocabulary: tie, replace and resize it."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from adapterzoo.errors import ConfigError

from .base import PredictionHead


class VocabularyHead(PredictionHead):
    """Base of the heads whose last child is a linear layer onto the vocabulary."""

    # version counter of the last weight when it was copied from the base model's checkpoint
    _taken: int | None = None
    final_logits_bias: Tensor

    def tokens_to_score(self, hidden: Tensor, keep: int | Tensor) -> Tensor:
        """Return the hidden states of the last `keep` tokens, of the listed ones, or of all (0)."""
        if isinstance(keep, Tensor):
            return hidden[:, keep]
        return hidden[:, -keep:] if keep else hidden

    @property
    def output_embeddings(self) -> nn.Linear:
        """The layer onto the vocabulary."""
        return cast("nn.Linear", next(reversed(self._modules.values())))

    @property
    def output_key(self) -> str:
        """The key of the last layer's weight."""
        return f"{next(reversed(self._modules))}.weight"

    # not a setter: nn.Module would add the assigned layer as another child
    def replace_output(self, layer: nn.Module) -> None:
        """Replace the layer onto the vocabulary.

        Raises:
            ConfigError: it is not a linear layer.
        """
        if not isinstance(layer, nn.Linear):
            raise ConfigError(
                f"{layer!r}: the output embeddings are a linear layer. Write "
                f"set_output_embeddings(nn.Linear(d_model, vocab_size))."
            )
        self._modules[next(reversed(self._modules))] = layer
        self.of_checkpoint = False

    def resize_output(self, weight: nn.Parameter, bias: Tensor | None) -> None:
        """Give the layer onto the vocabulary another weight and bias."""
        layer, rows = self.output_embeddings, weight.shape[0]
        layer.weight, layer.out_features = weight, rows
        if bias is not None and bias.shape == layer.bias.shape:
            layer.bias.data = bias
        elif bias is not None:
            layer.bias = nn.Parameter(bias, layer.bias.requires_grad)
        if (old := getattr(self, "final_logits_bias", None)) is not None:
            self.final_logits_bias = F.pad(old, (0, rows - old.shape[-1]))  # [1, vocab_size]

    # not a plain attribute: any change of the weight makes it False
    @property
    def of_checkpoint(self) -> bool:
        """Whether the last layer is known to be unchanged from the base model's checkpoint."""
        weight = self.output_embeddings.weight
        return self._taken is not None and self._taken == weight._version

    @of_checkpoint.setter
    def of_checkpoint(self, value: bool) -> None:
        weight = self.output_embeddings.weight
        self._taken = weight._version if value and not weight.is_inference() else None

    def __setstate__(self, state: dict[str, object]) -> None:
        """Forget the origin: a copy starts with another version counter."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._taken = None

    def tie(self, weight: nn.Parameter) -> bool:
        """Share the weight of the input embedding; return False and do nothing if it does not fit.

        Args:
            weight: `[vocab_size, embedding_size]`.
        """
        fits = self.output_embeddings.weight.shape == weight.shape
        if fits:
            self.output_embeddings.weight = weight
        return fits
