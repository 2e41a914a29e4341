"""What every section of the GPU benchmark is given: device, sizes, ceilings, time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from _gpu_clock import Clock
from _gpu_gate import Sizes
from _gpu_kernels import Kernel, Shape
from _gpu_report import Part

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
