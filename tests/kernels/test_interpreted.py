"""The Triton kernels in Triton's interpreter, against float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from swept import all_but

SCRIPT = Path(__file__).with_name("interpreted.py")
# by the modules of their cases: the least number of them
CASES = {
    "low_rank": 30,
    "compose": 30,
    "row_norm": 33,
    "rotate": 28,
    "cayley_fold": 38,
    "bottleneck": 41,
    "grouped": 34,
}
# the parts of one module that takes as long as all others
CASES |= {
    f"opcheck {part}": 17
    for part in (
        "low_rank_update",
        "composed",
        "norms",
        "rotations",
        "bottlenecks",
        "mixed_batches",
    )
}
QUICK = {"low_rank", "compose", "grouped", "opcheck bottlenecks"}


@pytest.mark.long
@pytest.mark.parametrize("name", all_but(QUICK, CASES))
def test_all_shapes_dtypes_and_layouts_are_right(name):
    done = subprocess.run(
        [sys.executable, SCRIPT, *name.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout)
    # the checks can fail
    assert errors.pop("planted") == "ValueError: planted: wrong by nan"
    assert errors.pop("short").startswith("ValueError: short: wrong by")
    assert {case: e for case, e in errors.items() if e} == {}
    assert len(errors) >= CASES[name]
