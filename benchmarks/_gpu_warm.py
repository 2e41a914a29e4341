"""Compiling ahead, in several processes: each kernel that the benchmark will ask for.

Triton keeps what it has compiled on disk; what one process has left there, the next one loads. A
script: `_gpu_warm.py 2 8` takes the third of every eight cases, and `_gpu_warm.py once` one aligned
shape of each kernel, for tools that watch a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
# after which what is missing is compiled where it is asked for
_SECONDS = 90.0


def ahead(dry: bool) -> int:
    """Run the script for all cases, on a dry run for one; the number of processes that failed.

    A failure costs time and nothing else: the gate runs everything again.
    """
    number = 1 if dry else max(1, min(12, (os.cpu_count() or 2) - 2))
    step = 1 << 20 if dry else number
    script = [sys.executable, str(HERE / "_gpu_warm.py")]
    started = [
        subprocess.Popen(
            [*script, str(i), str(step), *(["dry"] if dry else [])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for i in range(number)
    ]
    end = time.monotonic() + _SECONDS
    failed = 0
    for process in started:
        try:
            failed += process.wait(max(end - time.monotonic(), 0.0)) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            failed += 1
    return failed


def main() -> None:
    """Run every so-many-th case once."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import torch

    from _gpu_bench import DRY, REAL, timed_shapes
    from _gpu_gate import shapes
    from _gpu_kernels import KERNELS, KINDS, Kernel, Kind, Shape
    from adapterzoo import kernels

    dry = "dry" in sys.argv
    plan, device = (DRY, "cpu") if dry else (REAL, "cuda:0")

    def cases() -> Iterator[tuple[Kernel, Shape, Kind]]:
        for kernel in KERNELS:
            for shape in shapes(kernel, plan.gate):
                yield from ((kernel, shape, KINDS[kind]) for kind in plan.gate.kinds)
            for shape in timed_shapes(kernel, plan):
                yield kernel, shape, KINDS["bfloat16"]

    if sys.argv[1] == "once":
        rows, d_in, d_out = plan.gate.aligned
        chosen = [(k, Shape(rows, d_in, d_out, k.aligned[0]), KINDS["bfloat16"]) for k in KERNELS]
    else:
        chosen = list(cases())[int(sys.argv[1]) :: int(sys.argv[2])]
    with kernels.use("triton"):
        for kernel, shape, kind in chosen:
            operands = kernel.draw(shape, kind, torch.device(device))
            out = kernel.run(operands)
            if kernel.grads:
                inputs = [operands[name] for name in kernel.grads]
                torch.autograd.grad(out, inputs, torch.randn_like(out))


if __name__ == "__main__":
    main()
