"""A closer look at the kernels on a GPU: what a compiler does, and where the time goes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import _gpu_kernels
from _gpu_bench import SETS, Bench
from _gpu_gate import GateError, case
from _gpu_kernels import KERNELS, Kernel, Shape
from _gpu_layers import TARGET, model_of, runs_alone, steps_of, title_of, up_of
from _gpu_methods import Method, boft, low_rank, parameters_of
from _gpu_models import captured
from _gpu_report import DRY, Cell, Goal, Row
from adapterzoo import kernels
from adapterzoo.errors import KernelError
from adapterzoo.kernels import low_rank as low_rank_kernel
from adapterzoo.kernels import tiles_triton

HERE = Path(__file__).resolve().parent
# seconds for one tool over all kernels; it makes a process some fifty times slower
_WATCHED = 240.0


def small_checks(bench: Bench) -> Iterator[Row]:
    """What a compiler for the GPU does differently from the interpreter."""
    checks: list[tuple[str, Callable[[Bench], str]]] = [
        ("second derivative of a shrink with dropout", _twice),
        ("fake and real outputs of each operator at rank 80", _checked_operators),
        *((f"integers of 1: {kernel.name}", lambda b, k=kernel: _ones(b, k)) for kernel in KERNELS),
    ]
    for title, check in checks:
        if not bench.wants(title):
            continue
        try:
            found = check(bench)
        except Exception as error:  # noqa: BLE001  a check that fails is a finding
            found = f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
        good = not found.startswith("fails")
        yield Row(title, {"found": found}, {"found": Goal("does not fail", good)})


def _twice(bench: Bench) -> str:
    """The gradient of A of the gradient of x uses the mask of the forward."""
    torch.manual_seed(3)
    x, dy, v = (torch.randn(66, n, device=bench.device) for n in (128, 16, 128))
    a = torch.randn(16, 128, device=bench.device, requires_grad=True)
    x.requires_grad_()
    torch.manual_seed(4)
    with kernels.use("triton"):
        t = low_rank_kernel.shrink(x, a, _gpu_kernels.P, training=True)
        try:
            (dx,) = torch.autograd.grad(t, x, dy, create_graph=True)
            (found,) = torch.autograd.grad(dx, a, v)
        except KernelError as error:
            return f"refused: {str(error)[:100]}"
    torch.manual_seed(4)
    mask = _gpu_kernels._mask(x.detach())
    truth = dy.double().T @ (mask * v)  # [16, 128]
    off = ((found.double() - truth).norm() / truth.norm()).item()
    return "right" if off < 1e-4 else f"fails: off by {off:.2g}"


def _checked_operators(bench: Bench) -> str:
    ops: Any = torch.ops.adapterzoo
    rows, width, rank = 40, 96, 80

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, device=bench.device, requires_grad=True)

    values = {
        "x": drawn(2, rows, width),
        "y": drawn(2, rows, width),
        "t": drawn(2, rows, rank),
        "a": drawn(rank, width),
        "b": drawn(width, rank),
        "gain": drawn(width),
        "blocks": drawn(6, 16, 16),
        "p": 0.0,
        "scaling": 0.5,
        "tells": False,
    }
    chosen = [ops.low_rank_shrink, ops.low_rank_expand, ops.compose, ops.rotate]
    with kernels.use("triton"):
        for op in (each.default for each in chosen):
            # what has no value here is optional
            args = tuple(values.get(argument.name) for argument in op._schema.arguments)
            torch.library.opcheck(op, args)
    return f"agree for {len(chosen)} operators"


def _ones(bench: Bench, kernel: Kernel) -> str:
    shapes = [Shape(1, 1, 1, 1), Shape(1, 16, 16, 16)]
    for shape in shapes:
        # the factors are float32, because a sum of one number may cancel
        kind = "bfloat16, float32 factors"
        try:
            case(kernel, shape, kind, 0, bench.device, "triton")
        except GateError as error:
            # one number has no norm of others to be compared with
            if "differs between" in str(error) or shape.d_in > 1 or "nan" in str(error):
                raise
    return f"compiles and computes at {len(shapes)} shapes"


def sanitized(bench: Bench) -> Iterator[Row]:
    """One aligned shape of each kernel, forward and backward, under the memory and race checker."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for check in ("memcheck", "racecheck"):
        title = f"compute-sanitizer, {check}"
        if not bench.wants(title):
            continue
        script = [sys.executable, str(HERE / "_gpu_once.py")]
        if bench.is_dry:
            command = [*script, "dry"]
        elif Path(tool).exists():
            command = [tool, "--tool", check, "--error-exitcode", "9", *script]
        else:
            yield Row(title, {"found": "compute-sanitizer is not installed"})
            continue
        left = min(_WATCHED, max(bench.until - time.monotonic(), 30.0))
        code, output = _watched(command, left)
        if code is None:
            yield Row(title, {"found": f"not finished in {left:.0f} s"})
            continue
        lines = [line for line in output.splitlines() if "ERROR SUMMARY" in line]
        found = "the script ran" if code == 0 else "the script failed"
        if lines and code in (0, 9):
            found = lines[-1].lstrip("= ")
        goals = {"found": Goal("no error", code == 0)}
        yield Row(title, {"found": found}, goals, {"output": output[-4000:]})


def _watched(command: list[str], seconds: float) -> tuple[int | None, str]:
    """The exit code of a command and what it prints; None: it was stopped."""
    # a session of its own, because the tool starts a process that it watches
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


def sweep(bench: Bench) -> Iterator[Row]:
    """Each kernel against cuBLAS, as it is and at other numbers of programs and stages."""
    for kernel in KERNELS:
        ranks = [r for r in bench.plan.sweep_ranks if r <= max(*kernel.ranks, *kernel.timed)]
        for rank in ranks if len(kernel.aligned) > 1 else kernel.timed:
            width = bench.plan.kernel_width
            rows = width if kernel.name.startswith("row_norm") else bench.plan.kernel_rows
            if kernel.name == "rotate" and width % rank:
                continue
            shape = Shape(rows, width, width, rank)
            for passes in (1, 2) if kernel.grads else (1,):
                figure = title_of(kernel, shape, passes)
                if bench.wants(figure, (kernel.name,)):
                    yield _swept(bench, kernel, shape, passes, figure)


def _swept(bench: Bench, kernel: Kernel, shape: Shape, passes: int, figure: str) -> Row:
    runs, moved = runs_alone(bench, kernel, shape, passes, "triton")
    clock = bench.clock
    failing = ("cuBLAS", "reference")
    times = clock.interleaved(runs, bench.until, failing=failing, together=bench.plan.together)
    tried: dict[str, float] = {}
    for stages in bench.plan.stages:
        for programs in bench.plan.programs:
            if time.monotonic() > bench.until:
                break
            name = f"{programs} programs, {stages} stages"
            with settings(programs, stages):
                try:
                    of = clock.interleaved(
                        {name: runs["kernel"]}, 0.0, failing=(name,), together=bench.plan.together
                    )
                # a tile that does not fit has no time
                except Exception as error:  # noqa: BLE001
                    bench.part.skipped.append(f"{figure}, {name}: {type(error).__name__}")
                    continue
            if name in of.milliseconds:
                tried[name] = of.median(name)
    taken = times.median("kernel")
    cells: dict[str, Cell] = {
        "µs": 1e3 * taken,
        "of the copy": moved / taken / bench.bandwidth,
        "times faster than cuBLAS": times.over("cuBLAS", "kernel"),
    }
    if tried:
        best = min(tried, key=lambda name: tried[name])
        cells["best setting"] = DRY if bench.is_dry else best
        cells["times faster at it"] = taken / tried[best]
    facts = {"kernel": kernel.name, "passes": passes, "rank": shape.rank}
    return Row(figure, cells, {}, {**facts, "milliseconds": times.milliseconds, "settings": tried})


@contextlib.contextmanager
def settings(programs: int, stages: int) -> Iterator[None]:
    """Let all tiles have other stages, and all launches other numbers of programs."""
    changed: list[tuple[Any, str, Any]] = []

    def put(place: Any, name: str, value: Any) -> None:
        changed.append((place, name, getattr(place, name)))
        setattr(place, name, value)

    try:
        for name, module in list(sys.modules.items()):
            if name.startswith("adapterzoo.kernels.") and hasattr(module, "_PROGRAMS"):
                put(module, "_PROGRAMS", programs)
        # a default was read when the function was defined
        if tiles_triton.parted.__defaults__:
            put(tiles_triton.parted, "__defaults__", (programs,))
        put(tiles_triton.Tile, "stages", property(lambda tile: stages))
        yield
    finally:
        for place, name, value in reversed(changed):
            setattr(place, name, value)


def backwards(bench: Bench) -> Iterator[Row]:
    """What a backward launches, and which launch takes most of its time."""
    for kernel in KERNELS:
        if not kernel.grads:
            continue
        width = bench.plan.kernel_width
        shape = Shape(bench.plan.kernel_rows, width, width, kernel.timed[0])
        figure = title_of(kernel, shape, 2)
        if bench.wants(figure, (kernel.name,)):
            run = runs_alone(bench, kernel, shape, 2, "triton")[0]["kernel"][0]
            yield _profiled(bench, figure, run)


def _profiled(bench: Bench, figure: str, run: Callable[[], object]) -> Row:
    """Launches of a call, their time on the device, and those that take most of it."""
    events = launches(run, bench.device)
    if not events:
        return Row(figure, {"most time, 1": "the profiler saw no launch"})
    total = sum(micros for _, _, micros in events)
    cells: dict[str, Cell] = {"launches": float(sum(n for _, n, _ in events)), "device µs": total}
    for i, (name, count, micros) in enumerate(events[:3]):
        share = micros / max(total, 1e-9)
        shown = f"{count} × {name[:48]}: {share:.0%}"
        cells[f"most time, {i + 1}"] = DRY if bench.is_dry else shown
    return Row(figure, cells, {}, {"events": events})


def launches(run: Callable[[], object], device: torch.device) -> list[tuple[str, int, float]]:
    """Name, number and microseconds of what a call runs, the longest first."""
    for _ in range(3):
        run()
    activities = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with profile(activities=activities) as found:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    which = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [
        (event.key, event.count, float(getattr(event, which))) for event in found.key_averages()
    ]
    return sorted((e for e in events if e[2] > 0), key=lambda event: -event[2])


def _site_methods() -> list[Method]:
    return [boft(8, 2), low_rank(16, 0.0, True), low_rank(16, 0.0, False)]


def sites(bench: Bench) -> Iterator[Row]:
    """One layer, forward and backward: launches and device time, without and with an adapter."""
    d_in, d_out = bench.plan.layers[0]
    rows = bench.plan.layer_rows[-1]
    base = None
    for method in (None, *_site_methods()):
        figure = f"{method.title if method else 'the layer alone'}, {rows} × {d_in} → {d_out}"
        if not bench.wants(figure, method.kernels if method else ()):
            continue
        base = model_of(bench, d_in, d_out) if base is None else base
        model = base if method is None else method.put(base, TARGET)
        x = torch.randn(rows, d_in, device=bench.device).bfloat16().requires_grad_()
        dy = torch.randn(rows, d_out, device=bench.device).bfloat16()
        trained = [] if method is None else parameters_of(model)
        with kernels.use("auto"):
            yield _profiled(bench, figure, steps_of(up_of(model), trained, [x], dy)[0])


def decode(bench: Bench) -> Iterator[Row]:
    """A layer in evaluation for few rows: time on the host, and captured time on the device."""
    d_in, d_out = bench.plan.layers[0]
    base = None
    for rows in bench.plan.few:
        for method in _site_methods():
            figure = f"{method.title}, {rows} × 1 tokens, {d_in} → {d_out}"
            if bench.wants(figure, method.kernels):
                base = model_of(bench, d_in, d_out) if base is None else base
                yield _decoded(bench, base, method, rows, figure)


@torch.no_grad()
def _decoded(bench: Bench, base: Any, method: Method, rows: int, figure: str) -> Row:
    plain, own = up_of(base), up_of(method.put(base, TARGET).eval())
    inputs = [
        torch.randn(rows, 1, plain.in_features, device=bench.device).bfloat16() for _ in range(SETS)
    ]
    repeats, cells, host = bench.plan.repeats, dict[str, Cell](), {}
    with kernels.use("auto"):
        for name, module in {"the layer": plain, "adapterzoo": own}.items():
            host[name] = _host(lambda m=module: m(inputs[0]), repeats, bench)  # type: ignore[misc]
        runs = {
            name: [lambda m=module, x=x: m(x) for x in inputs]
            for name, module in {"the layer": plain, "adapterzoo": own}.items()
        }
        eager = bench.clock.interleaved(
            runs, bench.until, ahead=False, together=bench.plan.together
        )
        cells["host µs"], cells["host µs, the layer"] = host["adapterzoo"], host["the layer"]
        cells["over the layer, eager"] = eager.over("adapterzoo", "the layer")
        try:
            replays = {
                name: [captured(lambda m=module: m(inputs[0]), bench.device)[0]]  # type: ignore[misc]
                for name, module in {"the layer": plain, "adapterzoo": own}.items()
            }
            times = bench.clock.interleaved(replays, bench.until, together=bench.plan.together)
            cells["over the layer, captured"] = times.over("adapterzoo", "the layer")
        except RuntimeError as error:
            cells["over the layer, captured"] = f"fails: {str(error).splitlines()[0][:100]}"
    return Row(figure, cells, {}, {"milliseconds": eager.milliseconds})


def _host(run: Callable[[], object], repeats: int, bench: Bench) -> float:
    """Microseconds that the host takes for a call, while the device is kept busy elsewhere."""
    found = []
    for _ in range(5):
        bench.clock.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        found.append(1e6 * (time.perf_counter() - start) / repeats)
    bench.clock.synchronize()
    return sorted(found)[len(found) // 2]
