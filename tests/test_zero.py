"""ZeRO stage 3 on two processes of the CPU: what is saved is what one process saves."""

from __future__ import annotations

import importlib.util

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)


def test_partitioned_parameters_are_saved_whole(tmp_path):
    # deepspeed itself warns
    found = run_ranks("zero_rank.py", 2, tmp_path / "rendezvous", tmp_path, options=())
    assert [lines[-1] for lines in found] == ["done"] * 2
