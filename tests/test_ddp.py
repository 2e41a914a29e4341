"""DistributedDataParallel on the CPU: gradients of the whole batch, and bits that stay equal."""

from __future__ import annotations

import pytest
from ranks import BESIDE, METHODS, run_ranks


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep(whole=True))])
def test_ranks_train_as_one_process_on_the_whole_batch(world, tmp_path):
    found = run_ranks("ddp_rank.py", world, world, tmp_path / "rendezvous")
    assert found == [[*METHODS, BESIDE, "tasks"]] * world
