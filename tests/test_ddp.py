"""DistributedDataParallel on the CPU: gradients of the whole batch, and bits that stay equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("ddp_rank.py")


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_train_as_one_process_on_the_whole_batch(world, tmp_path):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{SCRIPT.parents[1]}{os.pathsep}{SCRIPT.parent}",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(world), tmp_path / "rendezvous"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    for rank, (out, err) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, err[-2000:]
        assert out.split() == ["lora", "dora", "boft", "seq_bn", "par_bn"]
