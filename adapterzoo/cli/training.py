"""The work of `train` and `predict`."""

from __future__ import annotations

import csv
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    DataCollatorWithPadding,
    PrinterCallback,
    ProgressCallback,
    TrainingArguments,
    set_seed,
)

from adapterzoo.auto import AutoAdapterModel
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.trainer import AdapterTrainer

from .checkpoints import CheckpointFolder, refuse_to_replace
from .models import base_of, load, load_into, tokenizer_of, tokens_of_text
from .rows import Rows

_NAME = "predicting"
# the output class of heads that classify texts
_OUTPUT = "SequenceClassifierOutput"


class _Bar(ProgressCallback):
    """A progress bar only: the loss is a result, and is printed at the end."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        pass


def train(
    rows: Rows,
    tested: Rows | None,
    classes: list[str],
    output: str,
    name: str,
    *,
    model: str,
    method: str | None,
    epochs: float,
    lr: float,
    batch_size: int,
    max_length: int | None,
    pooling: Any,
    layers: int,
    seed: int,
    device: str | None,
    progress: bool,
) -> dict[str, Any]:
    """Train, test and save an adapter.

    Args:
        rows: training data.
        tested: test data, or None.
        classes: names in the order of their ids.
        output: folder for the adapter.
        name: of adapter and head.
        model: folder or Hub name of the base model.
        method: config string; None: the default.
        epochs: passes over the training data.
        lr: initial learning rate.
        batch_size: examples per step.
        max_length: maximum tokens per text; None: the default.
        pooling: of the head.
        layers: of the head.
        seed: of weights, dropout and order.
        device: None: CUDA if available.
        progress: whether to show a bar.

    Returns:
        Numbers of rows and steps, loss, accuracy and output folder, as JSON types.

    Raises:
        CheckpointError: the base model cannot be loaded, or the folder cannot be written.
        ConfigError: the data, the method or another value is not legal.
    """
    refuse_to_replace(Path(output), "native")
    tokenizer = tokenizer_of(model)
    set_seed(seed)
    method = method or str(AdapterConfig.default)
    adapted = load(AutoAdapterModel, model)
    for head in adapted.known_heads():
        adapted.delete_head(head)
    adapted.add_adapter(name, config=method)
    adapted.add_classification_head(
        name,
        num_labels=len(classes),
        layers=layers,
        # a single layer has no activation
        activation_function="tanh" if layers > 1 else None,
        pooling=pooling,
        id2label=dict(enumerate(classes)),
    )
    adapted.train_adapter(name)
    adapted.to(device or _default_device())
    length = tokens_of_text(adapted, tokenizer, max_length)
    tokens = tokenizer(rows.texts, truncation=True, max_length=length)
    data = [
        {key: tokens[key][i] for key in tokens} | {"labels": classes.index(label)}
        for i, label in enumerate(rows.labels)
    ]
    is_cpu = adapted.device.type == "cpu"
    start = time.perf_counter()
    Path(output).mkdir(parents=True, exist_ok=True)
    # a folder that cannot be written to is found before the work
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        trainer = AdapterTrainer(
            model=adapted,
            args=TrainingArguments(
                output_dir=scratch, num_train_epochs=epochs, learning_rate=lr, seed=seed,
                per_device_train_batch_size=batch_size, use_cpu=is_cpu,
                dataloader_pin_memory=not is_cpu, logging_strategy="no", save_strategy="no",
                report_to="none", disable_tqdm=True,
            ),
            train_dataset=data,
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[_Bar()] if progress else [],
            report=False,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        done = trainer.train()
    metrics: dict[str, Any] = {
        "name": name,
        "method": method,
        "labels": classes,
        "train_rows": len(rows.texts),
        "trained_parameters": sum(p.numel() for p in adapted.parameters() if p.requires_grad),
        "steps": int(done.global_step),
        "seconds": time.perf_counter() - start,
        "train_loss": float(done.training_loss),
    }
    if tested is not None:
        logits = logits_of(adapted, tokenizer, tested.texts, length, batch_size, progress)
        right = logits.argmax(-1) == torch.tensor([classes.index(label) for label in tested.labels])
        metrics |= {"eval_rows": len(tested.labels), "accuracy": right.double().mean().item()}
    settings: dict[str, Any] = {
        "epochs": epochs, "lr": lr, "batch_size": batch_size, "seed": seed, "max_length": length
    }  # fmt: skip
    results = ("train_rows", "accuracy", "eval_rows")
    settings |= {key: metrics[key] for key in results if key in metrics}
    adapted.save_adapter(output, name, meta_dict={"train": settings})
    return metrics | {"fingerprint": adapted.adapter_fingerprint(name), "output": output}


def predict(
    checkpoint: CheckpointFolder,
    texts: Sequence[str],
    *,
    model: str | None,
    batch_size: int,
    max_length: int | None,
    device: str | None,
    progress: bool,
) -> list[dict[str, Any]]:
    """Return the predictions of an adapter and its head: rows of JSON types.

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
        ConfigError: there is no base model.
    """
    base = base_of(checkpoint, model)
    adapted = load(AutoAdapterModel, base).eval()
    for head in adapted.known_heads():
        adapted.delete_head(head)
    load_into(checkpoint, adapted, _NAME, set_active=True)
    config = adapted.get_head(_NAME).config if _NAME in adapted.known_heads() else None
    if config is None or config.output_class != _OUTPUT:
        has = "no head" if config is None else f"a head of the type {config.head_type!r}"
        raise CheckpointError(f"{checkpoint.path!r} has {has}. Write one that classifies texts.")
    adapted.to(device or _default_device())
    tokenizer = tokenizer_of(base)
    settings = checkpoint.meta.get("train")
    trained = settings.get("max_length") if isinstance(settings, dict) else None
    length = tokens_of_text(adapted, tokenizer, max_length or trained)
    logits = logits_of(adapted, tokenizer, texts, length, batch_size, progress)
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
    starts = range(0, len(order), batch_size)
    for start in tqdm(starts, "predicting", disable=not progress, leave=False, file=sys.stderr):
        batch = [texts[number] for number in order[start : start + batch_size]]
        tokens = tokenizer(
            batch, truncation=True, max_length=max_length, padding=True, return_tensors="pt"
        )
        found.append(model(**tokens.to(model.device)).logits.float().cpu())
    return torch.cat(found)[torch.tensor(order).argsort()]


def write(stream: TextIO, predictions: Sequence[dict[str, Any]], kind: str) -> None:
    """Write predictions, one per line.

    Args:
        stream: open for text.
        predictions: of `predict`.
        kind: "csv" or "jsonl".
    """
    if kind == "jsonl":
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in predictions)
        return
    writer = csv.writer(stream, lineterminator="\n")
    for number, row in enumerate(predictions):
        values = row.get("probabilities") or {"value": row["value"]}
        labels = [row["label"]] if "label" in row else []
        if number == 0:
            writer.writerow(["text", *(["label"] if labels else []), *values])
        # several labels of one text
        labels = [label if isinstance(label, str) else "|".join(label) for label in labels]
        writer.writerow([row["text"], *labels, *(f"{value:.6f}" for value in values.values())])


def _prediction(text: str, logits: Tensor, names: list[str], several: bool) -> dict[str, Any]:
    """Return a text with its likely label, or labels, and probabilities; or with its number."""
    if several:
        shares = dict(zip(names, logits.sigmoid().tolist(), strict=True))
        likely = [name for name, share in shares.items() if share > 0.5]
        return {"text": text, "label": likely, "probabilities": shares}
    if len(names) == 1:
        return {"text": text, "value": logits.item()}
    shares = dict(zip(names, logits.softmax(-1).tolist(), strict=True))
    return {"text": text, "label": names[int(logits.argmax())], "probabilities": shares}


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
