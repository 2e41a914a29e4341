"""What adapters cost on a GPU, beside the frozen base model and beside PEFT, in one run.

    make TORCH=torch bench-gpu        or        python benchmarks/gpu.py

Needs torch, triton and transformers, and peft for PEFT's columns. It keeps to its own time, writes
after each figure, and measures no method whose kernels are wrong. `--first` is for the first
fifteen minutes on a GPU: a call of 440 seconds, then `--first --continue`, one of 200. `--continue`
adds what an earlier run had no time for. `--dry-run` runs every line of it on a CPU, at sizes that
say nothing, and writes no number.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Read the command line, see that there is a GPU, run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder; benchmarks/results if not given")
    parser.add_argument("--seconds", type=float, help="of this call; 465, or 440 with --first")
    parser.add_argument("--rounds", type=int, default=9, help="at least 9 for a report")
    parser.add_argument(
        "--section", "--only", nargs="+", metavar="NAME", help="only these, after the gate"
    )
    parser.add_argument("--first", action="store_true", help="the first fifteen minutes on a GPU")
    parser.add_argument(
        "--continue", dest="resume", action="store_true", help="keep an earlier run's rows"
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, without figures")
    options = parser.parse_args()
    if options.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton decides where a kernel is declared whether it interprets
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    # a checkout that nobody has installed
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    # the driver is not asked here, so that forked processes can use it
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        sys.exit(
            f"bench-gpu measures on a CUDA device, and torch {torch.__version__} sees none here. "
            f"To try it without one, write: python benchmarks/gpu.py --dry-run"
        )
    if options.output is None:
        made = tempfile.mkdtemp(prefix="bench-gpu-") if options.dry_run else HERE / "results"
        options.output = Path(made)
    run = importlib.import_module("_gpu_run")
    sys.exit(run.main(options))


if __name__ == "__main__":
    main()
