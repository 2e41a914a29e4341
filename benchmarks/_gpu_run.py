"""The sections of the GPU benchmark: in order, within their time, written when known."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from _gpu_bench import DRY, NO_TIME, REAL, Bench
from _gpu_clock import Clock
from _gpu_first import backwards, decode, sanitized, sites, small_checks, sweep
from _gpu_gate import GateError, check
from _gpu_kernels import KERNELS
from _gpu_layers import alone, bottlenecks, ceilings, layers
from _gpu_models import graphs, mixed, steps
from _gpu_report import Part, Report, Row
from _gpu_verdict import verdicts
from _gpu_warm import ahead

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Section:
    """One section.

    Attributes:
        name: for `--section`.
        title: for people.
        seconds: that it needs; it may take more if others before it took less.
        run: gives its rows one by one, and looks at the time between them.
        trusts: whether its figures mean nothing if any kernel is wrong.
    """

    name: str
    title: str
    seconds: float
    run: Callable[[Bench], Iterator[Row]]
    trusts: bool = True


def gate(bench: Bench) -> Iterator[Row]:
    """Every kernel and configuration against float64.

    Raises:
        GateError: a kernel is wrong; all have been checked.
    """
    if failed := ahead(bench.is_dry):
        bench.part.skipped.append(f"compiling ahead: {failed} processes did not get through")
    known = {row.figure for row in bench.part.rows}
    missing = [kernel for kernel in KERNELS if kernel.name not in known]
    wrong: list[str] = []
    checks = check(missing, bench.plan.gate, bench.device, "triton")
    for kernel, run in zip(missing, checks, strict=True):
        try:
            passed = run()
            bench.clock.synchronize()
        except GateError as error:
            bench.wrong.add(kernel.name)
            wrong.append(str(error))
            continue
        # one that does not compile or run leaves the others their check
        except Exception as error:  # noqa: BLE001
            bench.wrong.add(kernel.name)
            wrong.append(f"{kernel.name} does not run: {type(error).__name__}: {error}")
            continue
        facts = {"tiles": list(passed.tiles), "worst": passed.worst[0], "at": passed.worst[1]}
        found = f"right in {passed.checks} comparisons, {len(passed.tiles)} configurations"
        yield Row(passed.kernel, {"against float64": found}, facts=facts)
    if wrong:
        raise GateError("\n".join(wrong))


CEILINGS = Section("ceilings", "What the device can do", 10, ceilings)
LAYERS = "Layers: forward and backward over the frozen layer's"
MODELS = "Training steps over the frozen model's"
GRAPHS = "CUDA graphs give the bits of eager calls"
# in the order in which they run: a run that is stopped has the headline
SECTIONS = [
    CEILINGS,
    Section("gate", "Kernels against float64", 110, gate),
    Section("models", MODELS, 150, steps),
    Section("layers", LAYERS, 80, layers),
    Section("kernels", "Kernels alone, bfloat16", 50, alone),
    Section("graphs", GRAPHS, 15, graphs),
    Section("bottlenecks", "Bottlenecks over the frozen feed-forward part", 15, bottlenecks),
    Section("mixed", "Mixed batches over one adapter", 25, mixed),
]
# thirty minutes in calls of ten: no section needs more than seven
FIRST = [
    CEILINGS,
    Section("gate", "Kernels against float64", 180, gate),
    Section("small", "What a compiler does differently", 45, small_checks, False),
    Section("sanitizer", "Memory and race checker", 150, sanitized, False),
    Section("sweep", "Kernels against cuBLAS, and at other settings", 260, sweep, False),
    Section("backwards", "What a backward launches", 60, backwards, False),
    Section("sites", "One layer: launches and device time", 90, sites),
    Section("graphs", GRAPHS, 45, graphs),
    Section("decode", "A layer for few rows", 90, decode),
    Section("layers", LAYERS, 300, layers),
    Section("models", MODELS, 420, steps),
    Section("verdicts", "Verdict on each kernel", 5, verdicts, False),
]
# nothing else can be judged without them, and the last follows from the others
ALWAYS = ("ceilings", "gate", "verdicts")
# of a whole run, and of one call of the first run
_SECONDS, _FIRST_SECONDS = 465.0, 540.0


def main(options: argparse.Namespace) -> int:
    """Run the sections.

    Args:
        options: `output`, `seconds`, `rounds`, `section`, `first`, `resume` and `dry_run`, as in
            `gpu.py`.

    Returns:
        0; 1 if a kernel is wrong or a section failed; 2 if the options do not fit.
    """
    started = time.monotonic()
    sections = FIRST if options.first else SECTIONS
    names = [section.name for section in sections]
    if unknown := [name for name in options.section or () if name not in names]:
        print(f"--section {' '.join(unknown)}: there is no such section. Legal: {', '.join(names)}")
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda:0")
    warnings.filterwarnings("ignore", module="peft")
    parts = [Part(section.name, section.title) for section in sections]
    name = "cpu" if options.dry_run else torch.cuda.get_device_name(device)
    suffix = "-first" if options.first else ""
    report = Report(options.output, name, options.dry_run, parts, suffix)
    report.about |= facts(device, options.rounds)
    if options.resume and (why := report.resume()):
        print(f"--continue: {why}. Leave it out to start anew.")
        return 2
    rounds = 2 if options.dry_run else options.rounds
    plan = DRY if options.dry_run else REAL
    bench = Bench(device, Clock(device, rounds), plan, parts[0], parts=parts)
    seconds = options.seconds or (_FIRST_SECONDS if options.first else _SECONDS)
    end = started + seconds
    todo = [
        (section, part)
        for section, part in zip(sections, parts, strict=True)
        if section.name in ALWAYS or not options.section or section.name in options.section
    ]
    ok = True
    for number, (section, part) in enumerate(todo):
        begun = time.monotonic()
        # figures of the device are not kept
        if part.state == "done" and section.name not in ("ceilings", "verdicts"):
            continue
        if section.trusts and bench.wrong:
            _skip(part, "the gate is red")
            continue
        if begun >= end and section.name not in ALWAYS:
            _skip(part, NO_TIME)
            continue
        # what earlier sections left is for this one; what later ones need is theirs
        later = sum(each.seconds for each, of in todo[number + 1 :] if of.state != "done")
        bench.part = part
        bench.until = until(begun, end, section.seconds, later)
        # what takes a millisecond on a GPU takes a second in the interpreter
        if options.dry_run:
            bench.until = end
        if section.name == "ceilings":
            part.rows.clear()
        _run(section, bench, report)
        ok = ok and part.state in ("done", "cut")
        if section.name == "gate" and part.state != "done" and not (options.first and bench.wrong):
            return _stopped(report, parts, part)
        if _passed(parts) or bench.wrong:
            report.write()
            for shown in parts[:2] if section.name == "gate" else [part]:
                print(f"\n{shown.title} ({shown.state})\n\n{report.table(shown)}", flush=True)
        _tidy(device)
    for part in parts:
        if part.state == "waiting":
            _skip(part, "not asked for")
    report.write()
    print(f"\nwritten: {report.stem}.json, {report.stem}.md", flush=True)
    if left := [part.name for part in parts if part.state in ("cut", "skipped", "failed")]:
        print(f"not complete: {', '.join(left)}. To go on, add --continue to the options.")
    return 0 if ok else 1


def until(begun: float, end: float, own: float, later: float) -> float:
    """When a section has to stop: it gets what it needs, and what later sections leave.

    Args:
        begun: when it begins.
        end: of the run.
        own: seconds that it needs.
        later: seconds that the sections after it need.
    """
    return min(end, max(begun + own, end - later))


def _run(section: Section, bench: Bench, report: Report) -> None:
    """Run one section; each row is written when it is known."""
    part, begun, before = bench.part, time.monotonic(), bench.part.seconds
    part.state, part.trace, part.skipped = "running", "", []
    try:
        for row in section.run(bench):
            part.rows.append(row)
            part.seconds = before + time.monotonic() - begun
            # what the gate has not seen yet is no figure
            if _passed(report.parts) or bench.wrong:
                report.write()
        cut = any(reason.endswith(NO_TIME) for reason in part.skipped)
        part.state = "cut" if cut else "done"
    except GateError as error:
        part.state, part.trace = "red", str(error)
    except Exception:  # noqa: BLE001  one section that fails leaves the others their time
        part.state, part.trace = "failed", traceback.format_exc()
    part.seconds = before + time.monotonic() - begun


def _passed(parts: list[Part]) -> bool:
    """Whether the gate is done."""
    return next(part for part in parts if part.name == "gate").state == "done"


def _skip(part: Part, why: str) -> None:
    # rows of an earlier run stay
    part.state = "cut" if part.rows else "skipped"
    part.skipped = [why]


def _stopped(report: Report, parts: list[Part], gate_part: Part) -> int:
    """No figure stays: neither the device's nor what the gate had passed before."""
    for part in parts:
        part.rows.clear()
        if part is not gate_part:
            part.state = "skipped"
            part.skipped = ["the gate is red"]
    report.write()
    print(
        f"the gate is {gate_part.state}, and there are no figures:\n{gate_part.trace}", flush=True
    )
    return 1


def facts(device: torch.device, rounds: int) -> dict[str, Any]:
    """Versions, and what the device says of itself."""
    packages = ("torch", "triton", "transformers", "peft")
    known: dict[str, Any] = {"date": date.today().isoformat(), "python": platform.python_version()}
    for package in packages:
        try:
            known[package] = version(package)
        except PackageNotFoundError:
            known[package] = "not installed: its columns stay empty"
    git = ("git", "-C", str(ROOT))
    commit = _output(*git, "rev-parse", "--short", "HEAD")
    code = ("--", "adapterzoo", "benchmarks/*.py")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", *code)
    known["commit"] = f"{commit} and changes" if changed else commit or "unknown"
    known["rounds"] = rounds
    if device.type != "cuda":
        return known
    properties = torch.cuda.get_device_properties(device)
    known["compute capability"] = f"{properties.major}.{properties.minor}"
    known["multiprocessors"] = properties.multi_processor_count
    known["memory"] = f"{properties.total_memory / 1e9:.1f} GB"
    known["cuda"] = str(torch.version.cuda)
    asked = "driver_version,power.limit,clocks.max.sm,clocks.sm,temperature.gpu"
    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"
    known[asked] = _output(
        "nvidia-smi", "-i", number, f"--query-gpu={asked}", "--format=csv,noheader"
    )
    return known


def _output(*command: str) -> str:
    """What a tool says; nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _tidy(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
