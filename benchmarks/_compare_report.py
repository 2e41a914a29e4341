"""What `compare.py` writes: the figures as JSON, and from them a table for people."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from _baselines import BASELINES, mean_by_group, tfidf_classifier
from _compare_rows import REFERENCE, Row
from _compare_runs import Log, setting_of
from _compare_train import Setting, reviews
from _svg import Box, Label, marker, opening, placed, width

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
        f"Measured by `make compare` on {about['date']} ({about['minutes']} minutes per "
        f"core) with {about['model']}, {about['train_rows']:,} training reviews, "
        f"{about['test_rows']:,} test reviews of {about['movies']} movies, torch {about['torch']}, "
        f"transformers {about['transformers']}, {about['machine']}."
    )
    errors = sorted(row["standard_error"] for row in rows)
    closing = (
        f"The best accuracy is that of `{about['best']}`. At most two standard errors below it: "
        f"{', '.join(best)}."
        if best
        else f"`{about['best']}` is more than two standard errors above all others."
    )
    error = f"The standard error of an accuracy is {errors[0]:.3f} to {errors[-1]:.3f}."
    parts = [f"![{_alt(about)}]({image})", head, table(document), f"{closing} {error}"]
    return "\n\n".join(parts)


def table(document: dict[str, Any]) -> str:
    """Return the table, in Markdown."""
    reference = document["about"]["reference"]
    titles = ("accuracy", f"against {reference}", "trainable", "file, kB", "step", "memory, MB",
              "rate")  # fmt: skip
    lines = [f"| method | {' | '.join(titles)} |", f"| --- |{' --: |' * len(titles)}"]
    for row in document["rows"]:
        accuracy = f"{row['accuracy']:.3f}"
        accuracy = f"**{accuracy}**" if is_near_best(row) else accuracy
        cells = [_name(row), accuracy, *[""] * 6]
        if "step" in row:
            difference, error = row["to_reference"]
            is_reference = row["label"] == reference
            cells[2:] = [
                "" if is_reference else f"{_signed(difference)}{_ERROR}{error:.3f}",
                f"{row['trainable']:,}",
                f"{row['file'] / 1e3:,.0f}",
                f"{row['step'][0]:.2f}",
                f"{row['memory'] / 1e6:,.1f}",
                _rate(row["learning_rate"]),
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


# --- the plot of `compare.py`: accuracy against trainable parameters, as SVG ---


_WIDTH, _HEIGHT, _SIZE = 960, 680, 13
_FRAME = Box(64, 126, 936, 620)
# family → its name, marker, colour on light and on dark pages
FAMILIES = {
    "weights": ("weights of layers", "circle", "#0b66a8", "#6cb6f5"),
    "stream": ("hidden states", "square", "#b04a06", "#f2a65a"),
    "input": ("prompts and prefixes", "triangle", "#0a7554", "#4fd1a5"),
    "several": ("several of these", "diamond", "#8e3fa6", "#d69ceb"),
    "baseline": ("no adapter", "ring", "#4f5661", "#b6bcc6"),
}
_COLORS = {name: (light, dark) for name, (_, _, light, dark) in FAMILIES.items()}


def plot(document: dict[str, Any]) -> str:
    """Return the plot of a report, see `_compare_report.report`."""
    about = document["about"]
    rows = [row for row in document["rows"] if row.get("step")]
    lines = {row["label"]: row["accuracy"] for row in document["rows"] if not row.get("step")}
    scale = _Scale(rows, list(lines.values()))
    error = statistics.median(r["to_reference"][1] for r in rows if r["to_reference"][1])
    points = [(scale.x(r["trainable"]), scale.y(r["accuracy"]), _text(r, scale)) for r in rows]
    levels = [(scale.y(value), label) for label, value in lines.items() if value >= scale.low]
    key, key_box = _error_key(scale, 2 * error, [y for y, _ in levels])
    taken = [key_box, *(Box(_FRAME.right - width(n, _SIZE) - 8, y - 18, _FRAME.right, y + 3)
                        for y, n in levels)]  # fmt: skip
    labels = placed(points, _FRAME, taken, _SIZE)
    title = f"Accuracy on {about['test_rows']:,} reviews against trainable parameters"
    parts = [
        opening(title, _WIDTH, _HEIGHT, _COLORS),
        f'<text class="text title" x="24" y="36">{title}</text>',
        f'<text class="muted" x="24" y="58">{escape(_subtitle(about))}</text>',
        *_legend(),
        *scale.axes(),
        *(part for y, label in levels for part in _level(y, label)),
        *key,
    ]
    for row, label in zip(rows, labels, strict=True):
        if label.line:
            x, y, to_x, to_y = label.line
            parts.append(
                f'<line class="line {row["family"]}-s" x1="{x:g}" y1="{y:g}" '
                f'x2="{to_x:g}" y2="{to_y:g}"/>'
            )
    for row, (x, y, _) in zip(rows, points, strict=True):
        parts.append(_marker(row["family"], x, y))
    parts += [_label(row["family"], label) for row, label in zip(rows, labels, strict=True)]
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """From parameters and accuracies to places in the plot."""

    def __init__(self, rows: Sequence[dict[str, Any]], levels: Sequence[float]) -> None:
        accuracies: list[float] = [row["accuracy"] for row in rows]
        counts: list[int] = [row["trainable"] for row in rows]
        best, middle = max(accuracies), statistics.median(accuracies)
        # a method that has not learned would press all others together
        lowest = max(best - max(2.5 * (best - middle), 0.04), min(accuracies))
        near = [level for level in levels if 0 < lowest - level < 0.5 * (best - lowest)]
        wanted = min([lowest, *near])
        top = max([best, *levels])
        spread = top - wanted
        self.step = next((s for s in (0.005, 0.01, 0.02, 0.05, 0.1) if spread / s <= 10), 0.2)
        self.low = math.floor((wanted - 0.02 * spread) / self.step) * self.step
        self.high = math.ceil((top + 0.03 * spread) / self.step) * self.step
        self.first, self.last = math.log10(min(counts)) - 0.15, math.log10(max(counts)) + 0.35

    def x(self, count: int) -> int:
        """Return the place of a number of parameters."""
        share = (math.log10(count) - self.first) / (self.last - self.first)
        return round(_FRAME.left + share * (_FRAME.right - _FRAME.left))

    def y(self, accuracy: float) -> int:
        """Return the place; below the axis, that of its end."""
        share: float = (max(accuracy, self.low) - self.low) / (self.high - self.low)
        return round(_FRAME.bottom - share * (_FRAME.bottom - _FRAME.top))

    def axes(self) -> Iterator[str]:
        """Yield the grid with its numbers and what they are."""
        for number in range(round((self.high - self.low) / self.step) + 1):
            value = self.low + number * self.step
            y = self.y(value)
            yield f'<line class="grid" x1="{_FRAME.left}" y1="{y}" x2="{_FRAME.right}" y2="{y}"/>'
            digits = 3 if self.step < 0.01 else 2
            name = f"{value:.{digits}f}"
            yield f'<text class="muted" x="56" y="{y + 4}" text-anchor="end">{name}</text>'
        for power in range(math.ceil(self.first), math.floor(self.last) + 1):
            x = self.x(10**power)
            yield f'<line class="grid" x1="{x}" y1="{_FRAME.top}" x2="{x}" y2="{_FRAME.bottom}"/>'
            name = f"{10 ** (power % 3)}{('', 'k', 'M', 'G')[power // 3]}"
            yield f'<text class="muted" x="{x}" y="640" text-anchor="middle">{name}</text>'
        yield '<text class="muted" x="24" y="112">accuracy</text>'
        middle = (_FRAME.left + _FRAME.right) // 2
        yield (
            f'<text class="muted" x="{middle}" y="664" text-anchor="middle">'
            f"trainable parameters, the head's included, on a logarithmic scale</text>"
        )


def _subtitle(about: dict[str, Any]) -> str:
    return (
        f"{about['model']}, {about['train_rows']:,} training reviews, one epoch, "
        f"mean of {about['seeds']} runs; each with its best learning rate"
    )


def _legend() -> Iterator[str]:
    x = 24
    yield f'<text class="muted" x="{x}" y="82">changes</text>'
    x += width("changes", _SIZE) + 18
    for name, (title, *_) in FAMILIES.items():
        yield _marker(name, x, 78)
        yield f'<text class="text" x="{x + 12}" y="82">{title}</text>'
        x += width(title, _SIZE) + 36


def _error_key(scale: _Scale, length: float, levels: Sequence[int]) -> tuple[list[str], Box]:
    """Return a bar of two standard errors of a difference, and the room that it takes."""
    high = max(scale.y(scale.low) - scale.y(scale.low + length), 1)
    if high > (_FRAME.bottom - _FRAME.top) / 2:
        return [], Box(0, 0, 0, 0)
    half = max(high // 2, 20)
    middle = _FRAME.bottom - 10 - half
    # above a level that it would cover
    for y in sorted(levels, reverse=True):
        if middle - half - 4 < y < middle + half + 22:
            middle = y - 26 - half
    x, top = _FRAME.right - 16, middle - high // 2
    texts = ("differences shorter than", "this may be chance")
    parts = [f'<path class="rule" stroke-width="1.5" d="M{x - 5} {top}h10m-5 0v{high}m-5 0h10"/>']
    parts += [
        f'<text class="muted" x="{x - 14}" y="{middle - 4 + 17 * i}" '
        f'text-anchor="end">{text}</text>'
        for i, text in enumerate(texts)
    ]
    wide = max(width(text, _SIZE) for text in texts)
    return parts, Box(x - 18 - wide, middle - half - 4, _FRAME.right, middle + half + 4)


def _level(y: int, label: str) -> Iterator[str]:
    yield (
        f'<line class="rule" stroke-dasharray="2 4" x1="{_FRAME.left}" y1="{y}" '
        f'x2="{_FRAME.right}" y2="{y}"/>'
    )
    yield (
        f'<text class="muted" x="{_FRAME.right - 4}" y="{y - 5}" text-anchor="end">'
        f"{escape(label)}</text>"
    )


def _text(row: dict[str, Any], scale: _Scale) -> str:
    below = row["accuracy"] < scale.low
    return f"{row['label']} {row['accuracy']:.2f} ↓" if below else str(row["label"])


def _marker(family: str, x: int, y: int) -> str:
    return marker(family, FAMILIES[family][1], x, y)


def _label(family: str, label: Label) -> str:
    x, y = label.box.left + 2, label.box.bottom - 4
    return f'<text class="{family}" x="{x:g}" y="{y:g}">{escape(label.text)}</text>'
