"""The sections of the GPU benchmark: in order, within their time, written when known.

Every section runs in a process of its own, and the gate has one for each kernel and kind of
operands: an illegal access ends one process, and a device that hangs costs one section its time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import shutil
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  forked processes have it then

from _gpu_bench import DRY, NO_TIME, REAL, Bench, Clock
from _gpu_closer import backwards, decode, sanitized, sites, small_checks, sweep
from _gpu_gate import checked, figure_of, red, verdicts, wrong_kernels
from _gpu_kernels import KERNELS
from _gpu_layers import alone, bottlenecks, ceilings, layers, rivals
from _gpu_models import graphs, headline, mixed, steps, together
from _gpu_report import Part, Report, Row
from _gpu_reports import REPORTS, asked, row_of

ROOT = Path(__file__).resolve().parents[1]
# how many processes check kernels at a time; the first case of each takes 3 GB of a GPU
_TOGETHER = 16
# seconds in which a process says what device it has
_START = 60.0


@dataclass(frozen=True)
class Section:
    """One section.

    Attributes:
        name: for `--section`.
        title: for people.
        seconds: that it needs; it may take more if others before it took less.
        run: gives its rows one by one, and looks at the time between them.
        jobs: instead, the work of several processes.
        lost: the row of a job that did not come to its end: of its name, and why.
        asked: whether it runs only if it is named.
        second: whether it waits for the second call of the first run.
    """

    name: str
    title: str
    seconds: float
    run: Callable[[Bench], Iterator[Row]] | None = None
    jobs: Callable[[Bench], list[Job]] | None = None
    lost: Callable[[str, str], Row] | None = None
    asked: bool = False
    second: bool = False

    def work(self, bench: Bench) -> list[Job]:
        """What its processes do."""
        if self.jobs is not None:
            return self.jobs(bench)
        return [Job(self.name, partial(_rows, self, bench))]


def _rows(section: Section, bench: Bench) -> Iterator[Row | list[str]]:
    """The rows of a section, then what it skipped."""
    warnings.filterwarnings("ignore", module="peft")
    if section.run is not None:
        yield from section.run(bench)
    yield bench.part.skipped


def gate(bench: Bench) -> list[Job]:
    """Check each kernel that has no verdict yet, on each kind of operands."""
    return [
        Job(figure, partial(checked, kernel.name, title, bench.plan.gate, bench.device))
        for kernel in KERNELS
        for title in bench.plan.gate.kinds
        if not bench.has(figure := figure_of(kernel.name, title))
    ]


def reports(bench: Bench) -> list[Job]:
    """Ask each report of users that has no answer yet."""
    return [Job(name, partial(asked, bench, name)) for name in REPORTS if not bench.has(name)]


def recheck(bench: Bench) -> list[Job]:
    """Check what is wrong again, compiled by the assembler of the toolkit instead of Triton's."""
    wrong = [row.figure for row in bench.part_of("gate").rows if not row.is_right]
    return [
        replace(job, run=partial(_assembled_by_toolkit, job.run))
        for job in gate(replace(bench, part=Part("", "")))
        if job.name in wrong and not bench.has(job.name)
    ]


def _assembled_by_toolkit(check: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    tool = shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
    if not Path(tool).exists():
        raise FileNotFoundError("the toolkit's ptxas is not installed")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_PTXAS_PATH": tool, "TRITON_CACHE_DIR": folder}
        yield from check()


def suspects(bench: Bench) -> Iterator[Row]:
    """Run the memory and race checker if a kernel is wrong."""
    if bench.wrong or bench.is_dry:
        yield from sanitized(bench)


CEILINGS = Section("ceilings", "What the device can do", 10, ceilings)
LAYERS = "Layers: forward and backward over the frozen layer's"
MODELS = "Training steps over the frozen model's"
GRAPHS = Section("graphs", "CUDA graphs give the bits of eager calls", 15, graphs)
ALONE = Section("kernels", "Kernels alone, bfloat16", 50, alone)
MIXED = Section("mixed", "Mixed batches over one adapter", 25, mixed)
GATE = Section("gate", "Kernels against float64", 110, jobs=gate, lost=red)
VERDICTS = Section("verdicts", "Verdict on each kernel", 5, verdicts)
# in the order in which they run: a run that is stopped has the headline
SECTIONS = [
    CEILINGS,
    GATE,
    Section("models", MODELS, 150, steps),
    Section("layers", LAYERS, 80, layers),
    ALONE,
    GRAPHS,
    Section("bottlenecks", "Bottlenecks over the frozen feed-forward part", 15, bottlenecks),
    MIXED,
    Section("small", "What a compiler does differently", 45, small_checks, asked=True),
    Section("sanitizer", "Memory and race checker", 150, sanitized, asked=True),
    Section("sweep", "Kernels against cuBLAS, and at other settings", 260, sweep, asked=True),
    Section("backwards", "What a backward launches", 60, backwards, asked=True),
    Section("sites", "One layer: launches and device time", 90, sites, asked=True),
    Section("decode", "A layer for few rows", 90, decode, asked=True),
    VERDICTS,
]
_REPORTS = Section(
    "reports", "What users reported", 60, jobs=reports, lost=partial(row_of, good=False)
)
# the first fifteen minutes on a GPU: a call of 440 seconds, then one of 200
FIRST = [
    replace(GATE, seconds=150),
    _REPORTS,
    CEILINGS,
    Section("models", MODELS, 110, headline),
    Section("layers", LAYERS, 70, rivals),
    GRAPHS,
    Section(
        "recheck", "Wrong kernels, by the toolkit's ptxas", 70, jobs=recheck, lost=red, second=True
    ),
    Section("sanitizer", "Memory and race checker", 60, suspects, second=True),
    replace(ALONE, seconds=60, second=True),
    replace(MIXED, second=True),
    Section("together", "N adapters in one step over N steps", 30, together, second=True),
    VERDICTS,
]
# nothing else can be judged without them, and the last follows from the others
ALWAYS = ("ceilings", "gate", "verdicts")
# of a whole run, and of the calls of the first run
_SECONDS, _FIRST_SECONDS, _SECOND_SECONDS = 465.0, 440.0, 200.0


def main(options: argparse.Namespace) -> int:
    """Run the sections.

    Args:
        options: `output`, `seconds`, `rounds`, `section`, `first`, `resume` and `dry_run`, as in
            `gpu.py`.

    Returns:
        0; 1 if something is wrong or a section failed; 2 if the options do not fit.
    """
    started = time.monotonic()
    sections = FIRST if options.first else SECTIONS
    names = [section.name for section in sections]
    if unknown := [name for name in options.section or () if name not in names]:
        print(f"--section {' '.join(unknown)}: there is no such section. Legal: {', '.join(names)}")
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda:0")
    context, about = _device(device, options.rounds)
    parts = [Part(section.name, section.title) for section in sections]
    suffix = "-first" if options.first else ""
    report = Report(options.output, about.pop("name"), options.dry_run, parts, suffix)
    report.about |= about
    if options.resume and (why := report.resume()):
        print(f"--continue: {why}. Leave it out to start anew.")
        return 2
    plan, rounds = (DRY, 2) if options.dry_run else (REAL, options.rounds)
    bench = Bench(device, Clock(device, rounds), plan, parts[0], parts=parts)
    bench.wrong = wrong_kernels(bench.part_of("gate").rows, plan.gate)
    usual = (_SECOND_SECONDS if options.resume else _FIRST_SECONDS) if options.first else _SECONDS
    end = started + (options.seconds or usual)
    todo = [s for s in sections if _is_due(s, bench.part_of(s.name), options)]
    for number, section in enumerate(todo):
        bench.part = part = bench.part_of(section.name)
        begun = time.monotonic()
        if begun >= end and section.name != "verdicts":
            _skip(part, NO_TIME)
            continue
        # what earlier sections left is for this one; what later ones need is theirs
        later = sum(each.seconds for each in todo[number + 1 :])
        # what takes a millisecond on a GPU takes a second in the interpreter
        bench.until = end if options.dry_run else until(begun, end, section.seconds, later)
        _run(section, bench, report, context)
        if section.name == "gate":
            bench.wrong = wrong_kernels(part.rows, plan.gate)
        if section.name == "ceilings" and part.state == "done":
            bench.bandwidth, bench.rate = (row.facts["rate"] for row in part.rows)
        took = f"{part.state}, {time.monotonic() - begun:.0f} s"
        print(f"\n{section.title} ({took})\n\n{report.table(part)}", flush=True)
    for part in parts:
        if part.state == "waiting":
            _skip(part, "not asked for")
    report.write()
    print(f"\nwritten: {report.stem}.json, {report.stem}.md", flush=True)
    if left := [part.name for part in parts if part.state in ("cut", "skipped", "failed")]:
        print(f"not complete: {', '.join(left)}. To go on, add --continue to the options.")
    return int(any(part.state in ("red", "failed") for part in parts))


def _is_due(section: Section, part: Part, options: argparse.Namespace) -> bool:
    """Whether this call runs a section."""
    if part.state in ("done", "red") and section.name not in ("ceilings", "verdicts"):
        return False
    if options.section:
        return section.name in (*options.section, *ALWAYS)
    return not section.asked and (options.resume or not section.second)


def until(begun: float, end: float, own: float, later: float) -> float:
    """When a section has to stop: it gets what it needs, and what later sections leave.

    Args:
        begun: when it begins.
        end: of the run.
        own: seconds that it needs.
        later: seconds that the sections after it need.
    """
    return min(end, max(begun + own, end - later))


def _run(section: Section, bench: Bench, report: Report, context: BaseContext) -> None:
    """Run one section; each row is written when it is known."""
    part, begun, before = bench.part, time.monotonic(), bench.part.seconds
    part.state, part.trace, part.skipped = "running", "", []
    if section.name in ("ceilings", "verdicts"):
        # of this call alone
        part.rows.clear()
    jobs = section.work(bench)
    most = 1 if section.jobs is None else min(os.cpu_count() or 1, _TOGETHER)
    for job, found in run(jobs, bench.until, most, context):
        if isinstance(found, Ended) and found.why and section.lost and not found.late:
            found = section.lost(job.name, found.why.strip().splitlines()[-1])
        if isinstance(found, Row):
            part.rows.append(found)
            if section.jobs is not None:
                print(
                    f"{time.monotonic() - begun:6.1f} s  {found.figure}: {_shown(found)}",
                    flush=True,
                )
        elif isinstance(found, list):
            part.skipped += found
        elif found.late:
            part.skipped.append(f"{job.name}: {found.why}: {NO_TIME}")
        elif found.why:
            part.trace = found.why
        part.seconds = before + time.monotonic() - begun
        report.write()
    part.rows.sort(key=lambda row: _place(row, jobs))
    cut = any(reason.endswith(NO_TIME) for reason in part.skipped)
    is_red = section.lost is not None and not all(row.is_right for row in part.rows)
    part.state = "failed" if part.trace else "red" if is_red else "cut" if cut else "done"
    report.write()


def _place(row: Row, jobs: list[Job]) -> int:
    """Where a row stands: processes end in any order."""
    names = [job.name for job in jobs]
    return names.index(row.figure) if row.figure in names else -1


def _shown(row: Row) -> str:
    return "; ".join(str(cell) for cell in row.cells.values())[:300]


def _device(device: torch.device, rounds: int) -> tuple[BaseContext, dict[str, Any]]:
    """How processes are made that can use the device, and what is known of it.

    A forked process has all modules already, but cannot use a device whose driver something here
    has asked before.

    Raises:
        RuntimeError: no process can use it.
    """
    why = ""
    for method in ("fork", "spawn"):
        context: BaseContext = multiprocessing.get_context(method)
        job = Job("device", partial(_known, device, rounds))
        for _, found in run([job], time.monotonic() + _START, 1, context):
            if isinstance(found, dict):
                return context, found
            why = found.why
    raise RuntimeError(f"no process can use {device}: {why}")


def _known(device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    # a call that fails where a driver cannot be used
    torch.zeros(1, device=device).item()
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    yield {"name": name, **facts(device, rounds)}


def _skip(part: Part, why: str) -> None:
    # rows of an earlier run stay
    part.state = "cut" if part.rows else "skipped"
    part.skipped = [why]


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


# --- work in processes of its own ---


# after its end, a process may finish what it is measuring
_GRACE = 5.0


@dataclass(frozen=True)
class Job:
    """What a process does.

    Attributes:
        name: for messages.
        run: gives what it finds, piece by piece; everything can be pickled.
    """

    name: str
    run: Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class Ended:
    """The last piece of a job.

    Attributes:
        why: "" if it came to its end, else what stopped it.
        late: whether it was stopped because its time was over.
    """

    why: str = ""
    late: bool = False


def run(
    jobs: Sequence[Job], until: float, together: int, context: BaseContext
) -> Iterator[tuple[Job, Any]]:
    """Run jobs, each in a process of its own.

    Args:
        jobs: in the order in which they start.
        until: value of `time.monotonic` after which no job starts and those that run are stopped.
        together: how many run at a time.
        context: makes the processes.

    Yields:
        A job and a piece that it found, when it is known; the last piece of each is an `Ended`.
    """
    waiting, running = list(jobs), dict[Any, tuple[Job, Any]]()
    try:
        while waiting or running:
            now = time.monotonic()
            while waiting and len(running) < together and now < until:
                job = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process: Any = context.Process(target=_work, args=(job, sender))  # type: ignore[attr-defined]
                process.start()
                sender.close()
                running[receiver] = job, process
            if now >= until:
                yield from ((job, Ended("no time left for it", True)) for job in waiting)
                waiting.clear()
            left = until + _GRACE - now
            for pipe in _ready(
                list(running), max(min(left, until - now if waiting else left), 0.0)
            ):
                job, process = running[pipe]
                try:
                    found = pipe.recv()
                except EOFError:
                    process.join()
                    found = Ended(f"its process ended with code {process.exitcode}")
                if isinstance(found, Ended):
                    del running[pipe]
                    pipe.close()
                    process.join()
                yield job, found
            if left <= 0.0:
                yield from (
                    (job, Ended("stopped in its work", True)) for job, _ in running.values()
                )
                return
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _work(job: Job, pipe: Connection) -> None:
    try:
        for found in job.run():
            pipe.send(found)
        pipe.send(Ended())
    except Exception:  # noqa: BLE001  the parent reports any
        pipe.send(Ended(traceback.format_exc()))


def _ready(pipes: list[Any], seconds: float) -> list[Any]:
    """Those that have something to be read, as soon as one has."""
    return wait(pipes, seconds)
