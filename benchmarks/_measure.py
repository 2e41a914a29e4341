"""Measuring: CPU time in interleaved rounds, bytes kept for the backward pass, operators.

A time stands beside another one of the same round, never alone: on a shared machine only the
ratio means something. Bytes and counts are exact and repeat anywhere.
"""

from __future__ import annotations

import gc
import importlib
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

from adapterzoo.model.report.costs import saved_bytes as saved_bytes

# a rival that takes more floors than this is measured in `_FEW` rounds
_LONG = 2.0
_FEW = 3
# measured between two floors
_BETWEEN = 4


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times: median and quartiles over the rounds.

    Attributes:
        median: over the rounds.
        low: first quartile.
        high: third quartile.
        rounds: how many there were; None if exact or measured once.
    """

    median: float
    low: float
    high: float
    rounds: int | None = None

    def __str__(self) -> str:
        """The median, and the quartiles as its spread; an exact one alone."""
        if self.low == self.high:
            return f"{self.median:.3g}"
        few = f"; {self.rounds} rounds" if self.rounds == _FEW else ""
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f}{few})"


def ratios(
    floor: Callable[[], object],
    others: Mapping[str, Callable[[], object]],
    rounds: int,
    repeat: int = 1,
    rivals: Collection[str] = (),
) -> dict[str, Ratio]:
    """CPU time of each of the others over that of the floor.

    The floor is measured before and after every four of the others, and the mean of both taken:
    what drifts slowly falls out, since they change places from round to round. Rivals that take
    more than two floors are measured in three rounds, once in each after the first.

    Args:
        floor: what the others are compared with; has run before, as all of them.
        others: names to what is measured.
        rounds: at least 7 for a figure that is reported.
        repeat: calls that are timed together, for calls of microseconds.
        rivals: names of those whose figures need no second digit.
    """
    found: dict[str, list[float]] = {name: [] for name in others}

    def is_long(name: str) -> bool:
        taken = found[name]
        return name in rivals and bool(taken) and statistics.median(taken) > _LONG

    before = seconds(floor, repeat)
    for number in range(rounds):
        names = [n for n in others if number < _FEW or not is_long(n)]
        names = names if number % 2 else names[::-1]
        for i in range(0, len(names), _BETWEEN):
            taken = {
                name: seconds(others[name], 1 if is_long(name) else repeat)
                for name in names[i : i + _BETWEEN]
            }
            after = seconds(floor, repeat)
            for name, took in taken.items():
                found[name].append(2 * took / (before + after))
            before = after
    return {name: ratio(values) for name, values in found.items()}


def ratio(values: list[float]) -> Ratio:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(statistics.median(values), low, high, len(values))


@contextmanager
def settled() -> Iterator[None]:
    """What is there now is no garbage: collections look at what comes after, and are short."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seconds(run: Callable[[], object], repeat: int = 1) -> float:
    """CPU time of a call, without collections of garbage, within `settled`."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    for _ in range(repeat):
        run()
    taken = time.process_time() - start
    gc.enable()
    return taken / repeat


def operators(run: Callable[[], object]) -> int:
    """How many operators of PyTorch a call runs, views included."""
    counter = _Counter()
    with counter:
        run()
    return counter.count


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def setting() -> dict[str, str]:
    """Date, machine and versions of a run."""
    packages = ("torch", "transformers", "peft", "adapterzoo")
    return {
        "date": date.today().isoformat(),
        "machine": f"{processor()}, one thread",
        **{name: str(importlib.import_module(name).__version__) for name in packages},
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
