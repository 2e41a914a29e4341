"""The verdict on each kernel: keep it, torch is faster, or it is wrong."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from _gpu_bench import Bench
from _gpu_gate import figure_of
from _gpu_kernels import KERNELS
from _gpu_report import DRY, Part, Row
from _measure import ratio

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
