"""The work of `train`."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    DataCollatorWithPadding,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from adapterzoo import formats
from adapterzoo.errors import ConfigError
from adapterzoo.trainer import AdapterTrainer

from .models import tokenizer_of, tokens_of_text, with_weights
from .predicting import device_named, logits_of
from .rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of the command.

    Attributes:
        model: folder or Hub name of the base model.
        rows: training data.
        tested: test data, or None.
        classes: names in the order of their ids.
        output: folder for the adapter.
        method: config string.
        name: of adapter and head.
        epochs: passes over the training data.
        lr: initial learning rate.
        batch_size: examples per step.
        max_length: maximum tokens per text; None: the default.
        pooling: of the head.
        layers: of the head.
        seed: of weights, dropout and order.
        device: None: CUDA if available.
        progress: whether to show a bar.
    """

    model: str
    rows: Rows
    tested: Rows | None
    classes: list[str]
    output: Path
    method: str
    name: str
    epochs: float
    lr: float
    batch_size: int
    max_length: int | None
    pooling: Any
    layers: int
    seed: int
    device: str | None
    progress: bool


class _Bar(TrainerCallback):
    """A progress bar on standard error, as standard output is for results."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar = tqdm(
            total=state.max_steps, desc="training", disable=not self._shown, leave=False,
            unit="step", file=sys.stderr,
        )  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.update(1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.close()


def train(options: TrainOptions) -> dict[str, Any]:
    """Train, test and save an adapter.

    Args:
        options: of the command.

    Returns:
        Numbers of rows and steps, loss, accuracy and output folder, as JSON types.

    Raises:
        CheckpointError: the base model cannot be loaded, or the folder cannot be written.
        ConfigError: the data, the method or another value is not legal.
    """
    _check(options)
    rows, names, tested = options.rows, options.classes, options.tested
    tokenizer = tokenizer_of(options.model)
    set_seed(options.seed)
    model = _prepared(options, names)
    length = tokens_of_text(model, tokenizer, options.max_length)
    tokens = tokenizer(rows.texts, truncation=True, max_length=length)
    data = [
        {key: tokens[key][i] for key in tokens} | {"labels": names.index(label)}
        for i, label in enumerate(rows.labels)
    ]
    start = time.perf_counter()
    loss, steps = _run(options, model, tokenizer, data)
    metrics: dict[str, Any] = {
        "name": options.name,
        "method": options.method,
        "labels": names,
        "train_rows": len(rows.texts),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": steps,
        "seconds": time.perf_counter() - start,
        "train_loss": loss,
    }
    if tested is not None:
        logits = logits_of(
            model, tokenizer, tested.texts, length, options.batch_size, options.progress
        )
        right = logits.argmax(-1) == torch.tensor([names.index(label) for label in tested.labels])
        metrics |= {"eval_rows": len(tested.labels), "accuracy": right.double().mean().item()}
    kept = {key: metrics[key] for key in ("train_rows", "accuracy", "eval_rows") if key in metrics}
    noted = ("epochs", "lr", "batch_size", "seed")
    settings = {key: getattr(options, key) for key in noted} | {"max_length": length}
    model.save_adapter(options.output, options.name, meta_dict={"train": settings | kept})
    return metrics | {
        "fingerprint": model.adapter_fingerprint(options.name),
        "output": str(options.output),
    }


def _check(options: TrainOptions) -> None:
    """Check the options before anything is loaded."""
    device_named(options.device)
    held = formats.of(options.output, "adapter") if options.output.is_dir() else None
    if held not in (None, "native"):
        raise ConfigError(
            f"--output {str(options.output)!r} holds an adapter in the format {held!r}. "
            f"Write another folder."
        )


def _prepared(options: TrainOptions, names: list[str]) -> Any:
    """Return the base model with a new adapter and a new head, the only trainable parts."""
    model = with_weights(options.model)
    for head in model.known_heads():
        model.delete_head(head)
    model.add_adapter(options.name, config=options.method)
    model.add_classification_head(
        options.name,
        num_labels=len(names),
        layers=options.layers,
        # a single layer has no activation
        activation_function="tanh" if options.layers > 1 else None,
        pooling=options.pooling,
        id2label=dict(enumerate(names)),
    )
    model.train_adapter(options.name)
    return model.to(device_named(options.device))


def _run(
    options: TrainOptions, model: Any, tokenizer: Any, data: list[dict[str, Any]]
) -> tuple[float, int]:
    """Train, and return the mean loss and the number of steps."""
    with tempfile.TemporaryDirectory() as scratch:
        trainer = AdapterTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=scratch,
                num_train_epochs=options.epochs,
                per_device_train_batch_size=options.batch_size,
                learning_rate=options.lr,
                seed=options.seed,
                use_cpu=model.device.type == "cpu",
                dataloader_pin_memory=model.device.type != "cpu",
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=data,
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[_Bar(options.progress)],
        )
        trainer.remove_callback(PrinterCallback)
        done = trainer.train()
    loss: Tensor | float = done.training_loss
    return float(loss), int(done.global_step)
