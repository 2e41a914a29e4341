"""Run the Triton kernels in Triton's interpreter, on shapes and layouts that are hostile to them.

A script, run in a process of its own because Triton decides at import whether it interprets:
`interpreted.py low_rank` takes the cases of `low_rank_cases.py`, `interpreted.py opcheck norms` a
part of them. It prints one JSON object, case
to error, "" for a case that passes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).parents[1]))

import torch
from hostile import drawn, near
from rounded import Rounded, right


def planted() -> None:
    """A check itself: an output that is wrong in one element."""
    good = torch.ones(3, 4, dtype=torch.float64)
    bad = good.float()
    bad[2, 3] = float("nan")
    near("planted", bad, good, 1e-6, torch.float32)


def short() -> None:
    """The other check: a sum without the last of its terms."""
    x, a = drawn(3, 100, dtype=torch.float16), drawn(5, 100, dtype=torch.float16)
    got = x[:, 1:].float() @ a[:, 1:].float().T
    right("short", got.half(), Rounded(x) @ Rounded(a).mT, torch.float16)


def main() -> None:
    # torch.empty gives NaN: what a kernel does not write is seen
    torch.use_deterministic_algorithms(True)
    errors = {}
    module, *part = sys.argv[1:]
    cases = importlib.import_module(f"{module}_cases").cases(*part)
    for name, case in (*cases, ("planted", planted), ("short", short)):
        torch.manual_seed(0)
        errors[name] = ""
        try:
            case()
        except Exception as error:  # noqa: BLE001  every failure is a line of the report
            errors[name] = f"{type(error).__name__}: {error}"[:300]
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
