"""The table of `docs/devices.md`: its columns are run, and it is written and read here.

`make devices` writes the table that `test_devices.py` compares with what it finds.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import device_modes as modes
import device_steps as steps

TABLE = Path(__file__).parents[1] / "docs" / "devices.md"
SCRIPT = Path(__file__).with_name("devices_rank.py")
COLUMNS = ("eager", "autocast", "compiled", "DDP", "FSDP2", "fake replica", "checkpointed")
RED = "✗"

Columns = dict[str, modes.Cells]

HEAD = f"""# Methods, dtypes and ways to run a model

This page shows whether each method works in each dtype and in each way to run a model. `make devices`
writes it and runs every cell; `tests/test_devices.py` runs them again and compares. {modes.GREEN} marks a
cell that passed, {RED} one that did not.

Each cell tests a tiny BERT of two blocks (one block if compiled or replicated) with two adapters of
the method and two classification heads, all in the given dtype. One adapter and one head are trained
for one step of SGD. The logits must have the dtype of the model.
Gradients must reach all parameters of the trained adapter and head, and no others, and the step
must change exactly these parameters. The logits before and after the step, and all gradients, must
be finite and close to an independent reference. New config classes are added automatically, under
the first name registered for them.

| mode | what runs | reference |
| --- | --- | --- |
| eager | the model | the same parameters in float64; for float64 itself, central differences too (only for the head if a method treats part of its formula as constant) |
| autocast | under `torch.autocast` to the dtype of a half-precision model, otherwise to each half-precision dtype in turn; logits have that dtype, and gradients that of their parameter; a float64 model stays exact, since autocast does not change it | float64 |
| compiled | a block under `torch.compile(fullgraph=True)`: one graph, and no new one after the step | the same dtype, eager |
| DDP | two processes with gloo, each with half of the batch | float64 in one process on the whole batch |
| FSDP2 | the same, with `fully_shard` on every block and on the model; the state-dict keys do not change | float64 in one process on the whole batch |
| fake replica | two replicas made as DataParallel does, each with half of the batch; then, without comparing numbers, each on its own simulated GPU, where an operand from the other GPU raises | float64 on the whole batch |
| checkpointed | gradient checkpointing, reentrant and not, with dropout; the block must be recomputed | the same dtype without checkpointing, bit for bit |

"""  # noqa: E501  rows of a table

TOLERANCE = """
The error of a gradient may be {halves} eps of the dtype in float16 and bfloat16, and {singles} eps in float32
and float64, times its largest element, or times a {smallest}th of the largest element of all gradients,
whichever is larger. The error of logits may be half as large. Half precision is allowed fewer eps
because its products are summed in float32. Under autocast, eps is that of the dtype it casts to.

"""  # noqa: E501  as wide as the page

NOTES = f"""{modes.ONE_DTYPE} Over a half-precision model, the adapter keeps its magnitudes in float32, but `fully_shard` needs
one dtype for all trained parameters of a block. These cells ran with `DoRAConfig(dtype="float32")`,
which keeps the whole adapter in float32; use it too.
"""  # noqa: E501  as wide as the page


def of_script(*arguments: object) -> subprocess.Popen[str]:
    """A started process of `devices_rank.py`."""
    paths = os.pathsep.join([str(SCRIPT.parents[1]), str(SCRIPT.parent)])
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(processes: list[subprocess.Popen[str]]) -> Columns:
    """The columns of all processes: a cell is green where it is in all of them."""
    columns: Columns = {}
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(err[-3000:])
        for column, found in json.loads(out).items():
            known = columns.setdefault(column, {})
            for cell, text in found.items():
                if known.get(cell, modes.GREEN).startswith(modes.GREEN):
                    known[cell] = text
    return columns


def processes() -> Columns:
    """DDP and FSDP2, in one pair of processes."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder) / "rendezvous"
        return outcome([of_script(rank, 2, rendezvous) for rank in range(2)])


def here(mode: str) -> Columns:
    """A mode that needs no process of its own."""
    return {mode: modes.cells(modes.HERE[mode])}


RUNS: dict[str, Callable[[], Columns]] = {
    **{name: functools.partial(here, name) for name in modes.HERE},
    "processes": processes,
    "fake replica": lambda: outcome([of_script()]),
}
"""What is run at a time: a column, or columns that share processes."""


def render(columns: Columns) -> str:
    """The page."""
    lines = ["method", "dtype", *COLUMNS], ["---"] * (2 + len(COLUMNS))
    rows = []
    for cell in columns[COLUMNS[0]]:
        texts = [columns[column][cell] for column in COLUMNS]
        marks = [text if text.startswith(modes.GREEN) else RED for text in texts]
        rows.append([*cell.split(), *marks])
    table = "".join(f"| {' | '.join(row)} |\n" for row in (*lines, *rows))
    tolerance = TOLERANCE.format(
        halves=steps.UNITS[steps.DTYPES[0]],
        singles=steps.UNITS[steps.DTYPES[-1]],
        smallest=round(1 / steps.SMALLEST),
    )
    return HEAD + table + tolerance + NOTES


def read(page: str) -> Columns:
    """The columns of a page."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    start = next((i for i, row in enumerate(rows) if row[:2] == ["method", "dtype"]), len(rows))
    columns: Columns = {name: {} for name in COLUMNS}
    for method, dtype, *marks in rows[start + 2 :]:
        for column, mark in zip(COLUMNS, marks, strict=True):
            columns[column][f"{method} {dtype}"] = mark
    return columns


def main() -> int:
    """Run all cells and write the page; 1 if one is red."""
    columns: Columns = {}
    for run in RUNS.values():
        columns |= run()
    TABLE.write_text(render(columns), encoding="utf-8")
    red = [
        f"{column}, {cell}: {text}"
        for column in COLUMNS
        for cell, text in columns[column].items()
        if not text.startswith(modes.GREEN)
    ]
    sys.stderr.write("".join(f"{line}\n" for line in red))
    return bool(red)


if __name__ == "__main__":
    sys.exit(main())
