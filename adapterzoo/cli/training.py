"""The work of the commands `train` and `predict`."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import TrainerCallback, TrainingArguments, set_seed

from adapterzoo.auto import AutoAdapterModel
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import ConfigError
from adapterzoo.multi.trainer import MultiAdapterTrainer, RunPrinter
from adapterzoo.names import check_name

from .checkpoints import CheckpointFolder
from .models import base_of, load, load_into, tokens_of_text
from .output import PAUSE, note
from .resuming import checkpoints
from .rows import DataTable
from .tasks import Bench, Row, Task, task_of, tasks

_NAME = "predicting"
# more tokens than any model takes
_ANY = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One adapter to train.

    Attributes:
        name: name of the adapter and the head.
        rows: training data.
        tested: test data, or None.
        classes: names of the classes in the order of their ids.
        output: folder for the adapter; None: do not save it.
        method: config string.
        epochs: passes over the training data.
        lr: initial learning rate.
        batch_size: examples per step.
        seed: seed of weights, dropout and order.
        head: options of the head.
    """

    name: str
    rows: list[Row]
    tested: list[Row] | None
    classes: list[str]
    output: Path | None
    method: str
    epochs: float
    lr: float
    batch_size: int
    seed: int
    head: Row


class _Watch(TrainerCallback):
    """Shows the progress of a run, and stops all runs at the same step after Ctrl-C."""

    def __init__(self, many: MultiAdapterTrainer, name: str, stop: _Stop, progress: str) -> None:
        self._many, self._name, self._stop, self._progress = many, name, stop, progress
        self._shown, self._is_due = time.monotonic(), False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_last = self._stop.reached(self._many.clock)
        control.should_training_stop |= is_last
        control.should_save |= is_last
        tenth = state.global_step * 10 // state.max_steps
        self._is_due = tenth > (state.global_step - 1) * 10 // state.max_steps
        # a checkpoint has the losses of all steps before it
        control.should_log |= self._is_due or control.should_save
        if time.monotonic() - self._shown > PAUSE and not self._is_due:
            self._show(state, "")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs and self._is_due:
            self._show(state, f", loss {logs['loss']:.4f}")

    def _show(self, state: Any, more: str) -> None:
        self._shown = time.monotonic()
        if self._progress == "lines":
            note(f"{self._name}: step {state.global_step:,} of {state.max_steps:,}{more}")


@dataclasses.dataclass
class _Stop:
    """Whether Ctrl-C was pressed, and the clock at which all runs stop."""

    is_asked: bool = False
    clock: int | None = None

    def reached(self, clock: int) -> bool:
        """Return whether a run stops now; some runs may have passed this clock already."""
        if self.is_asked and self.clock is None:
            self.clock = clock + 1
        return self.clock is not None and clock >= self.clock

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Return a context in which the first Ctrl-C asks to stop, and the second one stops."""
        before = signal.getsignal(signal.SIGINT)

        def ask(*_: object) -> None:
            if self.is_asked:
                note("Stopped at once.")
                # an exception would wait for the thread of the step
                os._exit(130)
            self.is_asked = True
            note("Stopping after this step; press Ctrl-C again to stop at once.")

        signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def train(
    jobs: Sequence[Job],
    *,
    task: str,
    folder: Path,
    model: str,
    max_length: int | None,
    device: str | None,
    progress: str,
    save_steps: int | None,
    columns: Mapping[str, str],
    options: Mapping[str, Any],
    best: str | None = None,
) -> list[dict[str, Any]]:
    """Train adapters over one base model in one run, test them, and save them.

    Args:
        jobs: one for each adapter.
        task: name of the task.
        folder: folder for the adapter, or for the folders of several; the run continues from the
            checkpoints in it, if there are any.
        model: folder or Hub name of the base model.
        max_length: maximum tokens per text; None: the default.
        device: device to train on; None: CUDA if available.
        progress: how to show progress, see `output.wants_progress`.
        save_steps: steps between two checkpoints; None: an epoch.
        columns: columns of the data by role, from the user; saved with the adapter.
        options: options of the command, which must be the same to resume.
        best: name under which to save the best adapter, by the metric of the task or else by loss;
            None: do not choose one.

    Returns:
        For each job: numbers of rows and steps, loss, metrics and output folder, as JSON types.

    Raises:
        CheckpointError: the base model cannot be loaded, or a folder cannot be written.
        ConfigError: the data, a method or another value is invalid.
        KeyboardInterrupt: Ctrl-C was pressed; its message says how to continue.
    """
    outputs = [job.output for job in jobs if job.output is not None]
    outputs += [] if best is None else [folder]
    for job in jobs:
        check_name(job.name)
        AdapterConfig.load(job.method)
    on = _device(device)
    kind = tasks[task]
    processor = kind.processor(model)
    set_seed(jobs[0].seed)
    adapted = load(AutoAdapterModel, model)
    for head in () if kind.keeps_head else adapted.known_heads():
        adapted.delete_head(head)
    for number, job in enumerate(jobs):
        if number:
            set_seed(job.seed)
        adapted.add_adapter(job.name, config=job.method)
        kind.add_head(adapted, job.name, job.classes, job.rows, job.head)
    adapted.to(on)
    if problem := kind.model_problem(adapted):
        raise ConfigError(problem)
    wanted = max_length or kind.length
    length = 0 if kind.is_visual else tokens_of_text(adapted, processor, wanted)
    benches = {
        job.name: Bench(model=adapted, processor=processor, length=length, labels=job.classes,
                        batch_size=job.batch_size, progress=progress,
                        settings=kind.settings(job.rows))
        for job in jobs
    }  # fmt: skip
    features = {job.name: kind.features(job.rows, benches[job.name]) for job in jobs}
    epoch = min(-(-len(features[job.name]) // job.batch_size) for job in jobs)
    is_cpu = adapted.device.type == "cpu"
    start = time.perf_counter()
    for output in outputs:
        output.mkdir(parents=True, exist_ok=True)
    stop, many = _Stop(), MultiAdapterTrainer(adapted)
    with checkpoints(folder, options) as (scratch, has_some):
        for job in jobs:
            many.add(
                job.name,
                TrainingArguments(
                    output_dir=str(scratch / job.name), num_train_epochs=job.epochs,
                    learning_rate=job.lr, seed=job.seed,
                    per_device_train_batch_size=job.batch_size, use_cpu=is_cpu,
                    dataloader_pin_memory=not is_cpu, logging_strategy="no",
                    save_strategy="steps", save_steps=save_steps or epoch, save_total_limit=2,
                    remove_unused_columns=False, report_to="none", disable_tqdm=progress != "bar",
                ),
                features[job.name],
                data_collator=kind.collator(benches[job.name]),
                callbacks=[_Watch(many, job.name, stop, progress)],
                # standard output is reserved for results
                report=False,
            )  # fmt: skip
            # the loss is part of the results, which are printed at the end
            many.runs[job.name].trainer.remove_callback(RunPrinter)
        with stop.listening():
            many.train(resume_from_checkpoint=has_some)
        states = [run.trainer.state for run in many.runs.values()]
        if any(each.global_step < each.max_steps for each in states):
            at = ", ".join(f"{each.global_step:,} of {each.max_steps:,}" for each in states)
            raise KeyboardInterrupt(
                f"stopped at step {at}; the checkpoint is in {str(scratch)!r}. "
                "Write the same command with --resume to continue."
            )
        seconds = time.perf_counter() - start
        meta = {"max_length": length, **({"columns": dict(columns)} if columns else {})}
        found = []
        for job in jobs:
            run, bench = many.runs[job.name], benches[job.name]
            state = run.trainer.state
            metrics: dict[str, Any] = {
                "name": job.name,
                "task": task,
                "method": job.method,
                "labels": job.classes,
                "train_rows": len(job.rows),
                "trained_parameters": sum(p.numel() for p in run.parameters.values()),
                "steps": int(state.global_step),
                "seconds": seconds,
                "train_loss": _mean_loss(state.log_history),
            }
            if job.tested is not None:
                adapted.set_active_adapters(job.name)
                metrics |= {"eval_rows": len(job.tested), **kind.measure(job.tested, bench)}
            found.append(metrics)
            if job.output is not None:
                metrics |= _saved(
                    adapted, job, job.name, job.output, metrics, {**meta, **bench.settings}
                )
        if best is not None:
            name, sign = kind.metric
            chosen = max(found, key=lambda m: m[name] * sign if name in m else -m["train_loss"])
            with tempfile.TemporaryDirectory(dir=folder) as copy:
                # a copy of the best adapter, so that its file has the new name
                adapted.save_adapter(copy, chosen["name"])
                adapted.load_adapter(copy, load_as=best)
            job = jobs[found.index(chosen)]
            chosen |= _saved(
                adapted, job, best, folder, chosen, {**meta, **benches[job.name].settings}
            )
    return found


def _mean_loss(history: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean of the losses of all steps, of a run that may have been resumed."""
    total, last = 0.0, 0
    for entry in history:
        if "loss" in entry:
            total += entry["loss"] * (entry["step"] - last)
            last = entry["step"]
    return total / max(last, 1)


def _saved(
    model: Any, job: Job, name: str, folder: Path, metrics: dict[str, Any], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Save an adapter with its settings and results; return its fingerprint and folder."""
    settings = {"epochs": job.epochs, "lr": job.lr, "batch_size": job.batch_size,
                "seed": job.seed, **meta}  # fmt: skip
    left_out = ("name", "method", "labels", "trained_parameters", "steps", "seconds", "train_loss")
    settings |= {key: value for key, value in metrics.items() if key not in left_out}
    model.save_adapter(folder, name, meta_dict={"train": settings})
    return {"fingerprint": model.adapter_fingerprint(name), "output": str(folder)}


def predict(
    checkpoint: CheckpointFolder,
    table: DataTable,
    *,
    model: str | None,
    batch_size: int,
    max_length: int | None,
    max_new_tokens: int,
    device: str | None,
    columns: Mapping[str, str],
    progress: str,
) -> tuple[Task, list[dict[str, Any]]]:
    """Return the task of an adapter and its predictions: rows of JSON types.

    Args:
        checkpoint: checkpoint of an adapter.
        table: the rows.
        model: base model; None: the one named in the checkpoint.
        batch_size: rows per batch.
        max_length: maximum tokens per text; None: as in training.
        max_new_tokens: maximum tokens to generate.
        device: device to compute on; None: CUDA if available.
        columns: columns of the table by role, from the user.
        progress: how to show progress, see `output.wants_progress`.

    Raises:
        CheckpointError: the adapter does not fit the base model, or its head is not for a task.
        ConfigError: there is no base model, or the table lacks a column.
    """
    settings, on = checkpoint.settings, _device(device)
    base = base_of(checkpoint, model)
    # if the task is known, the rows are read before the weights
    name = settings.get("task")
    adapted: Any = None
    if name is None:
        adapted = _with_adapter(checkpoint, base, keeps_head=False)
        has_head = _NAME in adapted.known_heads()
        head = adapted.get_head(_NAME).config if has_head else None
        name = task_of(head, checkpoint.path)
    task = tasks[name]
    rows = task.read_inputs(table, {**settings.get("columns", {}), **columns}, checkpoint.path)
    if adapted is None:
        adapted = _with_adapter(checkpoint, base, task.keeps_head)
    adapted.to(on)
    processor = task.processor(base)
    length = max_length or settings.get("max_length") or task.length
    labels: Sequence[str] = ()
    if _NAME in adapted.known_heads():
        numbers = adapted.get_head(_NAME).config.id2label or {}
        labels = [str(numbers[number]) for number in range(len(numbers))]
    bench = Bench(
        model=adapted, processor=processor, labels=labels, batch_size=batch_size,
        length=0 if task.is_visual else tokens_of_text(adapted, processor, length),
        limit=0 if task.is_visual else tokens_of_text(adapted, processor, _ANY),
        new_tokens=max_new_tokens, progress=progress, settings=settings,
    )  # fmt: skip
    return task, task.predict(rows, bench)


def _with_adapter(checkpoint: CheckpointFolder, base: str, keeps_head: bool) -> Any:
    """Return a base model with an adapter that is active."""
    adapted = load(AutoAdapterModel, base).eval()
    for head in () if keeps_head else adapted.known_heads():
        adapted.delete_head(head)
    load_into(checkpoint, adapted, _NAME, set_active=True)
    return adapted


def write(
    stream: TextIO, predictions: Sequence[dict[str, Any]], kind: str, separator: str = " "
) -> None:
    """Write predictions, one per line.

    Args:
        stream: open for text.
        predictions: as `predict` returns them.
        kind: "csv" or "jsonl".
        separator: text between the items of a list in CSV.
    """
    if kind == "jsonl":
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in predictions)
        return
    writer = csv.writer(stream, lineterminator="\n")
    for number, row in enumerate(predictions):
        # a mapping, such as of probabilities, has a column for each key
        flat = dict(
            pair
            for key, value in row.items()
            for pair in (value.items() if isinstance(value, Mapping) else [(key, value)])
        )
        if number == 0:
            writer.writerow(flat)
        writer.writerow(_cell(value, separator) for value in flat.values())


def _cell(value: object, separator: str) -> str:
    if isinstance(value, list):
        return separator.join(value)
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _device(given: str | None) -> torch.device:
    """Return the device to compute on.

    Raises:
        ConfigError: the device is not available.
    """
    device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        torch.empty(1, device=device)
    # AssertionError: torch is built for other devices
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"--device {device} is not available ({reason}). Write --device cpu."
        ) from error
    return device
