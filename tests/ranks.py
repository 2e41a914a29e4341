"""Processes of a distributed run on the CPU, for the tests of DDP and FSDP."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

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


def free_port() -> str:
    """A port for the processes of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def forked(world: int, act: Callable[..., object], log: Path, *args: Any) -> list[ForkProcess]:
    """Start `act(*args)` in some ranks, which find each other by the environment.

    They are forks of this process, which has imported what they need, and trained nothing yet.

    Args:
        world: how many ranks; one has no environment.
        act: a function.
        log: a file that gets what a rank says, with its number behind the name.
        args: of all of them.
    """
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world)}

    def run(rank: int) -> None:
        with Path(f"{log} {rank}").open("w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        if world > 1:
            os.environ.update({**group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        act(*args)

    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run, args=(rank,)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    return ranks


def ended(ranks: list[ForkProcess], seconds: float) -> list[int | None]:
    """How the ranks end by themselves: their exit codes; None for one that does not."""
    deadline = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(deadline - time.monotonic(), 0))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    return codes
