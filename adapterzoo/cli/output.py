"""Printing: results to standard output, progress and notes to standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from adapterzoo import errors
from adapterzoo.errors import CheckpointError

T = TypeVar("T")


def nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists and is accessible.

    Args:
        path: of a file or folder that may be missing.
    """
    # unlike Path.exists, os.access does not raise if a parent is not accessible
    return next(p for p in (path, *path.absolute().parents) if os.access(p, os.F_OK))


def check_can_write(path: str, option: str = "", is_file: bool = False) -> None:
    """Check that files can be written to a folder, which may not exist yet, before any work.

    Args:
        path: of the folder.
        option: the option with the path, for messages.
        is_file: whether it is the path of a file in a folder that exists.

    Raises:
        CheckpointError: they cannot be written.
    """
    there = Path(path).absolute().parent if is_file else nearest(Path(path))
    # unlike Path.is_dir, os.access does not raise if a parent folder is not accessible
    writable = os.access(there, os.W_OK | os.X_OK) and there.is_dir()
    if not writable or (is_file and Path(path).is_dir()):
        what = "a file in a folder that exists" if is_file else "a folder"
        raise CheckpointError(
            f"{option}{path!r} cannot be written. Write the path of {what} that can be written to."
        )


def print_json(value: Any) -> None:
    """Print a JSON value; other types are printed as text.

    Args:
        value: JSON types.
    """
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def write_json(file: str, value: Any) -> None:
    """Write a JSON value to a file.

    Args:
        file: its path.
        value: JSON types.
    """
    Path(file).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def print_facts(facts: Mapping[str, object]) -> None:
    """Print names and values in two columns; leave out values of None.

    Args:
        facts: in the order to show them.
    """
    shown = {name: value for name, value in facts.items() if value is not None}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        click.echo(f"{name:<{width}}  {printable(str(value))}")


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, with columns of numbers aligned right.

    Args:
        titles: of the columns.
        rows: one value for each column; None is shown as "-".
    """
    rows = list(rows)
    columns = list(zip(*rows, strict=True)) or [()] * len(titles)
    right = [any(isinstance(v, int) for v in column) for column in columns]
    for line in errors.columns([titles, *([_shown(v) for v in row] for row in rows)], right):
        click.echo(line)


def note(text: str) -> None:
    """Print a note.

    Args:
        text: one line.
    """
    click.echo(printable(text), err=True)


def wants_progress(as_json: bool) -> bool:
    """Return whether to show progress: only to a person at a terminal.

    Args:
        as_json: whether a program reads the result.
    """
    return not as_json and sys.stderr.isatty()


def progress(items: Sequence[T], title: str, shown: bool) -> Iterable[T]:
    """Iterate with a progress bar on standard error.

    Args:
        items: to iterate over.
        title: before the bar.
        shown: whether to show the bar.
    """
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, title, disable=not shown, leave=False, file=sys.stderr)
    return bar


def be_quiet(shown: bool) -> None:
    """Silence other libraries.

    Args:
        shown: whether to keep their progress bars.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not shown:
        # those of huggingface_hub too
        logging.disable_progress_bar()


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


def printable(text: str, kept: str = "") -> str:
    """Escape unprintable characters, such as a terminal's control sequences.

    Args:
        text: not trusted.
        kept: unprintable characters to keep.
    """
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)
