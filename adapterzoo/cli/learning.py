"""`train` and `predict`: adapters that classify texts, trained on a file of examples."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from adapterzoo.errors import ConfigError

from .app import command, json_option, model_option
from .early import POOLINGS, check_adapter, check_base, check_can_write
from .output import be_quiet, note, print_facts, print_json, wants_progress
from .rows import read_classes, read_rows

_text_column = click.option("--text-column", default="text", help="Name of the column of texts.")
_batch_size = click.option(
    "--batch-size", default=16, type=click.IntRange(min=1), help="Texts per batch."
)
_device = click.option("--device", help="cpu or cuda.  [default: cuda if available]")


@command(
    "train",
    example="adapterzoo train --model bert-base-uncased --train train.csv --eval test.csv "
    "--output runs/reviews",
)
@click.option("--model", required=True, help="Folder or Hub name of the base model.")
@click.option("--train", "train_file", required=True, metavar="FILE", help="Training data.")
@click.option("--eval", "eval_file", metavar="FILE", help="Test data.")
@click.option("--output", required=True, metavar="FOLDER", help="Folder for the adapter.")
@click.option("--method", help="Config string of the adapter.  [default: that of add_adapter]")
@click.option("--name", help="Name of adapter and head.  [default: last part of FOLDER]")
@click.option("--epochs", default=3.0, type=click.FloatRange(min=0, min_open=True))
@click.option("--lr", default=1e-3, type=click.FloatRange(min=0, min_open=True),
              help="Initial learning rate; decays to 0.")  # fmt: skip
@_batch_size
@click.option("--max-length", type=click.IntRange(min=1),
              help="Maximum tokens per text.  [default: 128]")  # fmt: skip
@click.option("--pooling", default="auto", type=click.Choice(POOLINGS),
              help="How the head reduces a text to one vector.")  # fmt: skip
@click.option("--layers", default=1, type=click.IntRange(min=1), help="Layers of the head.")
@click.option(
    "--seed", default=0, type=click.IntRange(min=0), help="Seed of weights and row order."
)
@_device
@_text_column
@click.option("--label-column", default="label", help="Name of the column of labels.")
@json_option
def train_command(
    model: str,
    train_file: str,
    eval_file: str | None,
    output: str,
    method: str | None,
    name: str | None,
    text_column: str,
    label_column: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Train an adapter and a head that classify texts; the base model does not change.

    Data are .csv or .tsv files with a line of column names, or .jsonl files with an object in each
    line; each row has a text and a label. The classes are the labels of the training data. With
    --eval the accuracy on the test data is printed.
    """
    name = name or Path(output).name
    check_base(model)
    check_can_write(output, "--output ")
    files = Path(train_file), None if eval_file is None else Path(eval_file)
    rows, tested, classes = read_classes(*files, text_column, label_column)

    # these import torch, but not transformers
    from adapterzoo.configs import AdapterConfig
    from adapterzoo.names import check_name

    check_name(name)
    method = method or str(AdapterConfig.default)
    AdapterConfig.load(method)

    from .training import TrainOptions, train

    shown = wants_progress(as_json)
    be_quiet(shown)
    metrics = train(
        TrainOptions(
            model=model, rows=rows, tested=tested, classes=classes, output=Path(output),
            method=method, name=name, progress=shown, **options,
        )
    )  # fmt: skip
    if as_json:
        print_json(metrics)
        return
    print_facts({key.replace("_", " "): _shown(value) for key, value in metrics.items()})


@command(
    "predict", example='adapterzoo predict runs/reviews --text "A film to remember." --format jsonl'
)
@click.argument("path")
@click.option("--text", "texts", multiple=True, help="A text; may be repeated.")
@click.option("--file", metavar="FILE", help="Rows with texts: .csv, .tsv or .jsonl.")
@click.option("--output", metavar="FILE", help="File to write.  [default: standard output]")
@click.option("--format", "written", default="csv", type=click.Choice(("csv", "jsonl")))
@click.option("--json", "as_json", is_flag=True, help="The same as --format jsonl.")
@model_option
@_batch_size
@click.option("--max-length", type=click.IntRange(min=1),
              help="Maximum tokens per text.  [default: as in training]")  # fmt: skip
@_device
@_text_column
@click.option("--revision", help="Branch, tag or commit of PATH on the Hub.")
def predict_command(
    path: str,
    texts: tuple[str, ...],
    file: str | None,
    output: str | None,
    written: str,
    as_json: bool,
    model: str | None,
    text_column: str,
    revision: str | None,
    **options: Any,
) -> None:
    """Predict the label of each text with an adapter and its head, and all probabilities.

    PATH is a folder or 'user/repository'. CSV output has the columns text, label and one for each
    class; JSON lines have text, label and probabilities. A regression head gives its value.
    """
    if (file is None) == (not texts):
        raise click.UsageError("Write either --text or --file.")
    if output is not None and not _can_be_written(Path(output)):
        # checked before the work, not after it
        raise _unwritable(output, "it is a folder, or there is none that can be written")
    rows = list(texts) if file is None else read_rows(Path(file), text_column, None).texts
    check_adapter(path)
    check_base(model)

    from .checkpoints import open_checkpoint
    from .predicting import predict, write

    shown = wants_progress(as_json)
    be_quiet(shown)
    checkpoint = open_checkpoint(path, revision)
    predictions = predict(checkpoint, rows, model=model, progress=shown, **options)
    kind = "jsonl" if as_json else written
    if output is None:
        write(sys.stdout, predictions, kind)
        return
    try:
        with Path(output).open("w", encoding="utf-8", newline="") as stream:
            write(stream, predictions, kind)
    except OSError as error:
        raise _unwritable(output, str(error.strerror or error)) from error
    note(f"{output}: {len(rows):,} rows")


def _can_be_written(file: Path) -> bool:
    # unlike Path.exists, os.access does not raise if a parent folder is not accessible
    if os.access(file, os.F_OK):
        return not file.is_dir() and os.access(file, os.W_OK)
    return os.access(file.absolute().parent, os.W_OK | os.X_OK)


def _unwritable(output: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--output {output!r} cannot be written ({reason}). Write a path in a folder that is there."
    )


def _shown(value: object) -> object:
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else value
