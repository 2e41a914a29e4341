"""One aligned shape of each kernel, forward and backward, for tools that watch a process."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run each kernel once."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import torch

    from _gpu_bench import DRY, REAL
    from _gpu_kernels import KERNELS, KINDS, Shape
    from adapterzoo import kernels

    dry = "dry" in sys.argv
    plan, device = (DRY, "cpu") if dry else (REAL, "cuda:0")
    rows, d_in, d_out = plan.gate.aligned
    with kernels.use("triton"):
        for kernel in KERNELS:
            shape = Shape(rows, d_in, d_out, kernel.aligned[0])
            operands = kernel.draw(shape, KINDS["bfloat16"], torch.device(device))
            out = kernel.run(operands)
            if kernel.grads:
                inputs = [operands[name] for name in kernel.grads]
                torch.autograd.grad(out, inputs, torch.randn_like(out))


if __name__ == "__main__":
    main()
