"""Writing down what a GPU run finds, after each figure: JSON for programs, tables for people."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _measure import Ratio

Cell = Ratio | float | str | None
DRY = "dry run"


@dataclass(frozen=True)
class Goal:
    """What PERFORMANCE says a figure should be.

    Attributes:
        text: with its sign, as in "≤ 1.15".
        met: whether it is; None: nobody can say.
    """

    text: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """For tables."""
        return {True: "met", False: "missed", None: "not judged"}[self.met]


def at_most(found: Cell, limit: float) -> Goal:
    """The figure, rounded to the two digits that are printed, is no larger."""
    value = _number(found)
    return Goal(f"≤ {limit:g}", None if value is None else round(value, 2) <= limit)


def at_least(found: Cell, limit: float) -> Goal:
    """The figure, rounded likewise, is no smaller."""
    value = _number(found)
    return Goal(f"≥ {limit:g}", None if value is None else round(value, 2) >= limit)


@dataclass(frozen=True)
class Row:
    """One line of a section.

    Attributes:
        figure: what was measured.
        cells: title of the column to what stands there.
        goals: title of the column to the goal of what stands there.
        facts: more, for programs alone.
    """

    figure: str
    cells: Mapping[str, Cell]
    goals: Mapping[str, Goal] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether it misses no goal."""
        return all(goal.met is not False for goal in self.goals.values())


@dataclass
class Part:
    """One section of the report.

    Attributes:
        name: of the section, for `--only`.
        title: for people.
        state: "waiting", "running", "done", "cut" (some rows had no time), "skipped", "failed" or
            "red" (something is wrong).
        seconds: that it took.
        rows: what was found.
        skipped: what there was no time or no memory for, and why.
        trace: of the error, if it failed.
    """

    name: str
    title: str
    state: str = "waiting"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    trace: str = ""

    def restore(self, entry: Mapping[str, Any]) -> None:
        """Take over what an earlier run has written of this section.

        Args:
            entry: of the section in the JSON file.
        """
        self.state, self.seconds = entry["state"], entry["seconds"] or 0.0
        self.trace = entry["trace"]
        self.skipped = list(entry["skipped"]) if self.state == "done" else []
        verdicts = {"met": True, "missed": False, "not judged": None}
        for row in entry["rows"]:
            cells = {
                key: Ratio(**value) if isinstance(value, dict) else value
                for key, value in row["cells"].items()
            }
            goals = {
                key: Goal(goal["goal"], verdicts[goal["verdict"]])
                for key, goal in row["goals"].items()
            }
            self.rows.append(Row(row["figure"], cells, goals, row["facts"]))


class Report:
    """A JSON file and a page that always show all that is known; a crash leaves whole files."""

    def __init__(
        self, folder: Path, device: str, dry: bool, parts: list[Part], suffix: str = ""
    ) -> None:
        """Nothing is written yet.

        Args:
            folder: made where it is missing.
            device: its name.
            dry: whether numbers are to be left out.
            parts: all sections, in order.
            suffix: of the names of the files.
        """
        self.stem = folder / f"gpu-{slug('dry-run' if dry else device)}{suffix}"
        self.dry = dry
        self.parts = parts
        self.about: dict[str, Any] = {"device": device}
        if dry:
            self.about = {"device": f"{device} ({DRY})", "dry run": "nothing here was measured"}
        folder.mkdir(parents=True, exist_ok=True)

    def resume(self) -> str:
        """Take over what an earlier run of the same code on the same device has written.

        Returns:
            Why it cannot be continued; "" if it can, or if there is none.
        """
        path = self.stem.with_suffix(".json")
        if not path.exists():
            return ""
        document = json.loads(path.read_text(encoding="utf-8"))
        before = document["about"]
        for key in ("device", "commit", "torch", "triton", "transformers", "peft", "rounds"):
            if before.get(key) != self.about.get(key):
                return f"{key} was {before.get(key)!r} and is {self.about.get(key)!r}"
        entries = {entry["name"]: entry for entry in document["sections"]}
        for part in self.parts:
            if part.name in entries:
                part.restore(entries[part.name])
        return ""

    def write(self) -> None:
        """Write both files anew."""
        document = {
            "about": self.about,
            "sections": [
                {
                    "name": part.name,
                    "title": part.title,
                    "state": part.state,
                    "seconds": None if self.dry else round(part.seconds, 1),
                    "rows": [self._entry(row) for row in part.rows],
                    "skipped": part.skipped,
                    "trace": part.trace,
                }
                for part in self.parts
            ],
        }
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
        _replace(self.stem.with_suffix(".json"), text + "\n")
        _replace(self.stem.with_suffix(".md"), self._page())

    def table(self, part: Part) -> str:
        """The section as it stands on the page."""
        lines: list[str] = []
        if part.rows:
            columns = list(dict.fromkeys(key for row in part.rows for key in row.cells))
            judged = any(row.goals for row in part.rows)
            titles = ["figure", *columns, *(["goal"] if judged else [])]
            lines = [_line(titles), _line(["---"] * len(titles))]
            for row in part.rows:
                cells = [self._shown(row.cells.get(column)) for column in columns]
                goals = [self._goal(row, column, goal) for column, goal in row.goals.items()]
                lines.append(_line([row.figure, *cells, *(["; ".join(goals)] if judged else [])]))
        lines += ["", *(f"- skipped: {reason}" for reason in part.skipped)] if part.skipped else []
        if part.trace:
            lines += ["", "```", part.trace.strip().splitlines()[-1], "```"]
        return "\n".join(lines)

    def _page(self) -> str:
        first = "# Dry run of the GPU benchmark: no figure here was measured"
        lines = [first if self.dry else f"# Benchmark: {self.about['device']}", ""]
        lines += [f"- {key}: {value}" for key, value in self.about.items()]
        for part in self.parts:
            took = f", {part.seconds:.0f} s" if part.seconds and not self.dry else ""
            lines += ["", f"## {part.title} ({part.state}{took})", "", self.table(part)]
        return "\n".join(lines).rstrip() + "\n"

    def _entry(self, row: Row) -> dict[str, Any]:
        return {
            "figure": row.figure,
            "cells": {key: self._plain(value) for key, value in row.cells.items()},
            "goals": {
                key: {"goal": goal.text, "verdict": self._judged(row, key, goal)}
                for key, goal in row.goals.items()
            },
            "facts": {} if self.dry else dict(row.facts),
        }

    def _goal(self, row: Row, column: str, goal: Goal) -> str:
        which = f"{column} " if len(row.cells) > 1 else ""
        return f"{which}{goal.text}: {self._judged(row, column, goal)}"

    def _judged(self, row: Row, column: str, goal: Goal) -> str:
        # on a dry run figures mean nothing, but what is right or wrong in words does
        is_figure = not isinstance(row.cells.get(column), str)
        return "not judged" if self.dry and is_figure else goal.verdict

    def _plain(self, value: Cell) -> Any:
        if value is None or isinstance(value, str):
            return value
        # NaN is no JSON, and no figure either
        if not math.isfinite(_number(value) or 0.0):
            raise ValueError(f"a figure is {value}, which nothing can be")
        if self.dry:
            return DRY
        if isinstance(value, Ratio):
            return {"median": value.median, "low": value.low, "high": value.high}
        return value

    def _shown(self, value: Cell) -> str:
        if value is None:
            return "–"
        if isinstance(value, str):
            return value
        if self.dry:
            return DRY
        return f"{value:.3g}" if isinstance(value, float) else str(value)


def slug(name: str) -> str:
    """Lowercase letters, digits and hyphens: "NVIDIA H100 80GB HBM3" is "h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")


def _number(value: Cell) -> float | None:
    if isinstance(value, Ratio):
        return value.median
    return value if isinstance(value, float) else None


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _replace(path: Path, text: str) -> None:
    # beside it, so that the renaming is one step of the file system
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
