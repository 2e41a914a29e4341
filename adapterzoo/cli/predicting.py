"""The work of `predict`: from texts to labels with their probabilities."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor

from adapterzoo.errors import CheckpointError, ConfigError

from .checkpoints import Checkpoint
from .models import base_of, load_into, tokenizer_of, tokens_of_text, with_weights
from .output import progress as bar

_NAME = "predicting"
# what heads that classify texts answer with
_OUTPUT = "SequenceClassifierOutput"


@dataclass(frozen=True, slots=True)
class Answer:
    """What an adapter says of a text.

    Attributes:
        text: the text.
        label: the likeliest class; all likely ones of a head with several; None for a number.
        values: class to probability; the number under "value" where the head gives one.
    """

    text: str
    label: str | list[str] | None
    values: dict[str, float]


def device_named(call: str, name: str | None) -> torch.device:
    """A device by its name.

    Args:
        call: what the user wrote, for messages.
        name: such as "cpu" or "cuda:1"; None: CUDA where there is one.

    Raises:
        ConfigError: there is none of this name.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    # an unknown name, a device without a driver, a build of torch without the device
    except (RuntimeError, AssertionError) as error:
        raise _unusable(call, name, str(error).partition("\n")[0]) from error
    if device.type == "meta":
        raise _unusable(call, name, "it holds shapes and no values")
    return device


def _unusable(call: str, name: str | None, reason: str) -> ConfigError:
    return ConfigError(
        f"{call}: --device {name!r} cannot be used ({reason}). Write --device cpu, or see "
        f"`adapterzoo doctor`."
    )


def predict(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    *,
    model: str | None,
    batch_size: int,
    max_length: int | None,
    device: str | None,
    progress: bool,
) -> list[Answer]:
    """What an adapter and its head say of texts.

    Args:
        checkpoint: of an adapter with a head.
        texts: any number.
        model: base model; None: the one that the checkpoint names.
        batch_size: texts at a time.
        max_length: tokens of a text; None: as in the training.
        device: None for the best one.
        progress: whether a bar is shown.

    Raises:
        CheckpointError: the adapter does not fit, or has no head that classifies.
        ConfigError: there is no base model or no such device.
    """
    call = checkpoint.call
    place = device_named(call, device)
    base = base_of(checkpoint, model)
    adapted = with_weights(call, base)
    for head in adapted.known_heads():
        adapted.delete_head(head)
    load_into(checkpoint, adapted, _NAME, set_active=True)
    config = adapted.get_head(_NAME).config if _NAME in adapted.known_heads() else None
    if config is None or config.output_class != _OUTPUT:
        has = "no head" if config is None else f"a head of the type {config.head_type!r}"
        raise CheckpointError(
            f"{call}: {checkpoint.path!r} has {has}, and `predict` needs one that classifies "
            f"texts. Write the folder of an adapter that `adapterzoo train` made."
        )
    tokenizer = tokenizer_of(call, base)
    wanted = max_length or _trained_length(checkpoint)
    length = tokens_of_text(call, adapted, tokenizer, wanted)
    logits = logits_of(adapted.to(place), tokenizer, texts, length, batch_size, progress)
    count = logits.shape[-1]
    labels = config.id2label or {number: str(number) for number in range(count)}
    names = [str(labels[number]) for number in range(count)]
    several = config.problem_type == "multi_label_classification"
    return [_answer(text, row, names, several) for text, row in zip(texts, logits, strict=True)]


@torch.inference_mode()
def logits_of(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    max_length: int,
    batch_size: int,
    progress: bool,
) -> Tensor:
    """Logits of the active head, `[texts, labels]`, in float32 on the CPU.

    Args:
        model: in any mode; is in eval after it.
        tokenizer: of its base model.
        texts: any number.
        max_length: tokens of a text.
        batch_size: texts at a time, those of similar length together.
        progress: whether a bar is shown.
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


def write(stream: TextIO, answers: Iterable[Answer], kind: str) -> None:
    """Write answers, one in each line.

    Args:
        stream: open for text.
        answers: all of one head.
        kind: "csv" or "jsonl".
    """
    answers = list(answers)
    if kind == "jsonl":
        for answer in answers:
            row: dict[str, Any] = {"text": answer.text}
            if answer.label is None:
                row |= answer.values
            else:
                row |= {"label": answer.label, "probabilities": answer.values}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        return
    columns = list(answers[0].values)
    named = answers[0].label is not None
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["text", *(["label"] if named else []), *columns])
    for answer in answers:
        label = answer.label if isinstance(answer.label, str) else "|".join(answer.label or ())
        values = [f"{answer.values[column]:.6f}" for column in columns]
        writer.writerow([answer.text, *([label] if named else []), *values])


def _answer(text: str, logits: Tensor, names: list[str], several: bool) -> Answer:
    if several:
        shares = dict(zip(names, logits.sigmoid().tolist(), strict=True))
        return Answer(text, [name for name, share in shares.items() if share > 0.5], shares)
    if len(names) == 1:
        return Answer(text, None, {"value": logits.item()})
    shares = dict(zip(names, logits.softmax(-1).tolist(), strict=True))
    return Answer(text, names[int(logits.argmax())], shares)


def _trained_length(checkpoint: Checkpoint) -> int | None:
    settings = checkpoint.meta.get("train")
    length = settings.get("max_length") if isinstance(settings, dict) else None
    return length if isinstance(length, int) and length > 0 else None
