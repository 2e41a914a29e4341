"""`fully_shard` on two processes of the CPU: trained, gathered, saved and loaded as one model."""

from __future__ import annotations

import pytest
from ranks import BESIDE, METHODS, run_ranks

# one whose magnitudes are normed over what is sharded, and all
ALL = [f"{family}-{method}" for family in ("bert", "llama") for method in METHODS]


@pytest.mark.parametrize(
    "cases",
    [["bert-lora", "llama-dora", f"bert-{BESIDE}"], pytest.param(ALL, marks=pytest.mark.sweep)],
    ids=len,
)
def test_a_sharded_model_trains_and_is_saved_as_a_whole_one(cases, tmp_path):
    found = run_ranks("fsdp_rank.py", 2, tmp_path / "rendezvous", tmp_path, *cases)
    assert found == [cases] * 2
