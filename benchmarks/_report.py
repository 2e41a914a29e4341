"""Writing figures down: JSON for programs, a table and a plot for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

from _measure import Ratio


@dataclass(frozen=True)
class Figure:
    """One line of the report.

    Attributes:
        name: what was measured.
        ours: adapterzoo's.
        theirs: PEFT's; None where it has nothing of the kind.
        goal: at most this; None where there is no goal.
        unit: of the numbers; "×" for ratios to the floor.
    """

    name: str
    ours: Ratio
    theirs: Ratio | None
    goal: float | None
    unit: str = "×"

    @property
    def verdict(self) -> str:
        """Whether the goal is met."""
        if self.goal is None:
            return ""
        # two digits are printed and no more are meant
        return "met" if round(self.ours.median, 2) <= self.goal else "missed"


@dataclass(frozen=True)
class Section:
    """The figures of a part of the benchmark.

    Attributes:
        seconds: that it took.
        figures: in order.
    """

    seconds: int
    figures: list[Figure]


def write(
    folder: Path, stem: str, about: dict[str, Any], sections: dict[str, Section], kept: bool
) -> None:
    """Write `stem`.json, .md and .png; the table is printed too.

    Args:
        folder: of the files.
        stem: of their names.
        about: what was measured, where and when.
        sections: by name.
        kept: whether sections of an earlier report that were not measured stay in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.json"
    if kept and path.exists():
        earlier = _read(json.loads(path.read_text(encoding="utf-8")))
        sections = {**earlier, **sections}
        about = {**about, "measured alone": "some sections, at other times than the rest"}
    figures = [figure for section in sections.values() for figure in section.figures]
    lines = [
        "| figure | adapterzoo | PEFT | goal | |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {f.name} | {f.ours} {f.unit} | {f'{f.theirs} {f.unit}' if f.theirs else '–'} | "
            f"{f'≤ {f.goal:g}' if f.goal else ''} | {f.verdict} |"
            for f in figures
        ),
    ]
    took = ", ".join(f"{name} {section.seconds}" for name, section in sections.items())
    about = {**about, "seconds": f"{sum(s.seconds for s in sections.values())} ({took})"}
    head = "\n".join(f"- {key}: {value}" for key, value in about.items())
    notes = (
        "Ratios to the frozen base model's own step or forward in the same round: median and "
        "quartiles. Bytes and operators are exact. PEFT's BOFT runs with a plain-torch version of "
        "its CUDA extension; without it, PEFT takes one factor. Rivals above two floors have three "
        "rounds. *its formula* is a hand-written module that computes the method's formula in "
        "plain torch operations, in the same layers; PEFT's figure there is its own over that."
    )
    table = "\n".join(lines)
    (folder / f"{stem}.md").write_text(
        f"# Benchmark: {stem}\n\n{head}\n\n{notes}\n\n{table}\n", encoding="utf-8"
    )
    document = {
        "about": about,
        "sections": {
            name: {
                "seconds": section.seconds,
                "figures": [{**asdict(f), "verdict": f.verdict} for f in section.figures],
            }
            for name, section in sections.items()
        },
    }
    text = json.dumps(document, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    _plot(folder / f"{stem}.png", figures)
    print(table)


def _read(document: dict[str, Any]) -> dict[str, Section]:
    """The sections of a report that was written before; none if it has another form."""
    found = {}
    for name, section in document.get("sections", {}).items():
        figures = [
            Figure(
                f["name"], Ratio(**f["ours"]), Ratio(**f["theirs"]) if f["theirs"] else None,
                f["goal"], f["unit"],
            )
            for f in section["figures"]
        ]  # fmt: skip
        found[name] = Section(section["seconds"], figures)
    return found


def _plot(path: Path, figures: list[Figure]) -> None:
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = [f for f in figures if f.name.startswith("step: ") and f.theirs]
    if not shown:
        return
    canvas, axes = plt.subplots(figsize=(9, 0.55 * len(shown) + 1.2), layout="constrained")
    for offset, label, color in ((-0.2, "adapterzoo", "#1b6ca8"), (0.2, "PEFT", "#c9c9c9")):
        values = [f.ours if label == "adapterzoo" else f.theirs for f in shown]
        known = [v for v in values if v is not None]
        spread = [[v.median - v.low for v in known], [v.high - v.median for v in known]]
        places = [i + offset for i in range(len(known))]
        medians = [v.median for v in known]
        axes.barh(places, medians, 0.38, xerr=spread, label=label, color=color)
    for i, figure in enumerate(shown):
        if figure.goal:
            axes.plot([figure.goal] * 2, [i - 0.42, i + 0.42], color="#b03030", linewidth=1.5)
    axes.plot([], [], color="#b03030", label="goal")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(shown)), [f.name.removeprefix("step: ") for f in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("training step / step of the frozen base model")
    axes.legend(frameon=False)
    canvas.savefig(path, dpi=110)
    plt.close(canvas)
