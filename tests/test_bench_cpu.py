"""The benchmarks on a CPU: their reports, and the plots of `make growth` and `make many`."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import _measure
from _formulas import FORMULAS, base_model, difference
from _growth_plot import CURVES, frame, plot, position, ticks
from _measure import Ratio, ratios
from _report import Figure, Section, write

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def figure(name: str, value: float) -> Figure:
    return Figure(name, Ratio(value, value - 0.1, value + 0.1, 7), None, 1.1)


def test_a_section_measured_alone_keeps_the_others(tmp_path, capsys):
    both = {"steps": Section(3, [figure("a", 1.0)]), "import": Section(2, [figure("b", 1.2)])}
    write(tmp_path, "cpu", {"rounds": 7}, both, kept=False)
    write(tmp_path, "cpu", {"rounds": 7}, {"steps": Section(4, [figure("a", 2.0)])}, kept=True)
    document = json.loads((tmp_path / "cpu.json").read_text())
    medians = {
        name: [f["ours"]["median"] for f in section["figures"]]
        for name, section in document["sections"].items()
    }
    assert medians == {"steps": [2.0], "import": [1.2]}
    assert "6 (steps 4, import 2)" in (tmp_path / "cpu.md").read_text()
    assert "| b | 1.20 (1.10–1.30) × | – | ≤ 1.1 | missed |" in capsys.readouterr().out


def test_a_slow_rival_has_three_rounds_and_says_so(monkeypatch):
    taken = {"floor": 1.0, "ours": 3.0, "theirs": 3.0, "near": 1.5}
    monkeypatch.setattr(_measure, "seconds", lambda run, repeat=1: taken[run()])
    others = {name: lambda name=name: name for name in taken if name != "floor"}
    found = ratios(lambda: "floor", others, 7, rivals=["theirs", "near"])
    assert {name: ratio.rounds for name, ratio in found.items()} == {
        "ours": 7, "theirs": 3, "near": 7
    }  # fmt: skip
    assert str(Ratio(8.2, 8.0, 8.6, 3)) == "8.20 (8.00–8.60; 3 rounds)"


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda f: f.title)
def test_a_formula_computes_what_its_method_does(formula):
    base = base_model(layers=1, width=256)
    ours = formula.ours(base)
    assert difference(ours, formula.formula(base, ours), rows=2, tokens=32) < 1e-4


def test_a_wrong_formula_is_seen():
    base = base_model(layers=1, width=256)
    ours = FORMULAS[0].ours(base)
    assert difference(ours, base, rows=2, tokens=32) > 1e-4


@pytest.mark.parametrize("highest", [0.03, 1.0, 1.72, 9.99, 55.0, 1000.0])
def test_an_axis_reaches_above_its_values(highest):
    found = ticks(highest)
    assert found[0] == 0
    assert len(found) <= 6
    assert highest <= found[-1] * (1 + 1e-9)


def test_all_points_of_the_plot_are_in_their_panel():
    curves = {"adapterzoo": [[1, 1.0], [500, 1.1]], "PEFT": [[1, 2.0], [30, 9.0]]}
    document = {"panels": {name: {"unit": "ms", "curves": curves} for name in ("a", "b", "c")}}
    root = ET.fromstring(plot(document))
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 6
    for i, line in enumerate(lines):
        box = frame(i // 2)
        for pair in line.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert box.left <= x <= box.right
            assert box.top <= y <= box.bottom
    assert position(frame(0), [1, 500], 10.0, math.sqrt(500), 5.0)[0] == pytest.approx(
        (frame(0).left + frame(0).right) / 2, abs=0.1
    )


@pytest.mark.parametrize(
    ("name", "title"), [("growth", "How costs grow"), ("many", "Many adapters in one run")]
)
def test_the_page_shows_the_committed_curves(name, title):
    document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    for panel in document["panels"].values():
        assert set(panel["curves"]) <= set(CURVES)
    assert (ROOT / "docs" / "_static" / f"{name}.svg").read_text(encoding="utf-8") == plot(
        document, title
    ), f'write `make {name} ARGS="--only-plot"`'
