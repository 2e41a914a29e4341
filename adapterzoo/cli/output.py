"""Printing: results to standard output, progress and notes to standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from adapterzoo import errors


def print_json(value: Any) -> None:
    """Print a JSON value; other types are printed as text.

    Args:
        value: a value of JSON types.
    """
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_facts(facts: Mapping[str, object], as_json: bool = False) -> None:
    """Print names and values in two columns, without empty values; or as JSON.

    Args:
        facts: names and values, in the order to show them.
        as_json: whether a program reads them.
    """
    if as_json:
        print_json(facts)
        return
    shown = [(k.replace("_", " "), _shown(v)) for k, v in facts.items() if v not in (None, {}, [])]
    for line in errors.columns(shown, [False, False]):
        click.echo(line)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, with columns of numbers aligned right.

    Args:
        titles: titles of the columns.
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


PAUSE = 30.0
"""Seconds between two lines of progress."""


def wants_progress(as_json: bool) -> str:
    """Return how to show progress: "bar" at a terminal, "lines" elsewhere, or "" for a program.

    Args:
        as_json: whether a program reads the result.
    """
    if as_json:
        return ""
    return "bar" if sys.stderr.isatty() else "lines"


def tracked(items: Sequence[int], title: str, progress: str) -> Iterator[int]:
    """Yield the items, and show how many are done: by a bar, or by a line from time to time.

    Args:
        items: the items to work on.
        title: name of the work.
        progress: as `wants_progress` returns it.
    """
    from tqdm import tqdm

    shown = time.monotonic()
    bar = tqdm(items, title, disable=progress != "bar", leave=False, file=sys.stderr)
    for number, item in enumerate(bar, 1):
        yield item
        if progress == "lines" and time.monotonic() - shown > PAUSE:
            shown = time.monotonic()
            note(f"{title}: batch {number:,} of {len(items):,}")


def be_quiet(progress: str = "") -> None:
    """Silence other libraries.

    Args:
        progress: "bar" keeps their progress bars.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    if progress != "bar":
        # this also turns off those of huggingface_hub
        logging.disable_progress_bar()


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        value = [f"{key}={each!r}" for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else printable(str(value))


def printable(text: str, allowed: str = "") -> str:
    """Escape unprintable characters, such as a terminal's control sequences.

    Args:
        text: not trusted.
        allowed: unprintable characters to keep.
    """
    return "".join(c if c.isprintable() or c in allowed else repr(c)[1:-1] for c in text)
