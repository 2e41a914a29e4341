"""Read texts and labels from CSV, TSV and JSON-lines files."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from adapterzoo.errors import ConfigError, listing

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson")
_NUMBER = re.compile(r"-?[0-9]{1,18}")


class Rows(NamedTuple):
    """Texts with their labels.

    Attributes:
        texts: non-empty strings.
        labels: one for each text; an empty list if no labels were read.
    """

    texts: list[str]
    labels: list[str]


def read_rows(file: Path, text: str, label: str | None) -> Rows:
    """Read the rows of a file; blank lines are skipped.

    Args:
        file: `.csv`, `.tsv`, or `.jsonl` with an object in each line.
        text: name of the column of texts.
        label: name of the column of labels; None: read no labels.

    Raises:
        ConfigError: the file is damaged, has no rows, or a row lacks a column.
        OSError: the file cannot be read.
    """
    rows = Rows([], [])
    number = 0
    try:
        for number, row in _records(file):
            for column, values in zip((text, label), rows, strict=True):
                if column is not None:
                    values.append(_value(file, number, row, column))
    except ConfigError:
        raise
    # json and UTF-8 raise a ValueError
    except (csv.Error, ValueError) as error:
        raise ConfigError(
            f"{str(file)!r} is damaged after line {number} ({error}). Write one row per line."
        ) from error
    if not rows.texts:
        raise ConfigError(f"{str(file)!r} has no rows. Write a file with rows.")
    return rows


def read_classes(
    file: Path, tested: Path | None, text: str, label: str
) -> tuple[Rows, Rows | None, list[str]]:
    """Read the training data, the test data if any, and the names of the classes.

    The classes are the labels of the training data, sorted; numbers are sorted by value.

    Args:
        file: the training data.
        tested: the test data, or None.
        text: name of the column of texts.
        label: name of the column of labels.

    Raises:
        ConfigError: a file is damaged, there is only one class, or a test label is unknown.
        OSError: a file cannot be read.
    """
    rows = read_rows(file, text, label)
    names = set(rows.labels)
    if len(names) < 2:
        raise ConfigError(f"{str(file)!r} has only the label {min(names)!r}. Write two labels.")
    test = None if tested is None else read_rows(tested, text, label)
    if test is not None and (unknown := sorted({*test.labels} - names)):
        raise ConfigError(
            f"{str(tested)!r} has the labels {listing(unknown)}, which the training data lack. "
            f"Remove the rows with these labels, or add such rows to the training data."
        )
    if all(_NUMBER.fullmatch(name) for name in names):
        return rows, test, sorted(names, key=lambda name: (int(name), name))
    return rows, test, sorted(names)


def _records(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield each row with the number of its last line."""
    ending = file.suffix.lower()
    if ending not in _SEPARATORS and ending not in _LINES:
        raise ConfigError(f"{str(file)!r} is none of {listing([*_SEPARATORS, *_LINES])}.")
    # spreadsheets write a byte order mark before the first name
    with file.open(encoding="utf-8-sig", newline="") as stream:
        if ending in _LINES:
            lines = enumerate(stream, 1)
            yield from ((number, json.loads(line)) for number, line in lines if line.strip())
            return
        reader = csv.DictReader(stream, delimiter=_SEPARATORS[ending], strict=True)
        for row in reader:
            # more values than columns mean that an unquoted text contains a separator
            if any(row.get(reader.restkey) or ()):
                raise ConfigError(
                    f"line {reader.line_num} of {str(file)!r} has more values than columns. Write "
                    f"texts with {_SEPARATORS[ending]!r} in double quotes."
                )
            yield reader.line_num, row


def _value(file: Path, number: int, row: Any, column: str) -> str:
    value = row.get(column) if isinstance(row, dict) else None
    if not isinstance(value, (str, int, float)) or not str(value).strip():
        there = listing(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ConfigError(
            f"line {number} of {str(file)!r} has no text in the column {column!r} ({there}). Write "
            f"one there, or the columns as --text-column and --label-column."
        )
    return str(value)
