"""Rows of text, and of text with a label, out of CSV, TSV and JSON-lines files."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapterzoo.errors import ConfigError, listing

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson")
_NUMBER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Rows:
    """Texts with their labels.

    Attributes:
        texts: none is empty.
        labels: one for each text; empty where no labels were asked for.
    """

    texts: list[str]
    labels: list[str]


def read_rows(call: str, file: Path, text: str, label: str | None) -> Rows:
    """The rows of a file; blank lines are passed over.

    Args:
        call: what the user wrote, for messages.
        file: its ending says what it is: `.csv`, `.tsv`, or `.jsonl` with an object in each line.
        text: name of the column of texts.
        label: name of the column of labels; None: there need not be one.

    Raises:
        ConfigError: the file cannot be read, has no rows, or a row lacks a column.
    """
    rows = Rows([], [])
    number = 0
    try:
        for number, row in _records(call, file):
            rows.texts.append(_value(call, file, number, row, text))
            if label is not None:
                rows.labels.append(_value(call, file, number, row, label))
    except OSError as error:
        raise ConfigError(
            f"{call}: {str(file)!r} cannot be read ({error.strerror or error}). Write the path of "
            f"a .csv, .tsv or .jsonl file."
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"{call}: {str(file)!r} is damaged after line {number} ({error}). Save it as UTF-8."
        ) from error
    if not rows.texts:
        raise ConfigError(f"{call}: {str(file)!r} has no rows. Write a file that has some.")
    return rows


@dataclass(frozen=True, slots=True)
class Numbered:
    """Texts with the numbers of their classes.

    Attributes:
        texts: none is empty.
        numbers: one for each text.
    """

    texts: list[str]
    numbers: list[int]


def read_classes(
    call: str, file: Path, tested: Path | None, text: str, label: str
) -> tuple[Numbered, Numbered | None, list[str]]:
    """The rows to learn from, those to test on if any, and the names of the classes.

    Args:
        call: what the user wrote, for messages.
        file: of the rows to learn from.
        tested: of the rows to test on, or None.
        text: name of the column of texts.
        label: name of the column of labels.

    Raises:
        ConfigError: a file cannot be read, or its rows are not to be learnt from.
    """
    rows = read_rows(call, file, text, label)
    names = class_names(call, file, rows.labels)
    learnt = Numbered(rows.texts, class_numbers(call, file, rows.labels, names))
    if tested is None:
        return learnt, None, names
    judged = read_rows(call, tested, text, label)
    return learnt, Numbered(judged.texts, class_numbers(call, tested, judged.labels, names)), names


def class_names(call: str, file: Path, labels: list[str]) -> list[str]:
    """The classes in the labels of the rows to train on, sorted; numbers by their value.

    Raises:
        ConfigError: there are fewer than two.
    """
    names = set(labels)
    if len(names) < 2:
        raise ConfigError(
            f"{call}: all rows of {str(file)!r} have the label {min(names)!r}, so there is nothing "
            f"to tell apart. Write a file with two labels or more."
        )
    numbers = all(_NUMBER.fullmatch(name) for name in names)
    return sorted(names, key=(lambda name: (int(name), name)) if numbers else str)


def class_numbers(call: str, file: Path, labels: list[str], names: list[str]) -> list[int]:
    """Labels as the numbers of their classes.

    Raises:
        ConfigError: a label is no class.
    """
    if unknown := sorted(set(labels) - set(names)):
        raise ConfigError(
            f"{call}: {str(file)!r} has the labels {listing(unknown)}, which no row to train on "
            f"has; those have {listing(names)}. Take these rows out, or train on such rows too."
        )
    numbers = {name: number for number, name in enumerate(names)}
    return [numbers[label] for label in labels]


def _records(call: str, file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows with the numbers of the lines in which they end."""
    ending = file.suffix.lower()
    if ending not in _SEPARATORS and ending not in _LINES:
        raise ConfigError(
            f"{call}: {str(file)!r} ends in {ending!r}; legal are "
            f"{listing([*_SEPARATORS, *_LINES])}. Write --help for how a file looks."
        )
    # a mark at the start, as spreadsheets write it, is no part of the first name
    with file.open(encoding="utf-8-sig", newline="") as stream:
        if ending in _SEPARATORS:
            reader = csv.DictReader(stream, delimiter=_SEPARATORS[ending], strict=True)
            for row in reader:
                # what is in no column: a separator stands in a text that is not quoted
                if any(row.get(reader.restkey) or ()):
                    raise ConfigError(
                        f"{call}: line {reader.line_num} of {str(file)!r} has more values than "
                        f"there are columns: {listing(reader.fieldnames or ())}. Write texts with "
                        f"{_SEPARATORS[ending]!r} in double quotes."
                    )
                yield reader.line_num, row
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield number, _object(call, file, number, line)


def _object(call: str, file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{call}: line {number} of {str(file)!r} is no JSON ({error}). Write one object in "
            f"each line."
        ) from error
    if not isinstance(row, dict):
        raise ConfigError(
            f"{call}: line {number} of {str(file)!r} holds a {type(row).__name__}. Write one "
            f"object in each line."
        )
    return row


def _value(call: str, file: Path, number: int, row: dict[str, Any], column: str) -> str:
    if column not in row:
        raise ConfigError(
            f"{call}: {str(file)!r} has no column {column!r} (line {number}); it has "
            f"{listing(sorted(map(str, row)))}. Write --text-column or --label-column."
        )
    value = row[column]
    if not isinstance(value, (str, int, float)) or not str(value).strip():
        raise ConfigError(
            f"{call}: line {number} of {str(file)!r} has {value!r} in the column {column!r}. "
            f"Write a text there, or take the row out."
        )
    return str(value)
