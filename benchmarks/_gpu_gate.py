"""The gate: every kernel at every configuration against float64; a wrong one has no figures.

Fresh operands each time; what a kernel leaves unwritten is NaN; each kernel runs twice on the
same operands, because a result that moves is a race; and the gate itself is seen to fail first.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from _gpu_kernels import KERNELS, KINDS, Kernel, Shape
from _gpu_report import DRY, Goal, Part, Row
from _measure import ratio
from adapterzoo import kernels

if TYPE_CHECKING:
    from _gpu_bench import Bench

AGAINST = "against float64"
RIGHT = Goal("right", True)
# times the limit of the norm: what one element may be off by, over the largest
_WORST = 4.0


class GateError(Exception):
    """A kernel computes something else than its definition."""


@dataclass(frozen=True)
class Sizes:
    """What the gate draws.

    Attributes:
        few: rows of a decoding step.
        many: rows of a batch.
        d_in: odd, so that no tile fits.
        d_out: likewise.
        draws: fresh sets of operands for each case.
        aligned: rows, d_in and d_out like those of models: Triton compiles other machine code if
            features and ranks are multiples of 16.
        large: rows and width of one case of each kernel, with the first of its timed ranks.
        kinds: keys of `KINDS`.
        ranks: how many of a kernel's ranks.
        aligned_ranks: how many of a kernel's aligned ranks.
        tallest: rows that no case may have more of.
    """

    few: int
    many: int
    d_in: int
    d_out: int
    draws: int
    aligned: tuple[int, int, int]
    large: tuple[int, int]
    kinds: tuple[str, ...] = tuple(KINDS)
    ranks: int = 99
    aligned_ranks: int = 99
    tallest: int = 1 << 20


def shapes(kernel: Kernel, sizes: Sizes) -> Iterator[Shape]:
    """Those at which the kernel takes each of its configurations, and those of models."""
    tall = [sizes.few, min(max(sizes.many, kernel.few + 3), sizes.tallest)]
    for rows, rank in itertools.product(tall, kernel.ranks[: sizes.ranks]):
        yield Shape(rows, sizes.d_in, sizes.d_out, rank)
    many, d_in, d_out = sizes.aligned
    tall = [sizes.few, min(max(many, kernel.few + 3), sizes.tallest)]
    for rows, rank in itertools.product(tall, kernel.aligned[: sizes.aligned_ranks]):
        yield Shape(rows, d_in, d_out, rank)
    rows, width = sizes.large
    yield Shape(rows, width, width, kernel.timed[0])


def tiles(kernel: Kernel, sizes: Sizes) -> set[str]:
    """The configurations that these shapes take."""
    return {
        str(tuple(of(shape.rows, shape.rank, KINDS[kind].factor)))
        for shape in shapes(kernel, sizes)
        for kind in sizes.kinds
        for of in kernel.tiles
    }


def checked(name: str, title: str, sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Check a kernel on operands of one kind, at each of its configurations.

    Args:
        name: of the kernel.
        title: of the kind.
        sizes: of the operands.
        device: of the operands.

    Yields:
        One row: what is wrong, or how much was compared.
    """
    _self_test(device)
    kernel = next(each for each in KERNELS if each.name == name)
    worst, checks, wrong = (0.0, ""), 0, list[str]()
    for shape, seed in itertools.product(shapes(kernel, sizes), range(sizes.draws)):
        try:
            found = case(kernel, shape, title, seed, device, "triton")
        except GateError as error:
            wrong.append(str(error))
            continue
        checks += len(found)
        worst = max(worst, *found)
    figure = figure_of(name, title)
    if wrong:
        yield red(figure, f"{wrong[0]} ({len(wrong)} cases are wrong)", {"wrong": wrong[:20]})
        return
    facts = {"tiles": sorted(tiles(kernel, sizes)), "worst": worst[0], "at": worst[1]}
    yield Row(figure, {AGAINST: f"right in {checks} comparisons"}, {AGAINST: RIGHT}, facts)


def figure_of(name: str, title: str) -> str:
    """The row of a kernel and a kind."""
    return f"{name}, {title}"


def red(figure: str, why: str, facts: Mapping[str, Any] | None = None) -> Row:
    """The row of what is wrong, crashes or was not finished."""
    return Row(figure, {AGAINST: f"WRONG: {why}"}, {AGAINST: Goal("right", False)}, facts or {})


def wrong_kernels(rows: Iterable[Row], sizes: Sizes) -> set[str]:
    """Kernels that are not right on all kinds of operands; those that were not checked too."""
    right = {row.figure for row in rows if row.is_right}
    return {
        kernel.name
        for kernel in KERNELS
        if any(figure_of(kernel.name, title) not in right for title in sizes.kinds)
    }


def case(
    kernel: Kernel, shape: Shape, title: str, seed: int, device: torch.device, mode: str
) -> list[tuple[float, str]]:
    """Check one shape and kind; the part of its limit that each result's error reached.

    Raises:
        GateError: an error is above its limit, or two runs differ.
    """
    kind = KINDS[title]
    where = f"{kernel.name}, {title}, {shape}, draw {seed}"
    torch.manual_seed(1000 + seed)
    operands = kernel.draw(shape, kind, device)
    with kernels.use(mode):
        once, again = (_poisoned(kernel, operands, seed) for _ in range(2))
    for name, got in once.items():
        if not torch.equal(got, again[name]):
            raise GateError(f"{where}: {name} differs between two runs on the same operands")
    truth = _truth(kernel, operands, seed)
    parts = []
    for name, got in once.items():
        part = _error(got, truth[name], kernel.limit or kernel.roundings * kind.limit)
        # NaN fails too
        if not part <= 1.0:
            raise GateError(f"{where}: {name} is off by {part:.3g} times its limit")
        parts.append((part, f"{where}: {name}"))
    return parts


def _poisoned(kernel: Kernel, operands: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The result and its gradients, in memory that was NaN before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _results(kernel.run, kernel, operands, seed)
    finally:
        torch.use_deterministic_algorithms(False)


def _truth(kernel: Kernel, operands: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    wide = {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad)
        for name, tensor in operands.items()
    }
    return _results(kernel.truth, kernel, wide, seed)


def _results(
    run: Callable[[dict[str, Tensor]], Tensor],
    kernel: Kernel,
    operands: dict[str, Tensor],
    seed: int,
) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    out = run(operands)
    found = {"out": out.detach()}
    if kernel.grads:
        source = torch.Generator(out.device).manual_seed(seed + 7)
        dy = torch.randn(out.shape, generator=source, device=out.device, dtype=torch.float32)
        # numbers that every dtype holds, so that the truth gets the same
        dy = dy.to(torch.bfloat16).to(out.dtype)
        inputs = [operands[name] for name in kernel.grads]
        grads = torch.autograd.grad(out, inputs, dy)
        found |= {f"d{name}": g for name, g in zip(kernel.grads, grads, strict=True)}
    return found


def _error(got: Tensor, truth: Tensor, limit: float) -> float:
    """By the norm of the whole and by the worst element, over what each may be."""
    if got.shape != truth.shape:
        return float("inf")
    difference = got.double() - truth
    whole = (difference.norm() / truth.norm().clamp_min(1e-30)).item()
    worst = (difference.abs().max() / truth.abs().max().clamp_min(1e-30)).item()
    # max() would drop a NaN that comes second
    parts = torch.tensor([whole / limit, worst / (_WORST * limit)], dtype=torch.float64)
    return parts.max().item()


def _self_test(device: torch.device) -> None:
    """Memory is poisoned, and errors of each kind are seen.

    Raises:
        GateError: the gate would let something through.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        clean = torch.empty(7, device=device)
    finally:
        torch.use_deterministic_algorithms(False)
    good = torch.randn(64, 64, device=device, dtype=torch.float64)
    unwritten, wrong = good.clone(), good.clone()
    unwritten[3, 5] = float("nan")
    wrong[60, 2] += good.abs().max()
    seen = [_error(bad, good, KINDS["bfloat16"].limit) for bad in (unwritten, wrong, good[:32])]
    if not clean.isnan().all() or any(part <= 1.0 for part in seen) or _error(good, good, 1e-9):
        raise GateError("the gate itself does not see what is wrong")


# --- the verdict on each kernel: keep it, torch is faster, or it is wrong ---


# a kernel within its rival's noise is no reason for code
_LEAST = 1.02
PASSES = {1: "forward", 2: "backward"}
# sections that time kernels, the ones that count most first
_TIMED = ("sweep", "kernels")


def verdicts(bench: Bench) -> Iterator[Row]:
    """What the figures of this run say about each kernel, compared with the best of torch."""
    timed = [part for name in _TIMED for part in bench.parts if part.name == name]
    rows = {row.figure: row for row in bench.part_of("gate").rows}
    for kernel in KERNELS:
        cells: dict[str, str] = {"verdict": "", "forward": "–", "backward": "–"}
        found = {PASSES[passes]: faster(timed, kernel.name, passes) for passes in PASSES}
        for name, ranks in found.items():
            if ranks:
                cells[name] = _told(ranks)
        own = [
            rows[f] for kind in bench.plan.gate.kinds if (f := figure_of(kernel.name, kind)) in rows
        ]
        wrong, checked = not all(row.is_right for row in own), kernel.name not in bench.wrong
        ratios = [of for ranks in found.values() for of in ranks.values()]
        cells["verdict"] = judged(ratios, wrong, checked)
        # times of a dry run say nothing
        if bench.is_dry:
            cells = {key: "wrong" if wrong and key == "verdict" else DRY for key in cells}
        yield Row(kernel.name, cells)


def faster(parts: list[Part], kernel: str, passes: int) -> dict[int, float]:
    """Rank to the time of the best of torch over that of the kernel; the first section wins."""
    found: dict[int, float] = {}
    for part in parts:
        for row in part.rows:
            facts: Mapping[str, Any] = row.facts
            if facts.get("kernel") != kernel or facts["passes"] != passes:
                continue
            times = facts["milliseconds"]
            rivals = [times[name] for name in ("cuBLAS", "reference") if name in times]
            if rivals:
                best = min(rivals, key=statistics.median)
                pairs = zip(best, times["kernel"], strict=False)
                found.setdefault(facts["rank"], ratio([a / b for a, b in pairs]).median)
    return found


def judged(ratios: list[float], wrong: bool, checked: bool) -> str:
    """The verdict in words.

    Args:
        ratios: how many times faster the kernel is than the best of torch, at each rank.
        wrong: whether the gate says that it computes something else.
        checked: whether the gate has passed it.
    """
    if wrong:
        return "wrong"
    if not checked or not ratios:
        return "not measured"
    kept = [of >= _LEAST for of in ratios]
    if all(kept):
        return "keep"
    return "keep in part" if any(kept) else "torch is faster"


def _told(ranks: Mapping[int, float]) -> str:
    words = {True: "keep", False: "torch is faster"}
    told = [f"r={r}: {words[of >= _LEAST]} ({of:.2f} ×)" for r, of in sorted(ranks.items())]
    return ", ".join(told)
