"""Read the rows of files and folders: CSV, TSV, JSON, JSON lines, `datasets`, folders of images."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from adapterzoo.errors import ConfigError, listing

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson")
_ENDINGS = (*_SEPARATORS, *_LINES, ".json")
# files that `save_to_disk` of datasets writes beside the rows: for one data set, for several
_DATASET, _DATASETS = "state.json", "dataset_dict.json"


@dataclass(frozen=True, slots=True)
class Role:
    """What a task reads from one column.

    Attributes:
        names: possible names of the column; the first one that a row has is read.
        read: converts the value of a cell to what the task takes, given the folder of the file;
            raises a ValueError that says what the cell lacks.
        is_needed: whether every row must have it.
    """

    names: tuple[str, ...]
    read: Callable[[Any, Path], Any]
    is_needed: bool = True


@dataclass(frozen=True, slots=True)
class DataTable:
    """The rows of a file or folder, before a task reads them.

    Attributes:
        path: the file or folder.
        rows: a mapping for each row; `select` refuses other JSON values.
        numbers: the line number of each row, for messages.
        is_typed: whether the rows come from options of the command, not from a file.
    """

    path: Path
    rows: list[Any]
    numbers: list[int]
    is_typed: bool = False

    def select(self, roles: Mapping[str, Role], chosen: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the values of a task in each row.

        Args:
            roles: roles of the task, by name.
            chosen: names of columns by role, from the user.

        Raises:
            ConfigError: a row lacks a column, or has a value that the task cannot take.
        """
        folder = self.path if self.path.is_dir() else self.path.parent
        return [
            dict(self._values(number, row, roles, chosen, folder))
            for number, row in zip(self.numbers, self.rows, strict=True)
        ]

    def _values(
        self,
        number: int,
        row: Any,
        roles: Mapping[str, Role],
        chosen: Mapping[str, str],
        folder: Path,
    ) -> Iterator[tuple[str, Any]]:
        there = row if isinstance(row, dict) else {}
        for name, role in roles.items():
            names = (chosen[name],) if name in chosen else role.names
            column = next((each for each in names if there.get(each) is not None), None)
            try:
                if column is not None:
                    yield name, role.read(there[column], folder)
                    continue
                problem = "nothing"
            except ValueError as error:
                problem = str(error)
            if column is None and not role.is_needed and name not in chosen:
                continue
            asked = column or names[0]
            shown = listing(map(str, there)) if there else f"a value of type {type(row).__name__}"
            near = get_close_matches(asked, [str(each) for each in there if each != asked], 1)
            is_table = self.path.suffix in (".csv", ".tsv")
            is_unnamed = is_table and asked not in there
            place = "that name in the first line" if is_unnamed else "a value there"
            hint = f"Did you mean --column {name}={near[0]}?" if near and column is None else (
                f"Write {place}, or --column {name}=NAME."
            )  # fmt: skip
            if self.path.suffix == ".csv" and len(there) == 1 and ";" in next(iter(there)):
                hint = "Write ',' between the columns, not ';'."
            raise ConfigError(
                f"line {number} of {str(self.path)!r} has {problem} in the column {asked!r} "
                f"({shown}). {hint}"
            )


def read(path: Path) -> DataTable:
    """Read all rows; blank lines are skipped.

    Args:
        path: `.csv`, `.tsv`, `.jsonl` with an object in each line, `.json` with a list of objects,
            a folder that `save_to_disk` of datasets has written, or a folder with a subfolder of
            images for each label.

    Raises:
        ConfigError: there is no such file, it is damaged, or it has no rows.
        OSError: the file cannot be read.
    """
    if not path.exists():
        hint = nearest(path) or " Write the name of a file or folder."
        raise ConfigError(f"there is no file {str(path)!r}.{hint}")
    numbers, rows, number = [], [], 0
    try:
        for number, row in _records(path):
            numbers.append(number)
            rows.append(row)
    except ConfigError:
        raise
    # json and UTF-8 raise a ValueError
    except (csv.Error, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} is damaged after line {number} ({error}). Write one row per line."
        ) from error
    if not rows:
        raise ConfigError(f"{str(path)!r} has no rows. Write a file with rows.")
    return DataTable(path, rows, numbers)


def nearest(path: Path) -> str:
    """Return a question about the file or folder with the most similar name; empty if none is.

    Args:
        path: a path that does not exist.
    """
    try:
        near = get_close_matches(path.name, [each.name for each in path.parent.iterdir()], 1)
    except OSError:
        return ""
    return f" Did you mean {str(path.with_name(near[0]))!r}?" if near else ""


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each row with the number of its last line."""
    if path.is_dir():
        yield from enumerate(_in_folder(path), 1)
        return
    ending = path.suffix.lower()
    if ending not in _ENDINGS:
        raise ConfigError(
            f"{str(path)!r} is not a folder, and its name ends in none of {listing(_ENDINGS)}. "
            f"Write a file of one of these kinds."
        )
    # spreadsheets write a byte order mark before the first name
    with path.open(encoding="utf-8-sig", newline="") as stream:
        if ending == ".json":
            rows = json.load(stream)
            # datasets and others put the list under a name
            if isinstance(rows, dict):
                rows = next((value for value in rows.values() if isinstance(value, list)), [])
            yield from enumerate(rows, 1)
            return
        if ending in _LINES:
            lines = enumerate(stream, 1)
            yield from ((number, json.loads(line)) for number, line in lines if line.strip())
            return
        reader = csv.DictReader(stream, delimiter=_SEPARATORS[ending], strict=True)
        for row in reader:
            # more values than columns mean that an unquoted text contains a separator
            if any(row.get(reader.restkey) or ()):
                raise ConfigError(
                    f"line {reader.line_num} of {str(path)!r} has more values than columns. Write "
                    f"texts with {_SEPARATORS[ending]!r} in double quotes."
                )
            yield reader.line_num, row


def _in_folder(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set on disk, or an image and its label for each file."""
    if (folder / _DATASETS).is_file():
        parts = sorted(str(each) for each in folder.iterdir() if each.is_dir())
        raise ConfigError(f"{str(folder)!r} has several data sets. Write one: {listing(parts)}.")
    if not (folder / _DATASET).is_file():
        for file in sorted(folder.glob("*/*")):
            if file.is_file() and not file.name.startswith("."):
                yield {"image": str(file.relative_to(folder)), "label": file.parent.name}
        return
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{str(folder)!r} is a data set of the library datasets, which is not installed. "
            "Write pip install datasets, or a .csv or .jsonl file."
        ) from error
    loaded = datasets.load_from_disk(str(folder))
    # the number of a class → its name, alone or in a list
    names = {
        column: feature.int2str
        for column, kind in loaded.features.items()
        if hasattr(feature := getattr(kind, "feature", kind), "int2str")
    }
    for row in loaded:
        yield {
            key: names[key](value) if key in names and value is not None else value
            for key, value in row.items()
        }


# --- values of cells ---


def text(value: Any, _folder: Path) -> str:
    """Return a text, or a number as a text."""
    if not isinstance(value, (str, int, float)) or not str(value).strip():
        raise ValueError("no text")
    return str(value)


def words(value: Any, folder: Path) -> list[str]:
    """Return a list of texts; those of one text are separated by spaces."""
    found = value.split() if isinstance(value, str) else value
    if not isinstance(found, list) or not found:
        raise ValueError("no list of words")
    return [text(each, folder) for each in found]


def labels(value: Any, folder: Path) -> str | list[str]:
    """Return a label, or a list of any number of labels."""
    return (
        [text(each, folder) for each in value] if isinstance(value, list) else text(value, folder)
    )


def answers(value: Any, folder: Path) -> list[tuple[str, int | None]]:
    """Return answers with their starts; a start is None if the answer is found by its text.

    A question without an answer has an empty text, or an empty list.
    """
    if value in ("", []):
        return []
    if isinstance(value, dict):
        starts = value.get("answer_start", value.get("start"))
        value, starts = value.get("text"), starts if isinstance(starts, list) else [starts]
        found = value if isinstance(value, list) else [value]
        if len(found) == len(starts):
            return [(text(t, folder), _start(s)) for t, s in zip(found, starts, strict=True)]
        raise ValueError("no texts with starts")
    return [(text(value, folder), None)]


def start(value: Any, _folder: Path) -> int:
    """Return a position in a text, counted in characters."""
    if (found := _start(value)) is None:
        raise ValueError("no number")
    return found


def _start(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) else None


def image(value: Any, folder: Path) -> Any:
    """Return the path of an image file, or an image that is already open."""
    if isinstance(value, str):
        if not (file := folder / value).is_file():
            raise ValueError(f"no file {str(file)!r}{nearest(file)}")
        return file
    if not hasattr(value, "convert"):
        raise ValueError("no image")
    return value
