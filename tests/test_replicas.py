"""Every method, head and composition on two pretend GPUs: a replica runs on its own device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# in the quick part, test_conformance.py asks whether layers follow the device of their input
pytestmark = pytest.mark.sweep
SCRIPT = Path(__file__).with_name("pretend_gpus.py")


@pytest.fixture(scope="module")
def errors():
    done = subprocess.run(
        [sys.executable, SCRIPT],
        cwd=SCRIPT.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_replicas_run_forward_and_backward_on_their_own_device(errors):
    failed = {case: e for case, e in errors.items() if e and not case.startswith("planted")}
    assert not failed
    assert len(errors) > 40


@pytest.mark.parametrize("bug", ["planted attribute", "planted shared container"])
def test_a_planted_bug_is_caught(errors, bug):
    assert "Expected all tensors to be on the same device" in errors[bug]
