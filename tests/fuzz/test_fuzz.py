"""The first seeds of the fuzzer, the same on every machine; `make fuzz` runs for longer."""

from __future__ import annotations

import pytest
from machine import run_seeds
from world import OPERATIONS

# about 100 s of one core
SEEDS = range(60)


@pytest.mark.sweep
def test_no_sequence_of_calls_breaks_an_invariant(capsys):
    run_seeds(SEEDS)
    with capsys.disabled():
        count = sum(OPERATIONS.values())
        print(f"\nfuzz: seeds {SEEDS[0]} to {SEEDS[-1]}, {count} operations")
