"""Every Triton configuration compiles for GPUs that are not here, and spills no register."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

SCRIPT = Path(__file__).with_name("aot.py")
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
# bytes that one program may use
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}
MATRIX = {80: "HMMA", 90: "HGMMA", 100: "TCMMA"}


@pytest.fixture(scope="module")
def rows():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_no_register_is_spilled_and_the_tiles_fit(rows):
    assert len(rows) == 126
    assert [row for row in rows if row["spilled"]] == []
    assert [row for row in rows if row["shared"] > SHARED[row["sm"]]] == []


def test_products_run_on_the_newest_matrix_unit(rows):
    # 16 rows fill no warp group: the older instruction has to do
    tall = [row for row in rows if not row["tile"].startswith("16 ×")]
    assert len(tall) == 72
    assert [row for row in tall if MATRIX[row["sm"]] not in row["matrix"].split()] == []
    assert all(row["matrix"] for row in rows)


def test_the_page_shows_what_was_compiled(rows):
    text = PAGE.read_text(encoding="utf-8")
    if f"with Triton {triton.__version__}\n" not in text:
        pytest.skip(f"docs/kernels.md was made with another Triton than {triton.__version__}")
    shown = [line for line in text.splitlines() if line.startswith("| ")][2:]
    expected = [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    assert shown == expected, "write: python tests/kernels/aot.py docs/kernels.md"
