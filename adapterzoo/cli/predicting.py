"""The work of `predict`: labels of texts and their probabilities."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor

from adapterzoo.errors import CheckpointError, ConfigError

from .checkpoints import CheckpointFolder
from .models import base_of, load_into, tokenizer_of, tokens_of_text, with_weights
from .output import progress as bar

_NAME = "predicting"
# the output class of heads that classify texts
_OUTPUT = "SequenceClassifierOutput"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for a text.

    Attributes:
        text: the text.
        label: the most likely class; for multi-label heads, all likely classes; None for a
            regression.
        values: the probability of each class; for a regression, the number as "value".
    """

    text: str
    label: str | list[str] | None
    values: dict[str, float]


def device_named(name: str | None) -> torch.device:
    """Return a device by its name.

    Args:
        name: such as "cpu" or "cuda:1"; None: CUDA if available.

    Raises:
        ConfigError: there is no such device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    # unknown names, devices without a driver, builds of torch without the device
    except (RuntimeError, AssertionError) as error:
        raise _unusable(name, str(error).partition("\n")[0]) from error
    if device.type == "meta":
        raise _unusable(name, "it holds shapes without values")
    return device


def _unusable(name: str | None, reason: str) -> ConfigError:
    return ConfigError(
        f"--device {name!r} cannot be used ({reason}). Write --device cpu, or see "
        f"`adapterzoo doctor`."
    )


def predict(
    checkpoint: CheckpointFolder,
    texts: Sequence[str],
    *,
    model: str | None,
    batch_size: int,
    max_length: int | None,
    device: str | None,
    progress: bool,
) -> list[Prediction]:
    """Return the predictions of an adapter and its head.

    Args:
        checkpoint: of an adapter with a head.
        texts: any number of texts.
        model: base model; None: the one named in the checkpoint.
        batch_size: texts per batch.
        max_length: maximum tokens per text; None: as in training.
        device: None: CUDA if available.
        progress: whether to show a bar.

    Raises:
        CheckpointError: the adapter does not fit, or has no head that classifies.
        ConfigError: there is no base model or no such device.
    """
    place = device_named(device)
    base = base_of(checkpoint, model)
    adapted = with_weights(base)
    for head in adapted.known_heads():
        adapted.delete_head(head)
    load_into(checkpoint, adapted, _NAME, set_active=True)
    config = adapted.get_head(_NAME).config if _NAME in adapted.known_heads() else None
    if config is None or config.output_class != _OUTPUT:
        has = "no head" if config is None else f"a head of the type {config.head_type!r}"
        raise CheckpointError(
            f"{checkpoint.path!r} has {has}; `predict` needs one that classifies texts. Write the "
            f"folder of an adapter from `adapterzoo train`."
        )
    tokenizer = tokenizer_of(base)
    wanted = max_length or _trained_length(checkpoint)
    length = tokens_of_text(adapted, tokenizer, wanted)
    logits = logits_of(adapted.to(place), tokenizer, texts, length, batch_size, progress)
    count = logits.shape[-1]
    labels = config.id2label or {number: str(number) for number in range(count)}
    names = [str(labels[number]) for number in range(count)]
    several = config.problem_type == "multi_label_classification"
    return [_prediction(text, row, names, several) for text, row in zip(texts, logits, strict=True)]


@torch.inference_mode()
def logits_of(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    max_length: int,
    batch_size: int,
    progress: bool,
) -> Tensor:
    """Return the logits of the active head, `[texts, labels]`, in float32 on the CPU.

    Args:
        model: is set to evaluation mode.
        tokenizer: of its base model.
        texts: any number of texts.
        max_length: maximum tokens per text.
        batch_size: texts per batch; texts of similar length are batched together.
        progress: whether to show a bar.
    """
    model.eval()
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    found: list[Tensor] = []
    for start in bar(range(0, len(order), batch_size), "predicting", progress):
        batch = [texts[number] for number in order[start : start + batch_size]]
        tokens = tokenizer(
            batch, truncation=True, max_length=max_length, padding=True, return_tensors="pt"
        )
        found.append(model(**tokens.to(model.device)).logits.float().cpu())
    return torch.cat(found)[torch.tensor(order).argsort()]


def write(stream: TextIO, predictions: Iterable[Prediction], kind: str) -> None:
    """Write predictions, one per line.

    Args:
        stream: open for text.
        predictions: of one head.
        kind: "csv" or "jsonl".
    """
    predictions = list(predictions)
    if kind == "jsonl":
        for prediction in predictions:
            row: dict[str, Any] = {"text": prediction.text}
            if prediction.label is None:
                row |= prediction.values
            else:
                row |= {"label": prediction.label, "probabilities": prediction.values}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        return
    columns = list(predictions[0].values)
    named = predictions[0].label is not None
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["text", *(["label"] if named else []), *columns])
    for each in predictions:
        label = each.label if isinstance(each.label, str) else "|".join(each.label or ())
        values = [f"{each.values[column]:.6f}" for column in columns]
        writer.writerow([each.text, *([label] if named else []), *values])


def _prediction(text: str, logits: Tensor, names: list[str], several: bool) -> Prediction:
    if several:
        shares = dict(zip(names, logits.sigmoid().tolist(), strict=True))
        return Prediction(text, [name for name, share in shares.items() if share > 0.5], shares)
    if len(names) == 1:
        return Prediction(text, None, {"value": logits.item()})
    shares = dict(zip(names, logits.softmax(-1).tolist(), strict=True))
    return Prediction(text, names[int(logits.argmax())], shares)


def _trained_length(checkpoint: CheckpointFolder) -> int | None:
    settings = checkpoint.meta.get("train")
    length = settings.get("max_length") if isinstance(settings, dict) else None
    return length if isinstance(length, int) and length > 0 else None
