"""The work of the commands `train` and `predict`."""

from __future__ import annotations

import csv
import dataclasses
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
from transformers import DataCollatorWithPadding, TrainingArguments, set_seed

from adapterzoo.auto import AutoAdapterModel
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.multi.trainer import MultiAdapterTrainer, RunPrinter

from .checkpoints import CheckpointFolder, refuse_to_replace
from .models import base_of, load, load_into, tokenizer_of, tokens_of_text
from .rows import Rows

_NAME = "predicting"
# the output class of heads that classify texts
_OUTPUT = "SequenceClassifierOutput"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One adapter to train.

    Attributes:
        name: name of the adapter and the head.
        rows: training data.
        tested: test data, or None.
        classes: names of the classes in the order of their ids.
        output: folder for the adapter; None: do not save it.
        method: config string; None: the default.
        epochs: passes over the training data.
        lr: initial learning rate.
        batch_size: examples per step.
        seed: seed of weights, dropout and order.
        layers: number of layers of the head.
    """

    name: str
    rows: Rows
    tested: Rows | None
    classes: list[str]
    output: Path | None
    method: str | None
    epochs: float
    lr: float
    batch_size: int
    seed: int
    layers: int


def train(
    tasks: Sequence[Task],
    *,
    model: str,
    max_length: int | None,
    pooling: Any,
    device: str | None,
    progress: bool,
    best: tuple[str, Path] | None = None,
) -> list[dict[str, Any]]:
    """Train adapters over one base model in one run, test them, and save them.

    Args:
        tasks: one for each adapter.
        model: folder or Hub name of the base model.
        max_length: maximum tokens per text; None: the default.
        pooling: pooling of the heads.
        device: None: CUDA if available.
        progress: whether to show a progress bar.
        best: name and folder under which to save the best adapter, by accuracy or else by loss;
            None: do not choose one.

    Returns:
        For each task: numbers of rows and steps, loss, accuracy and output folder, as JSON types.

    Raises:
        CheckpointError: the base model cannot be loaded, or a folder cannot be written.
        ConfigError: the data, a method or another value is invalid.
    """
    folders = [task.output for task in tasks if task.output is not None]
    folders += [] if best is None else [best[1]]
    for folder in folders:
        refuse_to_replace(folder, "native")
    tokenizer = tokenizer_of(model)
    set_seed(tasks[0].seed)
    adapted = load(AutoAdapterModel, model)
    for head in adapted.known_heads():
        adapted.delete_head(head)
    for number, task in enumerate(tasks):
        if number:
            set_seed(task.seed)
        adapted.add_adapter(task.name, config=task.method or str(AdapterConfig.default))
        adapted.add_classification_head(
            task.name,
            num_labels=len(task.classes),
            layers=task.layers,
            # a single layer has no activation
            activation_function="tanh" if task.layers > 1 else None,
            pooling=pooling,
            id2label=dict(enumerate(task.classes)),
        )
    adapted.to(device or _default_device())
    length = tokens_of_text(adapted, tokenizer, max_length)
    is_cpu = adapted.device.type == "cpu"
    start = time.perf_counter()
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    # fails before the work if the folder is not writable
    with tempfile.TemporaryDirectory(dir=folders[0]) as scratch:
        many = MultiAdapterTrainer(adapted)
        for task in tasks:
            many.add(
                task.name,
                TrainingArguments(
                    output_dir=str(Path(scratch) / task.name), num_train_epochs=task.epochs,
                    learning_rate=task.lr, seed=task.seed,
                    per_device_train_batch_size=task.batch_size, use_cpu=is_cpu,
                    dataloader_pin_memory=not is_cpu, logging_strategy="no", save_strategy="no",
                    report_to="none", disable_tqdm=not progress,
                ),
                _rows_of(task, tokenizer, length),
                data_collator=DataCollatorWithPadding(tokenizer),
                # standard output is reserved for results
                report=False,
            )  # fmt: skip
            # the loss is part of the results, which are printed at the end
            many.runs[task.name].trainer.remove_callback(RunPrinter)
        results = many.train()
    seconds = time.perf_counter() - start
    found = []
    for task in tasks:
        run, done = many.runs[task.name], results[task.name]
        metrics: dict[str, Any] = {
            "name": task.name,
            "method": task.method or str(AdapterConfig.default),
            "labels": task.classes,
            "train_rows": len(task.rows.texts),
            "trained_parameters": sum(p.numel() for p in run.parameters.values()),
            "steps": int(done.global_step),
            "seconds": seconds,
            "train_loss": float(done.training_loss),
        }
        if task.tested is not None:
            adapted.set_active_adapters(task.name)
            texts, labels = task.tested
            logits = logits_of(adapted, tokenizer, texts, length, task.batch_size, progress)
            right = logits.argmax(-1) == torch.tensor([task.classes.index(each) for each in labels])
            metrics |= {"eval_rows": len(labels), "accuracy": right.double().mean().item()}
        found.append(metrics)
        if task.output is not None:
            metrics |= _saved(adapted, task, task.name, task.output, metrics, length)
    if best is not None:
        name, folder = best
        chosen = max(found, key=lambda m: m.get("accuracy", -m["train_loss"]))
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # a copy of the best adapter, so that its file has the new name
            adapted.save_adapter(scratch, chosen["name"])
            adapted.load_adapter(scratch, load_as=name)
        task = tasks[found.index(chosen)]
        chosen |= _saved(adapted, task, name, folder, chosen, length)
    return found


def _saved(
    model: Any, task: Task, name: str, folder: Path, metrics: dict[str, Any], length: int
) -> dict[str, Any]:
    """Save an adapter with its settings and results; return its fingerprint and folder."""
    settings: dict[str, Any] = {
        "epochs": task.epochs, "lr": task.lr, "batch_size": task.batch_size, "seed": task.seed,
        "max_length": length,
    }  # fmt: skip
    settings |= {k: metrics[k] for k in ("train_rows", "accuracy", "eval_rows") if k in metrics}
    model.save_adapter(folder, name, meta_dict={"train": settings})
    return {"fingerprint": model.adapter_fingerprint(name), "output": str(folder)}


def _rows_of(task: Task, tokenizer: Any, length: int) -> list[dict[str, Any]]:
    tokens = tokenizer(task.rows.texts, truncation=True, max_length=length)
    return [
        {key: tokens[key][i] for key in tokens} | {"labels": task.classes.index(label)}
        for i, label in enumerate(task.rows.labels)
    ]


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
        checkpoint: checkpoint of an adapter with a head.
        texts: any number of texts.
        model: base model; None: the one named in the checkpoint.
        batch_size: texts per batch.
        max_length: maximum tokens per text; None: as in training.
        device: None: CUDA if available.
        progress: whether to show a progress bar.

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
        model: set to evaluation mode.
        tokenizer: tokenizer of its base model.
        texts: any number of texts.
        max_length: maximum tokens per text.
        batch_size: texts per batch; texts of similar length are batched together.
        progress: whether to show a progress bar.
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
        predictions: as `predict` returns them.
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
    """Return a text with its likeliest label or labels and probabilities, or with its value."""
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
