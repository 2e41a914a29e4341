"""The first seeds of the fuzzer, the same on every machine; `make fuzz` runs for longer."""

from __future__ import annotations

import pytest
from machine import run_seeds
from world import OPERATIONS

# of each test
SEEDS = 6


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, 60, SEEDS))
def test_no_sequence_of_calls_breaks_an_invariant(first):
    before = sum(OPERATIONS.values())
    run_seeds(range(first, first + SEEDS))
    assert sum(OPERATIONS.values()) > before
