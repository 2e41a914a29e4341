"""Labels among the arguments of `forward`, their names, and the losses that read them.

Losses are in float32 or wider, ignore −100, and are finite even if no label counts. The range of
labels is checked on the CPU outside compiled code, where this is cheap. On other devices a check
would synchronize, and PyTorch's own device-side assertion catches labels out of range. Dtype and
shape are always checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import ConfigError

IGNORED = -100
Logits: TypeAlias = Tensor | tuple[Tensor, ...]
"""The result of a head's `forward`."""
Count: TypeAlias = Tensor | int | None
"""The number of labels that divides a sum of losses; None: the batch's."""


def next_labels(labels: Tensor) -> Tensor:
    """Return the label of the next token at each token, `[batch, tokens]`; −100 at the last."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def cross_entropy(logits: Tensor, labels: Tensor, count: Count = None) -> Tensor:
    """Return the mean of −log softmax(logits)[label] over the labels that are not −100.

    Args:
        logits: `[*batch, classes]`.
        labels: `[*batch]` integers, with any further dimensions of size 1; −100 does not count.
        count: the divisor of the sum, instead of the number of labels that count.

    Raises:
        ConfigError: wrong dtype, shape or value of the labels.
    """
    classes = logits.shape[-1]
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise ConfigError(
            f"labels: dtype {labels.dtype} for {classes} classes. Write labels.long(), or add the "
            f"head with multilabel=True, which takes a yes or no for each class."
        )
    labels = _shaped(labels, logits.shape[:-1]).to(logits.device, torch.long)
    check_range(labels, 0, classes - 1)
    total = F.cross_entropy(
        logits.to(compute_dtype(logits.dtype)).reshape(-1, classes),  # [labels, classes]
        labels.reshape(-1),  # [labels]
        ignore_index=IGNORED,
        reduction="sum",
    )
    return total / _count(labels != IGNORED, count)


def binary_cross_entropy(logits: Tensor, labels: Tensor, count: Count = None) -> Tensor:
    """Return the mean binary cross entropy of σ(logits) over the labels that count.

    Args:
        logits: `[batch, classes]`.
        labels: the same shape, from 0 to 1; −100 does not count.
        count: the divisor of the sum, instead of the number of labels that count.

    Raises:
        ConfigError: wrong shape or value of the labels.
    """
    wide = logits.to(compute_dtype(logits.dtype))
    labels = _shaped(labels, logits.shape).to(logits.device, wide.dtype)
    check_range(labels, 0, 1)
    counts = labels != IGNORED
    each = F.binary_cross_entropy_with_logits(wide, labels.where(counts, 0.0), reduction="none")
    return each.where(counts, 0.0).sum() / _count(counts, count)


def squared_error(logits: Tensor, labels: Tensor, count: Count = None) -> Tensor:
    """Return the mean of (logits − labels)²; every value is a target, even −100.

    Args:
        logits: `[batch, 1]`.
        labels: `[batch]` or `[batch, 1]`.
        count: the divisor of the sum, instead of the number of labels.

    Raises:
        ConfigError: wrong shape of the labels.
    """
    wide = logits.to(compute_dtype(logits.dtype))
    labels = _shaped(labels, logits.shape[:-1]).to(logits.device, wide.dtype)
    numbers = wide.squeeze(-1)  # [batch]
    total = (numbers - labels).square().sum()
    return total / _count(torch.ones_like(labels), count)


def check_range(labels: Tensor, low: int, high: int) -> None:
    """Check that the labels that count lie within `low ≤ label ≤ high`, on the CPU.

    Raises:
        ConfigError: a label is outside this range.
    """
    if torch.compiler.is_compiling() or labels.device.type != "cpu":
        return
    # not (low ≤ label ≤ high): NaN is also wrong
    wrong = ~((labels >= low) & (labels <= high)) & (labels != IGNORED)
    if bool(wrong.any()):
        raise ConfigError(
            f"labels: {labels[wrong][0].item()} is not a label of this head; legal are {low} to "
            f"{high}, and {IGNORED} to ignore a place. Add a head with as many labels as the data."
        )


def _shaped(labels: Tensor, shape: torch.Size) -> Tensor:
    if labels.shape == shape:
        return labels
    kept = [size for size in labels.shape if size != 1]
    if kept != [size for size in shape if size != 1]:
        raise ConfigError(f"labels: shape {list(labels.shape)}. Write labels of {list(shape)}.")
    return labels.reshape(shape)  # [*shape]


def _count(counts: Tensor, given: Count) -> Tensor | int:
    if given is None:
        # at least 1: the loss of a batch is 0 if all labels are ignored
        return counts.sum().clamp(min=1)
    return given.to(counts.device).clamp(min=1) if isinstance(given, Tensor) else max(given, 1)


LOSSES = {
    "multi_label_classification": binary_cross_entropy,
    "regression": squared_error,
    "single_label_classification": cross_entropy,
}
"""The losses by the `problem_type` of transformers' configs."""


def numbered(count: int) -> dict[str, int]:
    """Return generated label names, `LABEL_0` and so on."""
    return {f"LABEL_{i}": i for i in range(count)}


def checked(kind: str, label2id: Mapping[str, int] | None, count: int) -> dict[str, int]:
    """Return the checked names of the labels; generated ones for None.

    Args:
        kind: the config's kind, for the message.
        label2id: names → class numbers; a class may lack a name.
        count: number of classes.

    Raises:
        ConfigError: a number is not a class, or occurs twice.
    """
    if label2id is None:
        return numbered(count)
    numbers = [*label2id.values()] if isinstance(label2id, Mapping) else [None]
    legal = all(type(number) is int and 0 <= number < count for number in numbers)
    if not legal or len({*numbers}) < len(numbers):
        shown = {number: f"label_{number}" for number in range(min(count, 3))}
        raise ConfigError(
            f"{kind}(label2id={label2id!r}): with {count} labels each number from 0 to {count - 1} "
            f"occurs at most once. Write id2label={shown}."
        )
    return dict(label2id)


def labels_from(id2label: Mapping[int, str] | None) -> dict[str, int] | None:
    """Return names → class numbers from class numbers → names; None for None.

    Raises:
        ConfigError: the argument is not such a mapping, or a name occurs twice.
    """
    if id2label is None:
        return None
    given = id2label if isinstance(id2label, Mapping) else {}
    try:
        # JSON has strings for numbers
        label2id = {str(label): int(number) for number, label in given.items()}
    except (TypeError, ValueError):
        label2id = {}
    if given is not id2label or len(label2id) != len(id2label):
        raise ConfigError(
            f"id2label={id2label!r}: it maps class numbers to different names. "
            f"Write id2label={{0: 'negative', 1: 'positive'}}."
        )
    return label2id
