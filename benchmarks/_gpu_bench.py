"""What every section of the GPU benchmark is given: device, sizes, ceilings, time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from _gpu_gate import Sizes
from _gpu_kernels import Kernel, Shape
from _gpu_report import Part
from _measure import Ratio, ratio

NO_TIME = "no time left for it"


@dataclass(frozen=True)
class Body:
    """A decoder of Llama's kind, and how many of its layers there are.

    Attributes:
        title: for tables.
        width: of the hidden states.
        inner: of the feed-forward part.
        layers: number of them.
        heads: of attention.
        groups: of keys and values.
        vocabulary: tokens.
    """

    title: str
    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    vocabulary: int

    def model(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
        """Random weights, frozen, in training mode."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.groups,
            head_dim=max(self.width // self.heads, 2),
            max_position_embeddings=8192,
        )
        with torch.device(device):
            made: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return made.requires_grad_(False).train()


@dataclass(frozen=True)
class Plan:
    """All sizes; a dry run has another one.

    Attributes:
        copy_bytes: of the buffer that is copied.
        gemm: rows, columns and depth of the matrix product.
        gate: sizes of the gate.
        kernel_ranks: of each kernel's ranks those that are timed, at most.
        kernel_rows: of the kernels alone.
        kernel_width: of the kernels alone.
        layer_rows: of the layers.
        layers: d_in and d_out of the layers.
        ranks: of the layers.
        bottlenecks: widths of bottlenecks.
        bodies: models.
        batch: rows of tokens.
        tokens: of a row.
        mixed: numbers of adapters in one batch.
        mixed_tokens: of a row of a mixed batch.
        sweep_ranks: of the kernels at several settings.
        programs: numbers of programs of a sweep.
        stages: numbers of stages of a sweep.
        few: rows of decoding steps.
        repeats: calls whose time on the host is measured together.
        together: calls between two events, for kernels of a few microseconds.
    """

    copy_bytes: int
    gemm: int
    gate: Sizes
    kernel_ranks: int
    kernel_rows: int
    kernel_width: int
    layer_rows: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    bottlenecks: tuple[int, ...]
    bodies: tuple[Body, ...]
    batch: int
    tokens: int
    mixed: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    sweep_ranks: tuple[int, ...]
    programs: tuple[int, ...]
    stages: tuple[int, ...]
    few: tuple[int, ...]
    repeats: int
    together: int


REAL = Plan(
    copy_bytes=4 << 30,
    gemm=8192,
    gate=Sizes(
        few=17,
        many=1003,
        d_in=517,
        d_out=389,
        draws=2,
        aligned=(1027, 1152, 896),
        large=(8192, 4096),
    ),
    kernel_ranks=3,
    kernel_rows=8192,
    kernel_width=4096,
    layer_rows=(8192, 2048),
    layers=((4096, 4096), (4096, 14336), (14336, 4096)),
    ranks=(16, 64, 384),
    bottlenecks=(64, 128, 256),
    bodies=(
        Body("8 layers of Llama-8B", 4096, 14336, 8, 32, 8, 128256),
        Body("Llama-1B", 2048, 8192, 16, 32, 8, 128256),
    ),
    batch=4,
    tokens=2048,
    mixed=(1, 8, 32),
    mixed_tokens=(1, 128),
    sweep_ranks=(16, 48, 64, 384),
    programs=(128, 256, 512),
    stages=(2, 3, 4),
    few=(1, 32),
    repeats=50,
    together=10,
)
DRY = Plan(
    copy_bytes=1 << 16,
    gemm=64,
    gate=Sizes(3, 66, 24, 20, 1, (66, 32, 48), (20, 32), ("bfloat16",), 1, 1, 66),
    kernel_ranks=1,
    kernel_rows=20,
    kernel_width=32,
    layer_rows=(20,),
    layers=((32, 48),),
    ranks=(16,),
    bottlenecks=(16,),
    bodies=(Body("a tiny Llama", 32, 48, 1, 2, 1, 50),),
    batch=2,
    tokens=6,
    mixed=(1, 2),
    mixed_tokens=(1,),
    sweep_ranks=(16,),
    programs=(2,),
    stages=(1,),
    few=(1, 2),
    repeats=2,
    together=2,
)


def timed_shapes(kernel: Kernel, plan: Plan) -> Iterator[Shape]:
    """Those at which a kernel is timed; a norm has the rows of a weight."""
    width = plan.kernel_width
    rows = width if kernel.name.startswith("row_norm") else plan.kernel_rows
    for rank in kernel.timed[: plan.kernel_ranks]:
        yield Shape(rows, width, width, rank)


@dataclass
class Bench:
    """The run, as a section sees it.

    Attributes:
        device: on which all of it runs.
        clock: of the device.
        plan: all sizes.
        part: of the report, the section that runs now.
        until: value of `time.monotonic` at which its time is over.
        bandwidth: measured, bytes per millisecond.
        rate: measured, floating-point operations per millisecond.
        wrong: kernels that the gate found to be wrong, or has not checked.
        parts: of the report, all sections.
    """

    device: torch.device
    clock: Clock
    plan: Plan
    part: Part
    until: float = float("inf")
    bandwidth: float = 0.0
    rate: float = 0.0
    wrong: set[str] = field(default_factory=set)
    parts: list[Part] = field(default_factory=list)

    def has(self, figure: str) -> bool:
        """Whether this section has a row of the name already."""
        return any(row.figure == figure for row in self.part.rows)

    def wants(self, figure: str, kernels: tuple[str, ...] = ()) -> bool:
        """Whether to measure this; if not, the reason is noted.

        Args:
            figure: that no earlier run has measured.
            kernels: that it uses, none of which may be wrong.
        """
        if self.has(figure):
            return False
        wrong = self.wrong.intersection(kernels)
        if not wrong and time.monotonic() < self.until:
            return True
        why = f"not right: {', '.join(sorted(wrong))}" if wrong else NO_TIME
        reason = f"{figure}: {why}"
        if reason not in self.part.skipped:
            self.part.skipped.append(reason)
        return False

    def part_of(self, name: str) -> Part:
        """The part of the report of a section."""
        return next(part for part in self.parts if part.name == name)

    @property
    def is_dry(self) -> bool:
        """Whether a CPU stands in, and no figure means anything."""
        return self.plan is DRY


# --- timing on a GPU by device events: interleaved, over several sets of inputs, within a time ---


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
