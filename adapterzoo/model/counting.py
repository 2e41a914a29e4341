"""The labels of a batch that count: by their number the loss of several batches is divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from adapterzoo.heads import PredictionHead

from .sharding import class_name

_IGNORED = -100


def counted_labels(
    model: Any, heads: Mapping[str, PredictionHead], batch: Mapping[str, Any]
) -> Tensor | None:
    """The labels by whose number a batch's loss is divided, −100 for those that do not count.

    None where that is not one number: several heads that differ in it, or spans and trees.

    Args:
        model: with adapters.
        heads: those that answer; none for a model with a static head.
        batch: arguments of `forward`.
    """
    if not heads:
        labels = batch.get("labels")
        if not isinstance(labels, Tensor):
            return None
        causal = class_name(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return _of_next_tokens(labels) if causal else labels
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    mask = batch.get(f"{prefix}attention_mask")
    found = []
    for name, head in heads.items():
        labels = head.config.find_labels(name, batch)
        if labels is None or len(head.config.label_names) > 1:
            return None
        found.append(head.config.shift(head.config.mask_labels(labels, mask)))
    return found[0] if len({count(labels) for labels in found}) == 1 else None


def count(labels: Tensor) -> int:
    """How many of the labels count."""
    return int((labels != _IGNORED).sum())


def _of_next_tokens(labels: Tensor) -> Tensor:
    """The label of the next token at each."""
    return F.pad(labels[..., 1:], (0, 1), value=_IGNORED)
