"""`fully_shard` on two processes of the CPU: trained, gathered, saved and loaded as one model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("fsdp_rank.py")
METHODS = ("lora", "dora", "boft", "seq_bn", "par_bn")


def test_a_sharded_model_trains_and_is_saved_as_a_whole_one(tmp_path):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{SCRIPT.parents[1]}{os.pathsep}{SCRIPT.parent}",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", SCRIPT, str(rank), tmp_path / "rendezvous", tmp_path],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, err[-2000:]
        assert out.splitlines() == [f"{f} {m}" for f in ("bert", "llama") for m in METHODS]
