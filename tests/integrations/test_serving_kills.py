"""Servers and exports that are killed: no file that was there is another one afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from served import MARKS

pytestmark = MARKS
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.sweep(whole=True)
def test_kill_9_at_any_moment_changes_no_file():
    ran = subprocess.run(
        [sys.executable, str(TESTS / "killed_server.py"), "--kills", "12"],
        capture_output=True, text=True, timeout=1200, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
             "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [
                 os.environ.get("PYTHONPATH")])])},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {kind: sum(counts.values()) for kind, counts in found.items()} == dict.fromkeys(
        ("start", "requests", "export", "save"), 3
    )
    assert "in flight" in found["requests"]
    assert found["export"].keys() | found["save"].keys() > {"refused"}
