"""What adapters cost on a CPU, beside the frozen base model and beside PEFT, in one run.

    make bench

One thread, CPU time, each figure beside the floor of the same round; nothing is printed unless
both libraries compute the same. Run it on a machine that does nothing else.

`--only steps loading` measures these sections alone and keeps the other figures of the report.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

import adapterzoo
from _formulas import formulas
from _measure import Ratio, operators, ratios, saved_bytes, setting, settled
from _methods import METHODS, Method
from _models import BERT, LLAMA, SHALLOW, TINY, Shape, stand_in, twin
from _report import Figure, Section, write
from _uses import importing, injecting, loading, merging, mixing

# the largest relative difference of a loss or gradient between the libraries, in float32
GATE = 1e-4
SHALLOWER = {LLAMA.title: SHALLOW.title}
# methods whose training steps are measured in the same rounds
STEPS = [(LLAMA, METHODS[:2]), (LLAMA, METHODS[2:4]), (LLAMA, METHODS[4:]),
         (BERT, METHODS[:2]), (BERT, METHODS[2:4])]  # fmt: skip
# tells ATen, oneDNN and MKL to leave AVX-512 alone
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def sections(rounds: int) -> dict[str, Callable[[], list[Figure]]]:
    """The parts of the benchmark by name, in order.

    Args:
        rounds: of a training step; shorter calls get more.
    """
    one = Shape(LLAMA.title, LLAMA.targets, 1, 1)
    single = replace(LLAMA, tokens=1)
    return {
        "steps": lambda: [f for shape, methods in STEPS for f in steps(shape, methods, rounds)],
        "avx2": lambda: without_avx512(rounds),
        "formulas": lambda: formulas(max(rounds - 2, 2)),
        "bfloat16": half_precision,
        "forwards": lambda: (
            small(TINY, "1 × 16 tokens", 3 * rounds) + small(one, "1 × 1 token", 3 * rounds)
        ),
        "mixed": lambda: mixing(LLAMA, rounds) + mixing(single, 3 * rounds),
        "injection": lambda: injecting(LLAMA, METHODS, rounds),
        "merging": lambda: merging(LLAMA, METHODS, rounds),
        "loading": lambda: loading(LLAMA, rounds),
        "import": importing,
    }


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="at least 7 for a report")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", nargs="+", metavar="SECTION", choices=list(sections(1)))
    parser.add_argument("--own-steps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module="peft")
    if options.own_steps:
        print(json.dumps(own_steps(options.rounds)))
        return
    stand_in()
    found = measured(sections(options.rounds), options.only)
    about = {**setting(), "rounds": options.rounds}
    write(options.output, "cpu", about, found, kept=bool(options.only))


def measured(
    parts: Mapping[str, Callable[[], list[Figure]]], only: Collection[str] | None
) -> dict[str, Section]:
    """Run sections after the gate; print the seconds of each.

    Args:
        parts: all sections.
        only: names of those that run; None: all.
    """
    start = time.perf_counter()
    gate()
    print(f"gate: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    found = {}
    for name, section in parts.items():
        if only is None or name in only:
            start = time.perf_counter()
            with settled():
                figures = section()
            found[name] = Section(round(time.perf_counter() - start), figures)
            print(f"{name}: {found[name].seconds} s", file=sys.stderr, flush=True)
    return found


def gate() -> None:
    """Stop here if the libraries do not compute the same.

    Raises:
        SystemExit: they do not.
    """
    for shape, methods in STEPS:
        # two layers are as good as eight, and PEFT's BOFT takes seconds for each
        shape = replace(shape, rows=1, tokens=32, title=SHALLOWER.get(shape.title, shape.title))
        base = shape.model()
        for method in methods:
            difference = method.difference(shape, base)
            if not difference < GATE:
                sys.exit(
                    f"{method.title} on {shape.title}: adapterzoo and PEFT differ by {difference}"
                )


def steps(shape: Shape, methods: list[Method], rounds: int) -> list[Figure]:
    """Training steps: time, bytes kept for the backward and operators, over the floor's."""
    base = shape.model()
    floor_bytes = saved_bytes(base, lambda: shape.loss(base))
    # as many of few rows as of many
    few = replace(shape, rows=1)
    floor_operators = operators(_step_of(few, base))
    kept, counts, runs = {}, {}, {}
    for method in methods:
        pair = method.put(shape, base), method.put_peft(shape, base)
        method.equalise(*pair)
        kept[method.title] = [saved_bytes(m, lambda m=m: shape.loss(m)) / floor_bytes for m in pair]  # type: ignore[misc]
        counts[method.title] = [operators(_step_of(few, m)) / floor_operators for m in pair]
        runs[method.title], runs[f"PEFT {method.title}"] = (_step_of(shape, m) for m in pair)
    times = ratios(lambda: shape.step(base), runs, rounds, rivals=_rivals(runs))
    found = []
    for method in methods:
        name = method.title
        step_goal, bytes_goal = method.goals[shape.title]
        where = f"{name}, {shape.title}, {shape.rows} × {shape.tokens} tokens"
        found += [
            Figure(f"step: {where}", times[name], times[f"PEFT {name}"], step_goal),
            exact(f"saved bytes: {where}", kept[name], bytes_goal),
            exact(f"operators: {where}", counts[name], None),
        ]
    return found


def half_precision() -> list[Figure]:
    """Saved bytes over a bfloat16 base; PEFT's adapters are float32 there by default."""
    base = LLAMA.model(torch.bfloat16)
    floor = saved_bytes(base, lambda: LLAMA.loss(base))
    found = []
    for method, goal in ((METHODS[0], 1.30), (METHODS[2], 1.55)):
        pair = method.put(LLAMA, base), method.put_peft(LLAMA, base)
        kept = [saved_bytes(m, lambda m=m: LLAMA.loss(m)) / floor for m in pair]  # type: ignore[misc]
        name = f"saved bytes: {method.title}, {LLAMA.title}, bfloat16"
        found.append(exact(name, kept, goal))
    return found


@torch.no_grad()
def small(shape: Shape, tokens: str, rounds: int) -> list[Figure]:
    """A forward of few tokens in evaluation: what the dispatch of adapters costs."""
    base = shape.model().eval()
    ids = torch.arange(shape.tokens).expand(shape.rows, -1)

    def run(model: Any) -> Callable[[], object]:
        return lambda: model(input_ids=ids)

    idle = adapterzoo.init(twin(base))
    idle.add_adapter("a", adapterzoo.LoRAConfig(target_modules=shape.targets))
    bottleneck = adapterzoo.init(twin(base))
    bottleneck.add_adapter("a", "seq_bn[reduction_factor=8]")
    bottleneck.set_active_adapters("a")
    runs = {"nothing active": run(idle), "bottleneck": run(bottleneck)}
    goals = {"nothing active": 1.0, "LoRA r=8": 1.3}
    for method in (METHODS[0], METHODS[2], METHODS[4]):
        runs[method.title] = run(method.put(shape, base).eval())
        runs[f"PEFT {method.title}"] = run(method.put_peft(shape, base).eval())
    for call in (run(base), *runs.values()):
        call()
    times = ratios(run(base), runs, rounds, repeat=3, rivals=_rivals(runs))
    return [
        Figure(
            f"forward: {name}, {shape.title}, {tokens}",
            ours,
            times.get(f"PEFT {name}"),
            goals.get(name, 1.5),
        )
        for name, ours in times.items()
        if not name.startswith("PEFT ")
    ]


def own_steps(rounds: int) -> dict[str, Any]:
    """Steps of adapterzoo alone, on both models: name and shape → the fields of the ratio."""
    found: dict[str, Any] = {}
    for shape in (LLAMA, BERT):
        base = shape.model()
        floor = _step_of(shape, base)
        methods = [m for m in METHODS[:5] if m is not METHODS[3]]
        runs = {m.title: _step_of(shape, m.put(shape, base)) for m in methods}
        for run in (floor, *runs.values()):
            run()
        times = ratios(floor, runs, rounds)
        found |= {f"{name}|{shape.title}": astuple(ratio) for name, ratio in times.items()}
    return found


def without_avx512(rounds: int) -> list[Figure]:
    """`own_steps` in a process that uses no AVX-512."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--own-steps",
        "--rounds",
        str(max(rounds - 4, 3)),
    ]
    done = subprocess.run(
        command, capture_output=True, check=True, text=True, env={**os.environ, **AVX2}
    )
    goals = {method.title: method.goals for method in METHODS}
    found = []
    for name, values in json.loads(done.stdout.splitlines()[-1]).items():
        title, _, shape = name.partition("|")
        goal = goals[title][shape][0]
        found.append(Figure(f"AVX2 alone: step: {title}, {shape}", Ratio(*values), None, goal))
    return found


def _rivals(names: Collection[str]) -> set[str]:
    return {name for name in names if name.startswith("PEFT ")}


def _step_of(shape: Shape, model: Any) -> Callable[[], None]:
    return lambda: shape.step(model)


def exact(name: str, values: list[float], goal: float | None) -> Figure:
    """A figure without spread: ours, theirs."""
    ours, theirs = (Ratio(value, value, value) for value in values)
    return Figure(name, ours, theirs, goal)


if __name__ == "__main__":
    main()
