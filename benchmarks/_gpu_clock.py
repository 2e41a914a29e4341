"""Timing on a GPU by device events: interleaved, over several sets of inputs, within a time.

A CPU stands in on a dry run, where what comes out is thrown away.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from _measure import Ratio, ratio

# a call for each set of inputs; they take turns, so that no cache has the last one's
Runs = Sequence[Callable[[], object]]
SETS = 3
# fewer rounds have no quartiles; what takes several floors needs no more
LEAST = 3
_LONG = 4.0
# above any clock rate, so that a device sleeps no shorter than it is asked to
_RATE = 2.2e9


@dataclass
class Times:
    """What rounds of interleaved calls took.

    Attributes:
        milliseconds: name to one time for each round.
        floor: name of what the others are compared with.
        failed: name to why there is no time.
    """

    milliseconds: dict[str, list[float]]
    floor: str
    failed: dict[str, str] = field(default_factory=dict)

    def over_floor(self, name: str) -> Ratio | str | None:
        """Times of the floor of the same round; or why there is none; None: unknown name."""
        return self.over(name, self.floor)

    def over(self, name: str, other: str) -> Ratio | str | None:
        """Times of another one in the same rounds."""
        for either in (name, other):
            if either in self.failed:
                return self.failed[either]
        if name not in self.milliseconds or other not in self.milliseconds:
            return None
        # those measured in fewer rounds have the first ones
        pairs = zip(self.milliseconds[name], self.milliseconds[other], strict=False)
        return ratio([a / b for a, b in pairs])

    def median(self, name: str) -> float:
        """Milliseconds."""
        return statistics.median(self.milliseconds[name])


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        """Make one.

        Args:
            device: a CUDA device, or the CPU.
            rounds: that a figure is the median of, where there is time.
        """
        self.device = device
        self.rounds = rounds
        self.is_cuda = device.type == "cuda"

    def interleaved(
        self,
        runs: Mapping[str, Runs],
        until: float,
        ahead: bool = True,
        failing: tuple[str, ...] = (),
        together: int = 1,
    ) -> Times:
        """Time all in each round, in an order that turns round by round: A B, B A.

        Args:
            runs: by name; the first is the floor.
            until: value of `time.monotonic` after which no round begins, but for the first ones.
            ahead: whether the host is let ahead, so that the time is that of the device alone;
                else gaps count in which the device waits for the host.
            failing: names that may fail, because they are others'.
            together: calls between two events, for kernels of a few microseconds: one pair of
                events is right to 1 or 2 of them.
        """
        found: dict[str, list[float]] = {}
        lead: dict[str, float] = {}
        times = Times(found, next(iter(runs)))
        for name, calls in runs.items():
            try:
                lead[name] = self._warm(calls)
                found[name] = []
            except torch.OutOfMemoryError:
                times.failed[name] = "out of memory"
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                if name not in failing:
                    raise
                times.failed[name] = f"fails: {type(error).__name__}"
            self._tidy(name in times.failed)
        # once: with a model's modules alive it takes longer than what is measured
        if self.is_cuda:
            gc.collect()
        gc.disable()
        try:
            for number in range(self.rounds):
                if number >= LEAST and time.monotonic() > until:
                    break
                for name in list(found) if number % 2 == 0 else list(reversed(found)):
                    if number >= LEAST and name != times.floor and self._is_long(times, name):
                        continue
                    calls = runs[name]
                    # one set after the other, also between two events
                    next_calls = [calls[(number + i) % len(calls)] for i in range(together)]
                    found[name].append(self.milliseconds(next_calls, lead[name] if ahead else 0.0))
        finally:
            gc.enable()
        return times

    def milliseconds(self, calls: Runs, lead: float = 0.0) -> float:
        """Time of one call, the mean over these.

        Args:
            calls: made one after the other.
            lead: seconds for which the device is kept waiting while the host goes ahead.
        """
        if self.is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            if lead:
                torch.cuda._sleep(int(min(lead * len(calls), 0.05) * _RATE))
            start.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
            taken = float(start.elapsed_time(end))
        else:
            before = time.perf_counter()
            for call in calls:
                call()
            taken = 1e3 * (time.perf_counter() - before)
        return taken / len(calls)

    def synchronize(self) -> None:
        """Wait for the device; an error of an earlier launch shows here."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The most bytes that a call adds at one time to those there before it; on a CPU 0."""
        if not self.is_cuda:
            run()
            return 0
        run()
        self._tidy(True)
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def _warm(self, calls: Runs) -> float:
        """Compile, load and fill caches; the seconds that the host takes for a call."""
        for call in calls:
            call()
        self.synchronize()
        start = time.perf_counter()
        calls[0]()
        taken = time.perf_counter() - start
        self.synchronize()
        return 1.5 * taken + 2e-4

    def _tidy(self, failed: bool) -> None:
        if failed:
            gc.collect()
            if self.is_cuda:
                torch.cuda.empty_cache()

    def _is_long(self, times: Times, name: str) -> bool:
        return times.median(name) > _LONG * times.median(times.floor)
