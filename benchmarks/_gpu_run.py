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
from typing import Any

import torch

from _gpu_bench import DRY, REAL, Bench
from _gpu_clock import Clock
from _gpu_gate import GateError, check
from _gpu_kernels import KERNELS
from _gpu_layers import alone, bottlenecks, ceilings, layers
from _gpu_models import graphs, mixed, steps
from _gpu_report import Part, Report, Row
from _gpu_warm import ahead


@dataclass(frozen=True)
class Section:
    """One section.

    Attributes:
        name: for `--only`.
        title: for people.
        seconds: that it may take; what it leaves goes to those after it.
        run: gives its rows one by one, and looks at the time between them.
    """

    name: str
    title: str
    seconds: float
    run: Callable[[Bench], Iterator[Row]]


def gate(bench: Bench) -> Iterator[Row]:
    """Every kernel and configuration against float64."""
    if failed := ahead(bench.plan is DRY):
        bench.part.skipped.append(f"compiling ahead: {failed} processes did not get through")
    for kernel in check(KERNELS, bench.plan.gate, bench.device, "triton"):
        passed = kernel()
        bench.clock.synchronize()
        facts = {"tiles": list(passed.tiles), "worst": passed.worst[0], "at": passed.worst[1]}
        found = f"right in {passed.checks} comparisons, {len(passed.tiles)} configurations"
        yield Row(passed.kernel, {"against float64": found}, facts=facts)


# the first two always run: nothing else can be judged without them
SECTIONS = [
    Section("ceilings", "What the device can do", 10, ceilings),
    Section("gate", "Kernels against float64", 110, gate),
    Section("kernels", "Kernels alone, bfloat16", 50, alone),
    Section("layers", "Layers: forward and backward over the frozen layer's", 120, layers),
    Section("bottlenecks", "Bottlenecks over the frozen feed-forward part", 15, bottlenecks),
    Section("models", "Training steps over the frozen model's", 120, steps),
    Section("mixed", "Mixed batches over one adapter", 25, mixed),
    Section("graphs", "CUDA graphs give the bits of eager calls", 15, graphs),
]
ALWAYS = ("ceilings", "gate")


def main(options: argparse.Namespace) -> int:
    """Run the sections.

    Args:
        options: `output`, `seconds`, `rounds`, `only` and `dry_run`, as in `gpu.py`.

    Returns:
        0; 1 where a kernel is wrong or a section failed.
    """
    started = time.monotonic()
    device = torch.device("cpu" if options.dry_run else "cuda:0")
    warnings.filterwarnings("ignore", module="peft")
    parts = [Part(section.name, section.title) for section in SECTIONS]
    name = "cpu" if options.dry_run else torch.cuda.get_device_name(device)
    report = Report(options.output, name, options.dry_run, parts)
    report.about |= facts(device, options.rounds)
    rounds = 2 if options.dry_run else options.rounds
    bench = Bench(
        device,
        Clock(device, rounds),
        DRY if options.dry_run else REAL,
        parts[0],
    )
    end = started + options.seconds
    ok = True
    for section, part in zip(SECTIONS, parts, strict=True):
        wanted = not options.only or section.name in (*ALWAYS, *options.only)
        late = time.monotonic() >= end and section.name not in ALWAYS
        if not wanted or late:
            part.state = "skipped"
            part.skipped.append("not asked for" if not wanted else "no time left for it")
            continue
        begun = time.monotonic()
        bench.part, bench.until = part, min(end, begun + section.seconds)
        # what takes a millisecond on a GPU takes a second in the interpreter
        if options.dry_run:
            bench.until = end
        part.state = "running"
        try:
            for row in section.run(bench):
                part.rows.append(row)
                part.seconds = time.monotonic() - begun
                # what the gate has not seen yet is no figure
                if parts[1].state == "done":
                    report.write()
            part.state = "done"
        except GateError as error:
            part.state, part.trace = "red", str(error)
        except Exception:  # noqa: BLE001  one section that fails leaves the others their time
            part.state, part.trace = "failed", traceback.format_exc()
        part.seconds = time.monotonic() - begun
        ok = ok and part.state == "done"
        if section.name == "gate" and part.state != "done":
            return _stopped(report, parts, part)
        if parts[1].state == "done":
            report.write()
            for shown in parts[:2] if section.name == "gate" else [part]:
                print(f"\n{shown.title} ({shown.state})\n\n{report.table(shown)}", flush=True)
        _tidy(device)
    report.write()
    print(f"\nwritten: {report.stem}.json, {report.stem}.md", flush=True)
    return 0 if ok else 1


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
    known["commit"] = _output("git", "rev-parse", "--short", "HEAD") or "unknown"
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
