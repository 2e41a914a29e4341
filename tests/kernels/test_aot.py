"""Every Triton configuration compiles for GPUs that are not here, and spills no register."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from swept import all_but

SCRIPT = Path(__file__).with_name("aot.py")
# bytes on their way to a multiprocessor that keep the memory busy; see `aot.HOLDS`
LITTLE = {80: 15_111, 90: 29_090, 86: 9_131, 89: 6_300, 120: 8_432}
# on a B200 some have three quarters of that
LITTLE |= {100: 43_243 * 3 // 4}
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
# bytes that one program may use
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, **dict.fromkeys((86, 89, 120), 101_376)}
# of kernels: loads in loops that a program waits for
WAITING = {
    # b, once
    "finish": 1,
    # small matrices
    "cayley_fold": 2,
    "cayley_fold_backward": 1,
}
MATRIX = {80: "HMMA", 90: "HGMMA", 100: "TCMMA", **dict.fromkeys((86, 89, 120), "HMMA")}
# kernels that loop over their large operand
LOOPS = ("shrink", "compose_backward", "bottleneck", "outer", "row_norm", "rotate")
# stages between the load of an operand and its use; the plan's numbers are loaded two ahead
AHEAD = {"outer, mixed": 2}
# what another kernel has just written, or factors alone
CACHED = ("finish", "compose, dropout", "compose, mixed, dropout")
# bytes of the stack that ptxas uses although 64 registers are enough
STACK = {(f"compose_backward, {of}frozen b", 120): 8 for of in ("", "no gain, ")}
# bytes of it that another Triton may use anywhere: four registers, written and read once
STACK_OF_ANOTHER = 16
# of each operator on an architecture: configurations, those with products of 64 rows, those
# without products
COUNTS = {
    "low_rank": (15, 9, 0),
    "compose": (52, 20, 11),
    "row_norm": (21, 0, 0),
    "rotate": (11, 5, 0),
    "cayley_fold": (16, 1, 3),
    "bottleneck": (19, 13, 0),
    "grouped": (36, 21, 0),
}
# where the GPUs with less shared memory have another number of them
COUNTS_OF_SMALL = {"rotate": (10, 5, 0), "cayley_fold": (14, 0, 2)}
SMALL = [sm for sm, shared in SHARED.items() if shared == 101_376]
EACH = {(name, sm): COUNTS_OF_SMALL.get(name, COUNTS[name]) if sm in SMALL else COUNTS[name]
        for name in COUNTS for sm in SHARED}  # fmt: skip
QUICK = ("rotate", 90)


def shown():
    """The lines of the table on the page, without its head."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ")][2:]


def of_page(name, sm):
    """The lines of an operator on an architecture."""
    totals = {each: sum(EACH[each, other][0] for other in SHARED) for each in COUNTS}
    before = sum(totals[each] for each in list(COUNTS)[: list(COUNTS).index(name)])
    own = shown()[before : before + totals[name]]
    return [line for line in own if line.split(" | ")[3] == str(sm)]


def printed(*asked, folders=()):
    """What the script prints, with packages of these folders before the installed ones."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if folders:
        env["PYTHONPATH"] = os.pathsep.join([*folders, env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, asked)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def least_buffers(row):
    """How many tiles of an operand a loop with these stages keeps at least."""
    stages = int(row["tile"][-8])
    ahead = next((n for name, n in AHEAD.items() if row["kernel"].startswith(name)), 1)
    return (stages - 1) // ahead


def well_compiled(rows, stack=0):
    """Check that results are safe, all fits, little spills; return tall products, all products."""
    assert [row for row in rows if row["exposed"]] == []
    assert [row for row in rows if row["shared"] > SHARED[row["sm"]]] == []
    known = [max(stack, STACK.get((row["kernel"], row["sm"]), 0)) for row in rows]
    assert [row for row, most in zip(rows, known, strict=True) if row["spilled"] > most] == []
    # products run on the newest matrix unit; less than 64 rows fill no warp group of it
    without = ("no update", "finish")
    products = [row for row in rows if not row["kernel"].endswith(without)]
    # a single factor is not multiplied
    products = [row for row in products if not re.match(r"cayley_fold,.*m = 1$", row["kernel"])]
    tall = [row for row in products if int(row["tile"].partition(" ")[0]) >= 64]
    assert [row for row in tall if MATRIX[row["sm"]] not in row["matrix"].split()] == []
    assert all(row["matrix"] for row in products)
    names = [row["kernel"].partition(",")[0] for row in rows]
    pairs = zip(rows, names, strict=True)
    assert [row for row, name in pairs if row["waiting"] > WAITING.get(name, 0)] == []
    # Little's law; products of float32 are bound by the matrix units, and few rows by latency
    bound = [
        row
        for row in rows
        if row["kind"] == "half" or row["kernel"].startswith("rotate")
        if row in tall or row["kernel"].startswith("row_norm") or row["tile"].startswith("32 × 128")
        if not row["kernel"].startswith(CACHED)
    ]
    assert [row for row in bound if row["in flight"] < LITTLE[row["sm"]]] == []
    loops = [row for row in bound if row["kernel"].startswith(LOOPS)]
    assert [row for row in loops if row["buffers"] < least_buffers(row)] == []
    return tall, products


@pytest.mark.sweep
def test_every_kernel_compiles_for_integers_of_one():
    found = printed("ones")
    assert {name: error for name, error in found.items() if error} == {}
    assert len({name.partition(",")[0] for name in found}) == 10


# one test for each operator and architecture: it takes long, and processes can share the work
@pytest.mark.parametrize(("name", "sm"), all_but([QUICK], EACH))
def test_every_configuration_compiles_well(name, sm):
    rows = printed(name, sm)
    tall, products = well_compiled(rows)
    assert (len(rows), len(tall), len(rows) - len(products)) == EACH[name, sm]
    if f"with Triton {triton.__version__}\n" in PAGE.read_text(encoding="utf-8"):
        for row in rows:
            del row["exposed"]
        own = [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
        assert of_page(name, sm) == own, "write: python tests/kernels/aot.py"


@pytest.mark.sweep
@pytest.mark.parametrize("name", COUNTS)
def test_another_triton_compiles_as_well(name):
    folder = os.environ.get("OTHER_TRITON")
    if folder is None:
        pytest.skip(
            f"Triton {triton.__version__} is the only one here; for another, write "
            f"pip install --target FOLDER triton==3.6.0 and set OTHER_TRITON=FOLDER"
        )
    assert printed("version", folders=[folder]) != triton.__version__
    well_compiled(printed(name, folders=[folder]), STACK_OF_ANOTHER)


def test_the_page_shows_nothing_else():
    assert len(shown()) == sum(total for total, _, _ in EACH.values())
