"""The GPU benchmark, where there is no GPU: all of its lines run, and its gate stops it."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
SECTIONS = [*("ceilings", "gate", "models", "layers", "kernels", "graphs", "bottlenecks", "mixed")]
ASKED = ["small", "sanitizer", "sweep", "backwards", "sites", "decode"]
FIRST = ["gate", "reports", "ceilings", "models", "layers", "graphs"]
SECOND = ["recheck", "sanitizer", "kernels", "mixed", "together"]

# each plants a bug in a kernel and says whether the gate saw it; the last runs all of it
PLANTED = """
import argparse, itertools, json, pathlib, sys
sys.path[:0] = ["benchmarks", "."]
import torch
import _gpu_gate, _gpu_run
from _gpu_bench import DRY
from adapterzoo.kernels import compose_triton, low_rank_triton

expand = low_rank_triton.expand
calls = itertools.count()

def one_element(y, *rest):
    out = expand(y, *rest)
    out[-1, -1] += out.abs().max()
    return out

def unwritten(y, *rest):
    out = torch.empty_like(y)
    out[:-1] = expand(y, *rest)[:-1]
    return out

def racing(*operands):
    return expand(*operands) * (1 + 1e-2 * (next(calls) % 2))

def transposed_sign(*operands):
    dt, db = low_rank_triton_backward(*operands)
    return dt, -db

seen = {}

def ask(name):
    (row,) = _gpu_gate.checked("expand", "bfloat16", DRY.gate, torch.device("cpu"))
    seen[name] = row.cells["against float64"]

ask("nothing")
for wrong in (one_element, unwritten, racing):
    low_rank_triton.expand = wrong
    ask(wrong.__name__)
low_rank_triton.expand = expand
low_rank_triton_backward = low_rank_triton.expand_backward
low_rank_triton.expand_backward = transposed_sign
ask("transposed_sign")
low_rank_triton.expand_backward = low_rank_triton_backward

def crash(*operands):
    import os
    os._exit(11)

def slow(*operands):
    import time
    time.sleep(600)

# one kernel is wrong, one ends its process and one hangs: the others have their verdicts
low_rank_triton.expand = one_element
low_rank_triton.shrink = crash
_gpu_run.KERNELS = _gpu_gate.KERNELS = [
    k for k in _gpu_gate.KERNELS if k.name in ("expand", "shrink", "row_norm", "cayley_fold")
]
_gpu_run.REPORTS.clear()
_gpu_run.REPORTS["a report that hangs"] = slow
_gpu_run.REPORTS["loading"] = lambda bench: (True, "the same bits")
options = argparse.Namespace(
    output=pathlib.Path(sys.argv[1]), seconds=40.0, rounds=9, section=["reports"], dry_run=True,
    first=True, resume=False,
)
seen["code"] = _gpu_run.main(options)
options.seconds, options.section, options.resume = 300.0, ["models"], True
seen["again"] = _gpu_run.main(options)
print(json.dumps(seen))
"""


# operators that the layers of a method call and none of the kernels that it names
USES = """
import json, sys
sys.path[:0] = ["benchmarks", "."]
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from _gpu_bench import DRY, Bench
from _gpu_bench import Clock
from _gpu_kernels import KERNELS, KINDS, Shape
from _gpu_layers import TARGET, model_of, steps_of, up_of
from _gpu_methods import boft, low_rank, parameters_of
from _gpu_report import Part
from adapterzoo import kernels

class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "adapterzoo":
            self.seen.add(func.name())
        return func(*args, **(kwargs or {}))

def used(run):
    with kernels.use("triton"), Recorder() as recorder:
        run()
    return recorder.seen

def alone(kernel):
    operands = kernel.draw(Shape(20, 32, 48, kernel.aligned[0]), KINDS["bfloat16"], cpu)
    out = kernel.run(operands)
    if kernel.grads:
        torch.autograd.grad(out, [operands[n] for n in kernel.grads], torch.randn_like(out))

cpu = torch.device("cpu")
bench = Bench(cpu, Clock(cpu, 2), DRY, Part("", ""))
of_kernel = {kernel.name: used(lambda: alone(kernel)) for kernel in KERNELS}
base, missing = model_of(bench, 32, 48), {}
x = torch.randn(20, 32).bfloat16().requires_grad_()
dy = torch.randn(20, 48).bfloat16()
for method in (
    *(low_rank(16, p, dora) for p in (0.0, 0.05) for dora in (False, True)), boft(8, 2)
):
    ours = method.put(base, TARGET)
    step = steps_of(up_of(ours), parameters_of(ours), [x], dy)[0]
    named = set().union(*(of_kernel[name] for name in method.kernels))
    missing[method.title] = sorted(used(step) - named)
print(json.dumps(missing))
"""


def run(*command, interpreted=False):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.sweep(whole=True)
def test_a_dry_run_fills_every_section_and_writes_no_number(tmp_path):
    results = ROOT / "benchmarks" / "results"
    before = sorted(results.rglob("*")) if results.exists() else None
    done = run(SCRIPT, "--dry-run", "--output", tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (sorted(results.rglob("*")) if results.exists() else None) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpu-dry-run.json", "gpu-dry-run.md"]
    found = json.loads((tmp_path / "gpu-dry-run.json").read_text(encoding="utf-8"))
    assert found["about"]["device"] == "cpu (dry run)"
    assert states(found) == {
        **dict.fromkeys(SECTIONS, "done"),
        **dict.fromkeys(ASKED, "skipped"),
        "verdicts": "done",
    }
    sections = {part["name"]: part for part in found["sections"] if part["name"] in SECTIONS}
    assert list(sections) == SECTIONS
    rows = [row for part in sections.values() for row in part["rows"]]
    assert all(part["rows"] for part in sections.values())
    values = [value for row in rows for value in row["cells"].values()]
    assert {type(value) for value in values} <= {str, type(None)}
    verdicts = {g["verdict"] for row in rows for g in row["goals"].values()}
    assert verdicts == {"not judged", "met"}
    gate = [row["figure"] for row in sections["gate"]["rows"]]
    assert gate == [f"{name}, bfloat16" for name in kernel_names()]
    assert all(row["facts"] == {} for row in rows)
    page = (tmp_path / "gpu-dry-run.md").read_text(encoding="utf-8")
    assert page.startswith("# Dry run of the GPU benchmark: no figure here was measured\n")
    # PEFT is installed here, so that its columns are filled
    for name in ("layers", "models"):
        for row in sections[name]["rows"]:
            assert row["cells"]["PEFT bf16"] == row["cells"]["PEFT default"] == "dry run"


@pytest.mark.sweep
def test_a_wrong_kernel_blocks_only_what_uses_it(tmp_path):
    done = run("-c", PLANTED, str(tmp_path), interpreted=True)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("nothing").startswith("right in ")
    assert seen.pop("code") == seen.pop("again") == 1
    assert "out is off by" in seen["one_element"]
    # what was not written is NaN, and so not even equal to itself
    assert "differs between two runs" in seen["unwritten"]
    assert "differs between two runs" in seen["racing"]
    assert "db is off by" in seen["transposed_sign"]
    found = json.loads((tmp_path / "gpu-dry-run-first.json").read_text(encoding="utf-8"))
    sections = {part["name"]: part for part in found["sections"]}
    verdicts = {
        row["figure"].removesuffix(", bfloat16"): row["cells"]["against float64"].split(" in ")[0]
        for row in sections["gate"]["rows"]
    }
    assert verdicts.pop("shrink") == "WRONG: its process ended with code 11"
    assert verdicts.pop("expand").startswith("WRONG: expand, bfloat16, ")
    assert verdicts == {"row_norm": "right", "cayley_fold": "right"}
    assert sections["gate"]["state"] == "red"
    # what hangs is stopped, and the rest of its section is kept
    assert sections["reports"]["state"] == "cut"
    assert [row["figure"] for row in sections["reports"]["rows"]] == ["loading"]
    titles = [row["figure"].partition(",")[0] for row in sections["models"]["rows"]]
    assert titles == ["BOFT b=8 m=2"]
    reasons = [reason.rpartition(": ")[2] for reason in sections["models"]["skipped"]]
    assert reasons == ["expand, shrink"] * 3


@pytest.mark.sweep
def test_the_first_fifteen_minutes_are_two_calls_that_fill_every_section(tmp_path):
    command = (SCRIPT, "--dry-run", "--first", "--output", tmp_path)
    path = tmp_path / "gpu-dry-run-first.json"
    done = run(*command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    before = json.loads(path.read_text(encoding="utf-8"))
    assert states(before) == {
        **dict.fromkeys([*FIRST, "verdicts"], "done"),
        **dict.fromkeys(SECOND, "skipped"),
    }
    assert f"not complete: {', '.join(SECOND)}. To go on, add --continue" in done.stdout
    # killed while it wrote rows: those that are missing come again, the others stay
    cut = before["sections"][FIRST.index("layers")]
    missing = cut["rows"].pop()
    cut["state"] = "running"
    path.write_text(json.dumps(before), encoding="utf-8")
    done = run(*command, "--continue")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    after = json.loads(path.read_text(encoding="utf-8"))
    assert states(after) == dict.fromkeys([*FIRST, *SECOND, "verdicts"], "done")
    assert "Kernels against float64" not in done.stdout
    cut["rows"].append(missing)
    for number, name in enumerate(FIRST):
        assert after["sections"][number]["name"] == name
        assert after["sections"][number]["rows"] == before["sections"][number]["rows"]
    sections = {part["name"]: part for part in after["sections"]}
    # nothing was wrong
    assert [name for name, part in sections.items() if not part["rows"]] == ["recheck"]
    assert [row["figure"] for row in sections["verdicts"]["rows"]] == kernel_names()
    assert {row["cells"]["found"] for row in sections["sanitizer"]["rows"]} == {"the script ran"}
    for row in sections["layers"]["rows"]:
        assert row["cells"]["PEFT bf16"] == row["cells"]["torch.compile"] == "dry run"


@pytest.mark.sweep(whole=True)
def test_sections_that_are_asked_for_run(tmp_path):
    done = run(SCRIPT, "--dry-run", "--output", tmp_path, "--section", *ASKED)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu-dry-run.json").read_text(encoding="utf-8"))
    always = ["ceilings", "gate", "verdicts"]
    assert {name for name, state in states(found).items() if state == "done"} == {*ASKED, *always}
    sections = {part["name"]: part for part in found["sections"]}
    told = [row["cells"]["found"] for row in sections["small"]["rows"]]
    assert not [found for found in told if found.startswith("fails")]


def states(document):
    return {part["name"]: part["state"] for part in document["sections"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it would measure")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = run(SCRIPT, "--output", tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"bench-gpu measures on a CUDA device, and torch {torch.__version__} sees none here. "
        f"To try it without one, write: python benchmarks/gpu.py --dry-run"
    )
    assert list(tmp_path.iterdir()) == []


def kernel_names():
    from _gpu_kernels import KERNELS

    return [kernel.name for kernel in KERNELS]


def test_the_gate_takes_every_configuration_that_is_measured():
    from _gpu_bench import REAL
    from _gpu_gate import tiles
    from _gpu_kernels import KERNELS, KINDS

    rows = (1, 17, 64, 65, 2048, 4096, 4097, 8192, 14336)
    for kernel in KERNELS:
        widest = max(kernel.ranks)
        narrow = min(kernel.ranks)
        ranks = [r for r in (1, 8, 16, 17, 32, 64, 65, 128, 256, 384) if narrow <= r]
        if kernel.name in ("rotate", "cayley_fold", "bottleneck"):
            # wider ones are products for cuBLAS
            ranks = [r for r in ranks if r <= widest]
        used = {
            str(tuple(of(m, rank, kind.factor)))
            for m, rank, kind in itertools.product(rows, ranks, KINDS.values())
            for of in kernel.tiles
        }
        assert used <= tiles(kernel, REAL.gate), kernel.name


def test_the_gate_takes_every_configuration_as_models_do():
    """Triton compiles other machine code, with asynchronous copies, for multiples of 16."""
    from _gpu_bench import REAL
    from _gpu_gate import shapes
    from _gpu_kernels import KERNELS, KINDS

    for kernel in KERNELS:
        whole = [s for s in shapes(kernel, REAL.gate) if s.d_in % 16 == s.d_out % 16 == 0]
        # a composition without an update has no rank
        aligned = [s for s in whole if s.rank % 16 == 0 or kernel.name == "compose, no update"]
        assert any(s.rows == 8192 and s.d_in == s.d_out == 4096 for s in aligned), kernel.name
        # rows that no tile fits, and configurations of few rows and of many
        assert any(s.rows % 16 and s.rows > 1024 for s in aligned)
        used, all_of = (
            {
                str(tuple(of(shape.rows, shape.rank, kind.factor)))
                for shape in of_shapes
                for kind in KINDS.values()
                for of in kernel.tiles
            }
            for of_shapes in (aligned, shapes(kernel, REAL.gate))
        )
        assert used == all_of, kernel.name


def test_every_kernel_of_the_package_is_in_the_gate():
    from _gpu_kernels import KERNELS

    modules = {path.stem for path in (ROOT / "adapterzoo" / "kernels").glob("*_triton.py")}
    used = {of.__module__.rpartition(".")[2] for kernel in KERNELS for of in kernel.tiles}
    # those whose tiles are asked for by a rank of their own
    names = {
        "grouped low rank": "grouped_triton",
        "cayley_fold": "cayley_fold_triton",
        "rotate": "butterfly_triton",
    }
    used |= {module for name, module in names.items() if name in kernel_names()}
    assert modules - {"tiles_triton"} <= used


@pytest.mark.sweep
def test_methods_name_all_kernels_that_they_use():
    """Each kernel's operators are found by running it; a method may use those of its kernels."""
    done = run("-c", USES, interpreted=True)
    assert done.returncode == 0, done.stderr[-2000:]
    missing = json.loads(done.stdout.splitlines()[-1])
    assert len(missing) == 5
    assert not any(missing.values()), missing


def test_what_there_is_no_time_for_is_listed():
    from _gpu_bench import DRY, Bench, Clock
    from _gpu_layers import layers
    from _gpu_report import Part

    device = torch.device("cpu")
    part = Part("layers", "")
    bench = Bench(device, Clock(device, 9), DRY, part, until=0.0)
    assert list(layers(bench)) == []
    assert len(part.skipped) == 6
    assert part.skipped[0] == "DoRA r=16, 20 × 32 → 48: no time left for it"


def test_a_report_shows_figures_and_whether_their_goals_are_met(tmp_path):
    from _gpu_report import Part, Report, Row, at_least, at_most
    from _measure import Ratio

    low, high = Ratio(1.154, 1.1, 1.2), Ratio(1.156, 1.1, 1.2)
    part = Part("layers", "Layers", "done", 3.0)
    part.rows += [
        Row("a", {"adapterzoo": low, "PEFT": "out of memory"}, {"adapterzoo": at_most(low, 1.15)}),
        Row("b", {"adapterzoo": high, "PEFT": 2.0}, {"adapterzoo": at_most(high, 1.15)}),
        Row("c", {"PEFT": None}, {"PEFT": at_least(None, 5.0)}),
    ]
    report = Report(tmp_path, "NVIDIA H100 80GB HBM3", False, [part])
    report.write()
    page = (tmp_path / "gpu-h100-80gb-hbm3.md").read_text(encoding="utf-8").splitlines()
    assert [line.rpartition(": ")[2] for line in page[-3:]] == ["met |", "missed |", "not judged |"]
    found = json.loads((tmp_path / "gpu-h100-80gb-hbm3.json").read_text(encoding="utf-8"))
    cell = {"median": 1.156, "low": 1.1, "high": 1.2}
    assert found["sections"][0]["rows"][1]["cells"] == {"adapterzoo": cell, "PEFT": 2.0}
    part.rows.append(Row("d", {"adapterzoo": float("nan")}))
    with pytest.raises(ValueError, match="a figure is nan"):
        report.write()


def test_calls_take_turns_and_failures_of_peers_are_cells():
    from _gpu_bench import Clock

    log: list[str] = []

    def broken():
        raise RuntimeError("no")

    def call(name):
        log.append(name)

    clock = Clock(torch.device("cpu"), 5)
    runs = {"floor": [lambda: call("A"), lambda: call("a")], "x": [lambda: call("B")]}
    times = clock.interleaved({**runs, "peer": [broken]}, float("inf"), failing=("peer",))
    # the set takes turns too, and so does the order
    assert "".join(log).startswith("AaABB" + "AB" + "Ba" + "AB")
    assert times.over_floor("peer") == "fails: RuntimeError"
    assert times.over_floor("none") is None
    assert len(times.milliseconds["floor"]) == 5
    log.clear()
    clock.interleaved(runs, float("inf"), together=3)
    # warm, warm, then three calls between two events, one set after the other
    assert "".join(log).startswith("AaABB" + "AaA" + "BBB" + "BBB" + "aAa")
    late = clock.interleaved(runs, 0.0)
    assert len(late.milliseconds["x"]) == 3
    with pytest.raises(RuntimeError, match="no"):
        clock.interleaved({"floor": [broken]}, float("inf"))


def test_seconds_that_are_not_used_go_to_later_sections():
    import _gpu_run

    until = _gpu_run.until

    # as planned, sooner, and late: nothing is longer than the run
    assert until(10.0, 100.0, own=20.0, later=70.0) == 30.0
    assert until(5.0, 100.0, own=20.0, later=40.0) == 60.0
    assert until(95.0, 100.0, own=20.0, later=70.0) == 100.0
    assert sum(section.seconds for section in _gpu_run.SECTIONS if not section.asked) <= 465.0
    first = [section for section in _gpu_run.FIRST if not section.second]
    second = [section for section in _gpu_run.FIRST if section.second]
    assert sum(section.seconds for section in first) <= 440.0
    # what is wrong is looked at, or what is right is measured
    red, green = second[:2], second[2:]
    assert sum(section.seconds for section in red) <= 200.0
    assert sum(section.seconds for section in green) <= 200.0


def test_other_settings_reach_every_tile_and_launch_and_are_taken_back():
    from _gpu_closer import settings
    from _gpu_kernels import KERNELS
    from adapterzoo.kernels import butterfly_triton, tiles_triton

    def found():
        tiles = [of(8192, 16, torch.bfloat16) for kernel in KERNELS for of in kernel.tiles]
        programs = tiles_triton._PROGRAMS, butterfly_triton._PROGRAMS
        return [tile.pipelined for tile in tiles], programs, tiles_triton.parted.__defaults__

    before = found()
    with settings(7, 5):
        tiles, programs, defaults = found()
    assert {tile["STAGES"] for tile in tiles} == {tile["num_stages"] for tile in tiles} == {5}
    assert (*programs, *defaults) == (7, 7, 7)
    assert found() == before
    assert before != (tiles, programs, defaults)


def test_the_verdict_is_what_the_figures_say():
    from _gpu_gate import faster, judged
    from _gpu_report import Part, Row

    def row(name, rank, **times):
        facts = {"kernel": name, "passes": 1, "rank": rank, "milliseconds": times}
        return Row(f"{name} {rank}", {}, {}, facts)

    sweep, kernels = Part("sweep", ""), Part("kernels", "")
    times = {"kernel": [1.0, 1.0, 1.1], "cuBLAS": [2.0, 2.0, 2.0], "reference": [4.0, 4.0, 4.0]}
    sweep.rows.append(row("expand", 16, **times))
    # the first section wins, and the best of torch counts
    kernels.rows += [row("expand", 16, **{**times, "cuBLAS": [0.1] * 3})]
    kernels.rows += [row("expand", 64, **{**times, "reference": [0.5] * 3}), row("x", 16)]
    assert faster([sweep, kernels], "expand", 1) == {16: 2.0, 64: 0.5}
    assert faster([sweep, kernels], "expand", 2) == faster([sweep], "rotate", 1) == {}
    assert judged([2.0, 1.02], wrong=False, checked=True) == "keep"
    assert judged([2.0, 0.5], wrong=False, checked=True) == "keep in part"
    assert judged([1.01, 0.5], wrong=False, checked=True) == "torch is faster"
    assert judged([2.0], wrong=True, checked=True) == "wrong"
    assert judged([], wrong=False, checked=True) == "not measured"
    assert judged([2.0], wrong=False, checked=False) == "not measured"


def test_a_run_is_continued_by_the_same_code_on_the_same_device(tmp_path):
    from _gpu_report import Part, Report, Row, at_most
    from _measure import Ratio

    def report(commit):
        made = Report(tmp_path, "NVIDIA H200", False, [Part("gate", ""), Part("layers", "")])
        made.about["commit"] = commit
        return made

    first, value = report("1a2b"), Ratio(1.2, 1.1, 1.3)
    assert first.resume() == ""
    row = Row("a", {"x": value, "y": 2.0, "z": None}, {"x": at_most(value, 1.15)}, {"rank": 16})
    first.parts[0].state, first.parts[1].state = "done", "running"
    first.parts[1].rows.append(row)
    first.parts[0].skipped, first.parts[1].skipped = ["no tool"], ["b: no time left for it"]
    first.write()
    again = report("1a2b")
    assert again.resume() == ""
    assert [part.state for part in again.parts] == ["done", "running"]
    assert [part.skipped for part in again.parts] == [["no tool"], []]
    assert again.parts[1].rows == [row]
    assert report("3c4d").resume() == "commit was '1a2b' and is '3c4d'"
