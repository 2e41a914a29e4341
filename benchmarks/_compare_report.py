"""What `compare.py` writes: the figures as JSON, and from them a table for people."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from _baselines import BASELINES, mean_by_group, tfidf_classifier
from _compare_rows import REFERENCE, Row
from _compare_runs import Log, setting_of
from _compare_train import Setting, reviews

PLOT = "compare.svg"
# with spaces that do not end a line
_ERROR = "\u00a0±\u00a0"
UNMEASURED = "**Nothing has been measured yet.** `make compare` writes the plot and the table."


def report(
    rows: list[Row], setting: Setting, log: Log, costs: dict[str, dict[str, Any]], about: Any
) -> dict[str, Any]:
    """Return all figures.

    Args:
        rows: with all of their runs in the log.
        setting: of the comparison.
        log: of the runs.
        costs: by label.
        about: date, machine and versions.
    """
    data = reviews(setting)
    groups = [group for part in data.tests for group in part.rows.groups]
    correct = {row.label: _marks(row, log) for row in rows}
    reference = REFERENCE if REFERENCE in correct else rows[0].label
    # what is common to all methods in a run: its reviews are harder or easier
    means = [statistics.mean(_mean(marks[i]) for marks in correct.values())
             for i in range(setting.seeds)]  # fmt: skip
    best = max(correct, key=lambda label: sum(_joined(correct[label])))
    found = []
    for row in rows:
        marks = _joined(correct[row.label])
        runs = log.of(row.label, "search")
        (rate,) = {run["rate"] for run in log.of(row.label, "test")}
        found.append(
            {
                "label": row.label,
                "config": row.config,
                "loraplus_ratio": row.loraplus_ratio,
                "learning_rate": rate,
                "search": sorted([run["rate"], _rounded(run["loss"])] for run in runs),
                **costs[row.label],
                **_accuracy(correct[row.label], groups, means),
                "to_reference": _difference(marks, _joined(correct[reference]), groups),
                "to_best": _difference(marks, _joined(correct[best]), groups),
            }
        )
    found += _baselines(setting, groups, means)
    found.sort(key=lambda row: (-row["accuracy"], row["label"]))
    about = {
        **about,
        **setting_of(setting),
        "test_rows": len(groups),
        "movies": len(set(groups)),
        "validation_rows": len(data.validation),
        "reference": reference,
        "best": best,
    }
    return {"about": about, "rows": found}


def _marks(row: Row, log: Log) -> list[list[float]]:
    runs = sorted(log.of(row.label, "test"), key=lambda run: run["seed"])
    return [[float(mark) for mark in run["correct"]] for run in runs]


def _baselines(
    setting: Setting, groups: Sequence[str], means: Sequence[float]
) -> Iterator[dict[str, Any]]:
    data = reviews(setting)
    marks: dict[str, list[list[float]]] = {BASELINES[0]: [], BASELINES[1]: []}
    for seed, test in enumerate(data.tests):
        train = data.train(setting, seed).rows
        label = Counter(train.labels).most_common(1)[0][0]
        words = tfidf_classifier(train).predict(test.rows.texts)
        for name, guesses in zip(marks, ([label] * len(test), words), strict=True):
            pairs = zip(guesses, test.rows.labels, strict=True)
            marks[name].append([float(guess == label) for guess, label in pairs])
    for name, runs in marks.items():
        yield {"label": name, "config": None, "family": "baseline",
               **_accuracy(runs, groups, means)}  # fmt: skip


def _accuracy(
    runs: list[list[float]], groups: Sequence[str], means: Sequence[float]
) -> dict[str, Any]:
    mean, error = mean_by_group(_joined(runs), groups)
    own = [_mean(run) - common for run, common in zip(runs, means, strict=True)]
    return {
        "accuracy": _rounded(mean),
        "standard_error": _rounded(error),
        "seeds": [_rounded(_mean(run)) for run in runs],
        "spread": _rounded(statistics.stdev(own)) if len(own) > 1 else None,
    }


def _difference(
    marks: Sequence[float], other: Sequence[float], groups: Sequence[str]
) -> list[float]:
    """Return the mean difference on the same rows, and its standard error."""
    differences = [a - b for a, b in zip(marks, other, strict=True)]
    return [_rounded(value) for value in mean_by_group(differences, groups)]


def _joined(runs: list[list[float]]) -> list[float]:
    return [mark for run in runs for mark in run]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rounded(value: float) -> float:
    return round(value, 5)


def page(document: dict[str, Any] | None, image: str) -> str:
    """Return the part of the page with the plot and the table, in Markdown.

    Args:
        document: the report; None if there is none.
        image: the path of the plot, from the page.
    """
    if document is None:
        return UNMEASURED
    about, rows = document["about"], document["rows"]
    best = [f"`{r['label']}`" for r in rows if is_near_best(r) and r["label"] != about["best"]]
    head = (
        f"Measured by `make compare` on {about['date']} in {about['minutes']} minutes of each "
        f"processor, with {about['model']}, {about['train_rows']:,} training reviews, "
        f"{about['test_rows']:,} test reviews of {about['movies']} movies, torch {about['torch']}, "
        f"transformers {about['transformers']}, {about['machine']}."
    )
    closing = (
        f"The best accuracy is that of `{about['best']}`. At most two standard errors below it: "
        f"{', '.join(best)}."
        if best
        else f"`{about['best']}` is more than two standard errors above all others."
    )
    parts = [f"![{_alt(about)}]({image})", head, table(document), closing]
    return "\n\n".join(parts)


def table(document: dict[str, Any]) -> str:
    """Return the table, in Markdown."""
    reference = document["about"]["reference"]
    titles = ("rate", "trainable", "accuracy", "runs", f"against {reference}", "step",
              "memory, MB", "file, kB")  # fmt: skip
    lines = [f"| method | {' | '.join(titles)} |", f"| --- |{' --: |' * len(titles)}"]
    for row in document["rows"]:
        accuracy = f"{row['accuracy']:.3f}"
        accuracy = f"**{accuracy}**" if is_near_best(row) else accuracy
        spread = "" if row["spread"] is None else f"{row['spread']:.3f}"
        both = f"{accuracy}{_ERROR}{row['standard_error']:.3f}"
        cells = [_name(row), "", "", both, spread, "", "", "", ""]
        if "step" in row:
            difference, error = row["to_reference"]
            is_reference = row["label"] == reference
            cells[1:3] = [_rate(row["learning_rate"]), f"{row['trainable']:,}"]
            cells[5:] = [
                "" if is_reference else f"{_signed(difference)}{_ERROR}{error:.3f}",
                f"{row['step'][0]:.2f}",
                f"{row['memory'] / 1e6:,.1f}",
                f"{row['file'] / 1e3:,.0f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def is_near_best(row: dict[str, Any]) -> bool:
    """Return whether a row is at most two standard errors below the best."""
    if "to_best" not in row:
        return False
    difference, error = row["to_best"]
    return bool(difference >= -2 * error)


def _name(row: dict[str, Any]) -> str:
    if row["config"] is None:
        return str(row["label"])
    ratio = row["loraplus_ratio"]
    return f"`{row['config']}`" + (f", `loraplus_lr_ratio={ratio:g}`" if ratio else "")


def _alt(about: dict[str, Any]) -> str:
    return f"Accuracy of all methods on {about['test_rows']:,} reviews, by trainable parameters"


def _rate(rate: float) -> str:
    digit, _, exponent = f"{rate:.0e}".partition("e")
    return f"{digit}e{int(exponent)}"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
