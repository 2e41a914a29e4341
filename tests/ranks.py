"""Processes of a distributed run on the CPU, for the tests of DDP and FSDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
METHODS = ("lora", "dora", "boft", "seq_bn", "par_bn")
# not all biases: the head does not use the pooler, whose bias would get no gradient
BESIDE = "lora[modules_to_save=['LayerNorm'],trainable_token_indices=[0,5,8],bias='lora_only']"


def run_ranks(script, world, *args, options=("-W", "error")):
    """What each rank of `python SCRIPT RANK …` prints; all end without an error.

    Args:
        script: a file of this folder.
        world: how many ranks.
        args: of all of them, behind the rank.
        options: of Python.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
        ),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *options, TESTS / script, str(rank), *map(str, args)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, err) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, err[-2000:]
    return [out.splitlines() for out, _ in outputs]
