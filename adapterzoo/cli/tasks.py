"""The tasks of `train` and `predict`: what they read, learn, measure and print.

A task is an object in `tasks`; the commands do not name any. Its columns are those that `datasets`
and the examples of transformers use. The module imports fast: only what trains and predicts
imports torch and transformers.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from adapterzoo.errors import CheckpointError, ConfigError, listing

from . import rows as cells
from .output import tracked
from .rows import DataTable, Role

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]

# the label of tokens that the loss ignores
_IGNORED = -100
_NUMBER = re.compile(r"[-+]?([0-9]+([.][0-9]*)?|[.][0-9]+)([eE][-+]?[0-9]{1,3})?")
# more fractions than these are values
_GRADES = 20
# tokens of a row that shows whether a model sees later ones
_ROW = 6
# maximum tokens of an answer
_ANSWER = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A model with an active adapter, and everything that turns rows into its inputs.

    Attributes:
        model: with an active adapter.
        processor: the tokenizer or image processor of the base model.
        length: maximum tokens of a text.
        labels: labels of the head, in the order of their ids.
        batch_size: rows in a batch.
        new_tokens: maximum tokens to generate.
        limit: maximum tokens of the model.
        progress: how to show it, see `output.wants_progress`.
        settings: settings of the training, see `Task.settings`.
    """

    model: Any
    processor: Any
    length: int = 0
    labels: Sequence[str] = ()
    batch_size: int = 16
    new_tokens: int = 64
    limit: int = 0
    progress: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def batches(self, features: Sequence[Row], collate: Any) -> Iterator[tuple[list[int], Any]]:
        """Yield the numbers of the features of each batch, and the batch; short texts first.

        Args:
            features: as a task makes them.
            collate: makes a batch of them.
        """
        self.model.eval()
        order = list(range(len(features)))
        if isinstance(features, list):
            order.sort(key=lambda number: len(features[number]["input_ids"]))
        for first in tracked(range(0, len(order), self.batch_size), "predicting", self.progress):
            numbers = order[first : first + self.batch_size]
            batch = collate([features[number] for number in numbers])
            yield numbers, {key: value.to(self.model.device) for key, value in batch.items()}

    def logits(
        self, features: Sequence[Row], collate: Any, names: Sequence[str] = ("logits",)
    ) -> list[Any]:
        """Return an output for each feature, in float32 on the CPU.

        Args:
            features: as a task makes them.
            collate: makes a batch of them.
            names: names of the outputs; several are stacked in the last dimension.
        """
        import torch

        found: list[Any] = [None] * len(features)
        with torch.inference_mode():
            for numbers, batch in self.batches(features, collate):
                output = self.model(**batch)
                values = [output[each].float().cpu() for each in names]
                value = torch.stack(values, -1) if len(names) > 1 else values[0]
                for number, each in zip(numbers, value, strict=True):
                    found[number] = each
        return found

    def generated(self, features: Sequence[Row], collate: Any, skip: bool) -> list[str]:
        """Return the text that the model generates for each feature, by greedy search.

        Args:
            features: prompts.
            collate: pads them on the left if there is no encoder.
            skip: whether the output begins with the prompt.
        """
        import torch

        found = [""] * len(features)
        # those of the model, of which there may be several, and the one that `train` has added
        known = self.model.generation_config.eos_token_id
        ends = {self.processor.eos_token_id, *(known if isinstance(known, list) else [known])}
        with torch.inference_mode():
            for numbers, batch in self.batches(features, collate):
                start = batch["input_ids"].shape[1] * skip
                tokens = self.model.generate(
                    **batch,
                    max_new_tokens=min(self.new_tokens, self.limit - start),
                    do_sample=False,
                    pad_token_id=self.processor.pad_token_id,
                    eos_token_id=sorted(ends - {None}) or None,
                )
                tokens = tokens[:, start:]  # [batch, new tokens]
                texts = self.processor.batch_decode(tokens, skip_special_tokens=True)
                for number, each in zip(numbers, texts, strict=True):
                    found[number] = each
        return found

    def perplexity(self, features: Sequence[Row], collate: Any, first: int) -> float:
        """Return the perplexity: exp of the mean loss of the tokens that have a label.

        Args:
            features: with labels.
            collate: makes a batch of them.
            first: number of the first label of a row that has a logit.
        """
        import torch

        total, count = 0.0, 0
        with torch.inference_mode():
            for _, batch in self.batches(features, collate):
                counted = int((batch["labels"][:, first:] != _IGNORED).sum())
                total += float(self.model(**batch).loss) * counted
                count += counted
        return math.exp(min(total / max(count, 1), 700.0))


class Task(ABC):
    """What is done with rows; one instance of each class is in `tasks`.

    Attributes:
        title: what the help calls it.
        roles: the columns of training data.
        inputs: the columns of rows to predict.
        options: options of `predict`, each with a value for the column of its name.
        head_options: options of `train` that this task's head takes.
        length: maximum tokens of a text, if the user does not choose.
        metric: the metric by which the best adapter is chosen, and its sign: −1 if less is better.
        separator: text between the items of a list in a CSV file.
        keeps_head: whether the base model's own head is used, where it has one.
        is_visual: whether the inputs are images.
    """

    title: ClassVar[str]
    roles: ClassVar[Mapping[str, Role]]
    inputs: ClassVar[Mapping[str, Role]]
    options: ClassVar[tuple[str, ...]] = ("text",)
    head_options: ClassVar[frozenset[str]] = frozenset({"layers"})
    length: ClassVar[int] = 128
    metric: ClassVar[tuple[str, int]] = ("accuracy", 1)
    separator: ClassVar[str] = " "
    keeps_head: ClassVar[bool] = False
    is_visual: ClassVar[bool] = False

    # --- rows ---

    def read(self, table: DataTable, chosen: Mapping[str, str]) -> list[Row]:
        """Return the rows of training or test data.

        Args:
            table: table of a file.
            chosen: columns by role, from the user.

        Raises:
            ConfigError: a row lacks what the task learns from.
        """
        found = table.select(self.roles, chosen)
        for number, row in zip(table.numbers, found, strict=True):
            if problem := self.problem(row):
                raise ConfigError(f"line {number} of {str(table.path)!r} {problem}")
        return found

    def check_columns(self, chosen: Iterable[str]) -> None:
        """Check the roles for which the user has chosen columns.

        Args:
            chosen: names of roles.

        Raises:
            UsageError: the task does not have one of these roles.
        """
        if unknown := {*chosen} - {*self.roles, *self.inputs}:
            raise click.UsageError(
                f"--column {min(unknown)}=…: the columns of this task are {', '.join(self.roles)}."
            )

    def problem(self, row: Row) -> str | None:
        """Return what is wrong with a row, as the end of a sentence, and a hint; None: nothing."""
        return None

    def labels_in(self, row: Row) -> Iterable[str]:
        """Return the labels in a row."""
        return ()

    def settings(self, rows: Sequence[Row]) -> Row:
        """Return what `predict` must know of the training data; it is saved with the adapter."""
        return {}

    def classes(self, path: Path, rows: Sequence[Row]) -> list[str]:
        """Return all labels, sorted; numbers are sorted by value.

        Args:
            path: the file.
            rows: the training data.

        Raises:
            ConfigError: there is only one label, or the labels are values, not classes.
        """
        names = {label for row in rows for label in self.labels_in(row)}
        if len(names) == 1:
            raise ConfigError(
                f"{str(path)!r} has only the label {min(names)!r}. Add rows with another label."
            )
        if not all(_NUMBER.fullmatch(name) for name in names):
            return sorted(names)
        return sorted(names, key=lambda name: (Decimal(name), name))

    def check_test(self, path: Path, rows: Sequence[Row], classes: Sequence[str]) -> None:
        """Check the test data.

        Args:
            path: the file.
            rows: the rows of the file.
            classes: labels of the training data.

        Raises:
            ConfigError: the rows have labels that the training data lack.
        """
        if unknown := sorted({n for row in rows for n in self.labels_in(row)} - {*classes}):
            raise ConfigError(
                f"{str(path)!r} has the labels {listing(unknown)}, which the training data lack. "
                f"Remove the rows with these labels, or add such rows to the training data."
            )

    def read_inputs(self, table: DataTable, chosen: Mapping[str, str], path: str) -> list[Row]:
        """Return the rows to predict.

        Args:
            table: table of a file, or of options of the command.
            chosen: columns by role, from the user.
            path: path of the adapter.

        Raises:
            ConfigError: a row lacks what the task reads.
        """
        if table.is_typed and table.rows[0].keys() != {*self.options}:
            asked = " and ".join(f"--{each}" for each in self.options)
            raise ConfigError(f"{path!r} predicts {self.title}. Write {asked}, or --file.")
        self.check_columns(chosen)
        return table.select(self.inputs, {} if table.is_typed else chosen)

    # --- the model ---

    def processor(self, base: str) -> Any:
        """Load the tokenizer or image processor of a base model."""
        from .models import tokenizer_of

        return tokenizer_of(base)

    @abstractmethod
    def add_head(
        self, model: Any, name: str, labels: Sequence[str], rows: Sequence[Row], options: Row
    ) -> None:
        """Add the head of an adapter.

        Args:
            model: model with the adapter.
            name: name of adapter and head.
            labels: labels of the head.
            rows: the training data.
            options: the user's values of `head_options`.
        """

    def model_problem(self, model: Any) -> str | None:
        """Return why a model cannot learn the task, and what to write; None: it can.

        Args:
            model: in evaluation mode, with an active head.
        """
        return None

    @abstractmethod
    def features(self, rows: Sequence[Row], bench: Bench) -> Sequence[Row]:
        """Return rows with labels as the model takes them; one row may become several."""

    def collator(self, bench: Bench) -> Any:
        """Return what makes a batch of features."""
        return _padding(bench)

    @abstractmethod
    def predict(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        """Return what is printed for each row."""

    @abstractmethod
    def measure(self, rows: Sequence[Row], bench: Bench) -> dict[str, float]:
        """Return the metrics of an adapter on test data."""


def _padding(bench: Bench) -> Any:
    """Return what makes a batch of inputs without labels."""
    from transformers import DataCollatorWithPadding

    return DataCollatorWithPadding(bench.processor)


class _Classification(Task):
    """One label for each row, or any number of them.

    Attributes:
        adds: name of the method that adds the head.
    """

    adds: ClassVar[str]
    separator: ClassVar[str] = "|"
    head_options: ClassVar[frozenset[str]] = frozenset({"layers", "pooling"})

    def labels_in(self, row: Row) -> Iterable[str]:
        return row["label"] if isinstance(row["label"], list) else [row["label"]]

    def classes(self, path: Path, rows: Sequence[Row]) -> list[str]:
        names = super().classes(path, rows)
        if not all(_NUMBER.fullmatch(name) for name in names):
            return names
        counts = Counter(label for row in rows for label in self.labels_in(row))
        # half stars are classes if there are a few of them, each in several rows
        if len(names) <= _GRADES and min(counts.values(), default=0) > 1:
            return names
        # 1.0 is a class in the tables of pandas, 0.25 a value
        values = [name for name in names if (n := Decimal(name)) != n.to_integral_value()]
        if values:
            raise ConfigError(
                f"{str(path)!r} has the labels {listing(values, limit=3)}, which are values, not "
                "classes. Write classes as text, such as '2.5 stars'; in Python, "
                f"{self.adds}(name, num_labels=1) learns values."
            )
        return names

    def add_head(
        self, model: Any, name: str, labels: Sequence[str], rows: Sequence[Row], options: Row
    ) -> None:
        layers = options.get("layers", 1)
        getattr(model, self.adds)(
            name, num_labels=len(labels), id2label=dict(enumerate(labels)),
            multilabel=isinstance(rows[0]["label"], list),
            # a single layer has no activation
            **{"activation_function": "tanh" if layers > 1 else None, **options, "layers": layers},
        )  # fmt: skip

    @abstractmethod
    def encoded(self, rows: Sequence[Row], bench: Bench) -> Sequence[Row]:
        """Return rows without labels as the model takes them."""

    def target(self, row: Row, bench: Bench) -> Any:
        """Return the id of a label; if a row may have several labels, 1.0 or 0.0 for each class."""
        if isinstance(row["label"], list):
            return [float(label in row["label"]) for label in bench.labels]
        return bench.labels.index(row["label"])

    def predict(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        logits = bench.logits(self.encoded(rows, bench), self.collator(bench))
        kind = bench.model.get_head(bench.model.active_head).config.problem_type
        several, (key,) = kind == "multi_label_classification", self.options
        return [
            {key: str(row[key]), **_scores(each, bench.labels, several)}
            for row, each in zip(rows, logits, strict=True)
        ]

    def measure(self, rows: Sequence[Row], bench: Bench) -> dict[str, float]:
        found = zip(rows, self.predict(rows, bench), strict=True)
        return {
            "accuracy": sum(row["label"] == each.get("label") for row, each in found) / len(rows)
        }


def _scores(logits: torch.Tensor, names: Sequence[str], several: bool) -> Row:
    """Return the most likely label or labels with all probabilities, or a value."""
    if several:
        shares = dict(zip(names, logits.sigmoid().tolist(), strict=True))
        return {"label": [n for n, share in shares.items() if share > 0.5], "probabilities": shares}
    if len(names) == 1:
        return {"value": logits.item()}
    shares = dict(zip(names, logits.softmax(-1).tolist(), strict=True))
    return {"label": names[int(logits.argmax())], "probabilities": shares}


class _TextClassification(_Classification):
    """A label, or any number of labels, for each text or pair of texts."""

    title: ClassVar[str] = "the label of each text"
    adds: ClassVar[str] = "add_classification_head"
    inputs: ClassVar[Mapping[str, Role]] = {
        "text": Role(("text", "sentence", "sentence1", "premise"), cells.text),
        "pair": Role(("text_pair", "sentence2", "hypothesis"), cells.text, is_needed=False),
    }
    roles: ClassVar[Mapping[str, Role]] = {
        **inputs, "label": Role(("label", "labels"), cells.labels)
    }  # fmt: skip

    def encoded(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        texts = [row["text"] for row in rows]
        pairs = [row["pair"] for row in rows] if "pair" in rows[0] else None
        tokens = bench.processor(texts, pairs, truncation=True, max_length=bench.length)
        return [{key: tokens[key][i] for key in tokens} for i in range(len(rows))]

    def features(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        found = zip(self.encoded(rows, bench), rows, strict=True)
        return [{**each, "labels": self.target(row, bench)} for each, row in found]


class _ImageClassification(_Classification):
    """A label, or any number of labels, for each image."""

    title: ClassVar[str] = "the label of each image"
    adds: ClassVar[str] = "add_image_classification_head"
    inputs: ClassVar[Mapping[str, Role]] = {"image": Role(("image", "img", "file"), cells.image)}
    roles: ClassVar[Mapping[str, Role]] = {
        **inputs, "label": Role(("label", "labels"), cells.labels)
    }  # fmt: skip
    options: ClassVar[tuple[str, ...]] = ("image",)
    is_visual: ClassVar[bool] = True

    def processor(self, base: str) -> Any:
        from transformers import AutoImageProcessor

        from .models import load

        return load(AutoImageProcessor, base)

    def encoded(self, rows: Sequence[Row], bench: Bench) -> Sequence[Row]:
        return _Images(rows, bench)

    def features(self, rows: Sequence[Row], bench: Bench) -> Sequence[Row]:
        return _Images(rows, bench, self.target)

    def collator(self, bench: Bench) -> Any:
        from transformers import default_data_collator

        return default_data_collator


class _Images(Sequence[Row]):
    """Images as the model takes them, opened when they are needed."""

    def __init__(self, rows: Sequence[Row], bench: Bench, target: Any = None) -> None:
        self._rows, self._bench, self._target = rows, bench, target

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        from PIL import Image, UnidentifiedImageError

        row = self._rows[number]
        try:
            opened = Image.open(row["image"]) if isinstance(row["image"], Path) else row["image"]
            pixels = self._bench.processor(opened.convert("RGB"), return_tensors="pt")
        except UnidentifiedImageError as error:
            raise ConfigError(f"{str(row['image'])!r} is not an image. Remove its row.") from error
        found = {"pixel_values": pixels["pixel_values"][0]}  # [channels, height, width]
        return found if self._target is None else {
            **found, "labels": self._target(row, self._bench)
        }  # fmt: skip


class _TokenClassification(Task):
    """A tag for each word; it is learned at the first piece of the word."""

    title: ClassVar[str] = "a tag for each word"
    inputs: ClassVar[Mapping[str, Role]] = {
        "tokens": Role(("tokens", "words", "text"), cells.words)
    }
    roles: ClassVar[Mapping[str, Role]] = {
        **inputs, "tags": Role(("tags", "ner_tags", "pos_tags", "labels"), cells.words)
    }  # fmt: skip
    metric: ClassVar[tuple[str, int]] = ("f1", 1)

    def labels_in(self, row: Row) -> Iterable[str]:
        tags: list[str] = row["tags"]
        return tags

    def problem(self, row: Row) -> str | None:
        if len(row["tokens"]) == len(row["tags"]):
            return None
        return (
            f"has {len(row['tokens'])} words and {len(row['tags'])} tags. Write one tag for each "
            f"word."
        )

    def add_head(
        self, model: Any, name: str, labels: Sequence[str], rows: Sequence[Row], options: Row
    ) -> None:
        model.add_tagging_head(
            name, num_labels=len(labels), id2label=dict(enumerate(labels)), **_stack(options)
        )

    def _windows(self, rows: Sequence[Row], bench: Bench) -> Iterator[tuple[int, Row, list[Any]]]:
        """Yield the parts of each row: its number, the inputs, and the word of each first piece."""
        for number, row in enumerate(rows):
            tokens = bench.processor(
                row["tokens"], is_split_into_words=True, truncation=True, max_length=bench.length,
                return_overflowing_tokens=True,
            )  # fmt: skip
            last = None
            for i, encoding in enumerate(tokens.encodings):
                places = []
                for word in encoding.word_ids:
                    # a word that begins in an earlier part has its label there
                    is_first = word is not None and (last is None or word > last)
                    places.append(word if is_first else None)
                    last = word if is_first else last
                yield number, _part(tokens, i, bench), places

    def features(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        numbers = {label: number for number, label in enumerate(bench.labels)}
        found = []
        for number, inputs, places in self._windows(rows, bench):
            tags = rows[number]["tags"]
            labels = [_IGNORED if word is None else numbers[tags[word]] for word in places]
            found.append({**inputs, "labels": labels})
        return found

    def collator(self, bench: Bench) -> Any:
        from transformers import DataCollatorForTokenClassification

        return DataCollatorForTokenClassification(bench.processor)

    def predict(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        windows = list(self._windows(rows, bench))
        logits = bench.logits([inputs for _, inputs, _ in windows], _padding(bench))
        # a word that the tokenizer drops keeps the first label
        found = [[bench.labels[0]] * len(row["tokens"]) for row in rows]
        for (number, _, places), each in zip(windows, logits, strict=True):
            # padding may be on either side
            start = each.shape[0] - len(places) if bench.processor.padding_side == "left" else 0
            for place, word in enumerate(places):
                if word is not None:
                    found[number][word] = bench.labels[int(each[start + place].argmax())]
        return [{"tokens": r["tokens"], "tags": t} for r, t in zip(rows, found, strict=True)]

    def measure(self, rows: Sequence[Row], bench: Bench) -> dict[str, float]:
        found = [each["tags"] for each in self.predict(rows, bench)]
        pairs = [p for row, tags in zip(rows, found, strict=True)
                 for p in zip(row["tags"], tags, strict=True)]  # fmt: skip
        true = {(n, *span) for n, row in enumerate(rows) for span in spans(row["tags"])}
        ours = {(n, *span) for n, tags in enumerate(found) for span in spans(tags)}
        return {
            "accuracy": sum(a == b for a, b in pairs) / len(pairs),
            "f1": 2 * len(true & ours) / max(len(true) + len(ours), 1),
        }


def spans(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield kind, first word and end of each entity.

    A tag other than O without B- or I- is an entity of its own.

    Args:
        tags: tags of a sentence.
    """
    begin, kind = 0, ""
    for n, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.rpartition("-")
        if kind and (prefix != "I" or name != kind):
            yield kind, begin, n
            kind = ""
        if tag != "O" and not kind:
            begin, kind = n, name


class _QuestionAnswering(Task):
    """The part of a text that answers a question; long texts are read in parts that overlap."""

    title: ClassVar[str] = "the part of a text that answers a question"
    inputs: ClassVar[Mapping[str, Role]] = {
        "question": Role(("question",), cells.text),
        "context": Role(("context",), cells.text),
    }
    roles: ClassVar[Mapping[str, Role]] = {
        **inputs,
        "answers": Role(("answers", "answer"), cells.answers),
        "start": Role(("answer_start", "start"), cells.start, is_needed=False),
    }
    options: ClassVar[tuple[str, ...]] = ("question", "context")
    length: ClassVar[int] = 384
    metric: ClassVar[tuple[str, int]] = ("f1", 1)

    def problem(self, row: Row) -> str | None:
        text, start = self._answer(row)
        if text is None or (start >= 0 and row["context"][start : start + len(text)] == text):
            return None
        place = "" if start < 0 else f" at character {start}"
        return (
            f"has the answer {text!r}, which is not in its context{place}. Write the answer as the "
            f"context has it; its start may be left out."
        )

    def settings(self, rows: Sequence[Row]) -> Row:
        return {} if all(row["answers"] for row in rows) else {"no_answer": True}

    @staticmethod
    def _answer(row: Row) -> tuple[str | None, int]:
        """Return the first answer, or None, and its start; −1 if it is not in the context."""
        if not row["answers"]:
            return None, -1
        text, start = row["answers"][0]
        start = row.get("start") if start is None else start
        return text, row["context"].find(text) if start is None else start

    def add_head(
        self, model: Any, name: str, labels: Sequence[str], rows: Sequence[Row], options: Row
    ) -> None:
        model.add_qa_head(name, **_stack(options))

    def _windows(self, rows: Sequence[Row], bench: Bench) -> Iterator[tuple[int, Row, list[Any]]]:
        """Yield the parts of each row: its number, the inputs, and places of tokens in the context.

        A place is the start and the end of a token in characters; None outside the context.
        """
        for number, row in enumerate(rows):
            question = bench.processor(
                row["question"], truncation=True, max_length=bench.length // 2,
                add_special_tokens=False, return_offsets_mapping=True,
            )  # fmt: skip
            end = question["offset_mapping"][-1][1] if question["offset_mapping"] else 0
            tokens = bench.processor(
                row["question"][:end], row["context"], truncation="only_second",
                max_length=bench.length, stride=bench.length // 6, return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )  # fmt: skip
            for i, offsets in enumerate(tokens["offset_mapping"]):
                parts = tokens.sequence_ids(i)
                places = [o if part == 1 else None for o, part in zip(offsets, parts, strict=True)]
                yield number, _part(tokens, i, bench), places

    def features(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        found = []
        for number, inputs, places in self._windows(rows, bench):
            text, start = self._answer(rows[number])
            end = start + len(text or "")
            inside = [i for i, p in enumerate(places) if p and p[0] < end and p[1] > start]
            whole = inside and places[inside[0]][0] <= start and places[inside[-1]][1] >= end
            nowhere = self._nowhere(inputs, bench)
            first, last = (inside[0], inside[-1]) if whole else (nowhere, nowhere)
            found.append({**inputs, "start_positions": first, "end_positions": last})
        return found

    @staticmethod
    def _nowhere(inputs: Row, bench: Bench) -> int:
        """Return the place of the token to which a part without the answer points."""
        ids: list[int] = inputs["input_ids"]
        cls = bench.processor.cls_token_id
        return ids.index(cls) if cls in ids else 0

    def predict(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        import torch

        windows = list(self._windows(rows, bench))
        inputs = [each for _, each, _ in windows]
        logits = bench.logits(inputs, self.collator(bench), ("start_logits", "end_logits"))
        none = {"answer": "", "start": 0, "end": 0, "score": 0.0}
        best = [(-math.inf, none)] * len(rows)
        # the lowest score of "no answer" in any part counts, as in SQuAD v2
        lacking = [(math.inf, 0.0)] * len(rows)
        for (number, part, places), each in zip(windows, logits, strict=True):
            left = each.shape[0] - len(places) if bench.processor.padding_side == "left" else 0
            here = [i for i, place in enumerate(places) if place is not None]
            nowhere = left + self._nowhere(part, bench)
            least = float(each[nowhere].sum()), float(each.softmax(0)[nowhere].prod())
            lacking[number] = min(lacking[number], least)
            if not here:
                continue
            own = each[torch.tensor(here) + left]  # [tokens of the context, 2]
            sums = own[:, :1] + own[:, 1]  # [first, last]
            allowed = torch.ones_like(sums).triu().tril(_ANSWER - 1).bool()
            first, last = divmod(int(sums.where(allowed, -math.inf).argmax()), len(here))
            if float(sums[first, last]) <= best[number][0]:
                continue
            start, end = places[here[first]][0], places[here[last]][1]
            shares = own.softmax(0)
            best[number] = float(sums[first, last]), {
                "answer": rows[number]["context"][start:end], "start": start, "end": end,
                "score": float(shares[first, 0] * shares[last, 1]),
            }  # fmt: skip
        if bench.settings.get("no_answer"):
            best = [
                (score, {**none, "score": share}) if score > found[0] else found
                for (score, share), found in zip(lacking, best, strict=True)
            ]
        return [
            {"question": row["question"], **found}
            for row, (_, found) in zip(rows, best, strict=True)
        ]

    def measure(self, rows: Sequence[Row], bench: Bench) -> dict[str, float]:
        exact = overlap = 0.0
        for row, found in zip(rows, self.predict(rows, bench), strict=True):
            ours = _plain(found["answer"])
            known = [_plain(text) for text, _ in row["answers"]] or [[]]
            exact += max(ours == each for each in known)
            overlap += max(_overlap(ours, each) for each in known)
        return {"exact_match": exact / len(rows), "f1": overlap / len(rows)}


def _plain(text: str) -> list[str]:
    """Return the words of an answer as SQuAD does: lower case, no punctuation, no articles."""
    words = re.sub(r"[^\w\s]", "", text.casefold()).split()
    return [word for word in words if word not in ("a", "an", "the")]


def _overlap(one: Sequence[str], other: Sequence[str]) -> float:
    """Return F1 of the words of two answers."""
    both = sum((Counter(one) & Counter(other)).values())
    return 2 * both / max(len(one) + len(other), 1) if one or other else 1.0


class _Generation(Task):
    """A text for each row.

    Attributes:
        first: number of the first label of a row that has a logit.
    """

    head_options: ClassVar[frozenset[str]] = frozenset()
    length: ClassVar[int] = 512
    metric: ClassVar[tuple[str, int]] = ("perplexity", -1)
    keeps_head: ClassVar[bool] = True
    first: ClassVar[int]

    def collator(self, bench: Bench) -> Any:
        from transformers import DataCollatorForSeq2Seq

        return DataCollatorForSeq2Seq(bench.processor)

    def measure(self, rows: Sequence[Row], bench: Bench) -> dict[str, float]:
        features = self.features(rows, bench)
        return {"perplexity": bench.perplexity(features, self.collator(bench), self.first)}


class _TextGeneration(_Generation):
    """The next tokens; with a prompt, only those of the completion are learned."""

    title: ClassVar[str] = "the continuation of a text or prompt"
    roles: ClassVar[Mapping[str, Role]] = {
        "text": Role(("text",), cells.text, is_needed=False),
        "prompt": Role(("prompt", "instruction"), cells.text, is_needed=False),
        "completion": Role(("completion", "response", "output"), cells.text, is_needed=False),
    }
    inputs: ClassVar[Mapping[str, Role]] = {
        "prompt": Role(("prompt", "instruction", "text"), cells.text)
    }
    # the logit of a token is at the token before it
    first: ClassVar[int] = 1

    def problem(self, row: Row) -> str | None:
        if "completion" in row if "prompt" in row else "text" in row:
            return None
        return (
            "has neither a text nor a prompt with a completion. Write the column 'text', or "
            "'prompt' and 'completion'; --column names others."
        )

    def add_head(
        self, model: Any, name: str, labels: Sequence[str], rows: Sequence[Row], options: Row
    ) -> None:
        if model.config.is_encoder_decoder:
            raise ConfigError(
                f"{model.config.model_type!r} has an encoder and a decoder. Write --task seq2seq."
            )
        if not _generates(model):
            model.add_causal_lm_head(name, layers=1, activation_function=None)

    def model_problem(self, model: Any) -> str | None:
        if not _sees_later_tokens(model):
            return None
        return (
            f"{model.config.model_type!r} reads a text in both directions, so it would see the "
            "tokens that it learns to predict. Write a model that reads from left to right, "
            "such as gpt2."
        )

    def features(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        found = []
        for row in rows:
            tokens = bench.processor
            given = _prompt(row["prompt"], tokens) if "prompt" in row else []
            text = row["completion"] if "prompt" in row else row["text"]
            ids = tokens(text, add_special_tokens="prompt" not in row)["input_ids"]
            if tokens.eos_token_id is not None and ids[-1:] != [tokens.eos_token_id]:
                ids = [*ids, tokens.eos_token_id]
            # the end of a long prompt is nearer to its completion
            given = given[-(bench.length // 2) :]
            ids = ids[: bench.length - len(given)]
            found.append({
                "input_ids": [*given, *ids], "attention_mask": [1] * (len(given) + len(ids)),
                "labels": [*([_IGNORED] * len(given)), *ids],
            })  # fmt: skip
        return found

    def predict(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        bench.processor.padding_side = "left"
        found = []
        room = min(bench.length, max(bench.limit - bench.new_tokens, bench.limit // 2))
        for row in rows:
            ids = _prompt(row["prompt"], bench.processor)[-room:]
            found.append({"input_ids": ids, "attention_mask": [1] * len(ids)})
        texts = bench.generated(found, _padding(bench), skip=True)
        return [{"prompt": r["prompt"], "completion": t} for r, t in zip(rows, texts, strict=True)]


class _Seq2Seq(_Generation):
    """A text for each text, by an encoder and a decoder."""

    title: ClassVar[str] = "a text for each text, such as a summary"
    inputs: ClassVar[Mapping[str, Role]] = {
        "source": Role(("source", "input", "text", "article", "document"), cells.text)
    }
    roles: ClassVar[Mapping[str, Role]] = {
        **inputs, "target": Role(("target", "output", "summary", "highlights"), cells.text)
    }  # fmt: skip
    first: ClassVar[int] = 0

    def add_head(
        self, model: Any, name: str, labels: Sequence[str], rows: Sequence[Row], options: Row
    ) -> None:
        if not _generates(model):
            model.add_seq2seq_lm_head(name)

    def _encoded(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        texts = [row["source"] for row in rows]
        tokens = bench.processor(texts, truncation=True, max_length=bench.length)
        keys = ("input_ids", "attention_mask")
        return [{key: tokens[key][i] for key in keys} for i in range(len(rows))]

    def features(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        texts = [row["target"] for row in rows]
        tokens = bench.processor(text_target=texts, truncation=True, max_length=bench.length)
        found = zip(self._encoded(rows, bench), tokens["input_ids"], strict=True)
        return [{**each, "labels": labels} for each, labels in found]

    def predict(self, rows: Sequence[Row], bench: Bench) -> list[Row]:
        texts = bench.generated(self._encoded(rows, bench), _padding(bench), skip=False)
        return [{"source": r["source"], "target": t} for r, t in zip(rows, texts, strict=True)]


def _prompt(text: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a text that is to be continued."""
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids


def _part(tokens: Any, number: int, bench: Bench) -> Row:
    """Return the inputs of the model for one of the parts of a text."""
    names = bench.processor.model_input_names
    return {key: tokens[key][number] for key in names if key in tokens}


def _generates(model: Any) -> bool:
    """Return whether the base model has a head that scores its vocabulary."""
    own = (name for name in model.known_heads() if name not in model.adapters_config)
    return any(model.get_head(name).config.scores_vocabulary for name in own)


def _sees_later_tokens(model: Any) -> bool:
    """Return whether another last token changes a logit before it."""
    import torch

    # the middle of a vocabulary has words; special tokens are at its ends
    word = model.get_input_embeddings().weight.shape[0] // 2
    ids = torch.full((1, _ROW), word, device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids).logits  # [1, tokens, vocabulary]
        ids[:, -1] += 1
        changes = (model(input_ids=ids).logits - logits).abs()
    # the router of a mixture of experts groups the tokens anew, which rounds them in another way
    rounding = torch.finfo(logits.dtype).eps ** 0.5
    return bool(changes[:, :-1].max() > changes[:, -1].max() * rounding)


def _stack(options: Row) -> Row:
    """Return the fields of a head with one layer, which has no activation, or with several."""
    layers = options.get("layers", 1)
    return {"layers": layers, "activation_function": "tanh" if layers > 1 else None}


# by the Hub's name for the task, if it has one
tasks: dict[str, Task] = {
    "text-classification": _TextClassification(),
    "token-classification": _TokenClassification(),
    "question-answering": _QuestionAnswering(),
    "text-generation": _TextGeneration(),
    "seq2seq": _Seq2Seq(),
    "image-classification": _ImageClassification(),
}


def task_of(head: Any, path: str) -> str:
    """Return the task of an adapter that `train` did not save.

    Args:
        head: the config of its head; None if it has none.
        path: path of the adapter.

    Raises:
        CheckpointError: the adapter has no head, or one for a task that `predict` does not know.
    """
    if head is not None and head.pipeline_tag in tasks:
        return str(head.pipeline_tag)
    has = "no head" if head is None else f"a head of the type {head.head_type!r}"
    raise CheckpointError(
        f"{path!r} has {has}. Write an adapter with a head for one of {listing(tasks)}."
    )
