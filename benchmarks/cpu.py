"""What adapters cost on a CPU, beside the frozen base model and beside PEFT, in one run.

    make bench

One thread, CPU time, each figure beside the floor of the same round; nothing is printed unless
both libraries compute the same. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from tqdm import tqdm

import adapterzoo
from _measure import Ratio, operators, processor, ratios, saved_bytes, settled
from _methods import METHODS, Method
from _models import BERT, LLAMA, TINY, Shape, twin
from _report import Figure, write
from _stand_in import stand_in
from _uses import importing, injecting, loading, merging, mixing

# the largest relative difference of a loss or gradient between the libraries, in float32
GATE = 1e-4
# methods whose training steps are measured in the same rounds
STEPS = [(LLAMA, METHODS[:2]), (LLAMA, METHODS[2:4]), (LLAMA, METHODS[4:]),
         (BERT, METHODS[:2]), (BERT, METHODS[2:4])]  # fmt: skip


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="at least 7 for a report")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="peft")
    stand_in()
    gate()
    rounds, one = options.rounds, Shape(LLAMA.title, LLAMA.targets, 1, 1)
    sections: list[Callable[[], list[Figure]]] = [
        *(
            lambda shape=shape, methods=methods: steps(shape, methods, rounds)
            for shape, methods in STEPS
        ),
        half_precision,
        lambda: small(TINY, "1 × 16 tokens", 3 * rounds),
        lambda: small(one, "1 × 1 token", 3 * rounds),
        lambda: mixing(LLAMA, rounds),
        lambda: mixing(replace(LLAMA, tokens=1), 3 * rounds),
        lambda: injecting(LLAMA, METHODS, rounds),
        lambda: merging(LLAMA, METHODS, rounds),
        lambda: loading(LLAMA, rounds),
        importing,
    ]
    figures = []
    for section in tqdm(sections):
        with settled():
            figures += section()
    about = {
        "date": date.today().isoformat(),
        "machine": f"{processor()}, one thread",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "adapterzoo": adapterzoo.__version__,
        "rounds": options.rounds,
    }
    write(options.output, "cpu", about, figures)


def gate() -> None:
    """Stop here if the libraries do not compute the same.

    Raises:
        SystemExit: they do not.
    """
    for shape, methods in STEPS:
        base = shape.model()
        for method in methods:
            difference = method.difference(replace(shape, rows=1, tokens=32), base)
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
    times = ratios(lambda: shape.step(base), runs, rounds)
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
    times = ratios(run(base), runs, rounds, repeat=3)
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


def _step_of(shape: Shape, model: Any) -> Callable[[], None]:
    return lambda: shape.step(model)


def exact(name: str, values: list[float], goal: float | None) -> Figure:
    """A figure without spread: ours, theirs."""
    ours, theirs = (Ratio(value, value, value) for value in values)
    return Figure(name, ours, theirs, goal)


if __name__ == "__main__":
    main()
