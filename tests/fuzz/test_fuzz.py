"""Two minutes of fuzzing; `make fuzz` runs for as long as you like."""

from __future__ import annotations

import pytest
from machine import run_for
from world import OPERATIONS

SECONDS, FIRST_SEED = 120, 0


@pytest.mark.sweep
def test_no_sequence_of_calls_breaks_an_invariant(capsys):
    seeds = run_for(SECONDS, FIRST_SEED)
    with capsys.disabled():
        count = sum(OPERATIONS.values())
        print(f"\nfuzz: seeds {FIRST_SEED} to {FIRST_SEED + seeds - 1}, {count} operations")
