"""Many adapters in one run beside as many runs, one after the other: results, time, memory.

    make many

First eight adapters of four methods, with different data, batch sizes, rates, schedules, steps and
seeds, in float64: nothing more is measured unless both ways give the same. Then the CPU time of
`train()`, interleaved, and the peak memory of a process of its own for each. One thread, on a
processor that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import TrainingArguments, logging, set_seed

import adapterzoo
from _growth_plot import plot
from _measure import Ratio, ratio, seconds, setting, settled
from _models import LLAMA, SHALLOW, Shape, twin
from adapterzoo import AdapterTrainer, MultiAdapterTrainer

# rows of a batch → how many rows, and adapters
ROWS = {"one row": (1, (1, 4, 16, 64)), "four rows": (4, (1, 4, 16))}
# runs that take minutes have two rounds
FEW = {16: 2, 64: 2}
TOKENS = 32
STEPS = 8
# the largest difference, in float64, between one run and many
GATE = 1e-9
METHODS = ("lora[r=8]", "dora[r=8]", "ia3", "seq_bn[reduction_factor=8]")


class Job:
    """One adapter with its data and arguments; the same alone and beside others."""

    def __init__(self, shape: Shape, number: int, method: str, rows: int, **options: Any) -> None:
        """Describe it.

        Args:
            shape: of the base model.
            number: gives its data and seed.
            method: of the adapter.
            rows: of a batch.
            **options: of `TrainingArguments`.
        """
        self.name, self.shape, self.number, self.method = f"a{number}", shape, number, method
        self.options = {
            "per_device_train_batch_size": rows, "seed": number, "report_to": "none",
            "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
            "save_strategy": "no", "logging_strategy": "no", **options,
        }  # fmt: skip

    def add(self, model: Any) -> None:
        """Add the adapter; its weights depend on the number alone."""
        torch.manual_seed(100 + self.number)
        model.add_adapter(self.name, self.method)

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Arguments of a trainer."""
        source = torch.Generator().manual_seed(self.number)
        ids = torch.randint(3, 4096, (64, TOKENS), generator=source)
        rows = [{"input_ids": row, "labels": row} for row in ids]
        return {
            "args": TrainingArguments(str(folder / self.name), **self.options),
            "train_dataset": rows,
        }


def together(base: Any, jobs: list[Job], folder: Path) -> tuple[Any, Callable[[], Any]]:
    """A trainer of all, and its `train`."""
    model = adapterzoo.init(twin(base))
    for job in jobs:
        job.add(model)
    trainer = MultiAdapterTrainer(model)
    for job in jobs:
        trainer.add(job.name, **job.arguments(folder))
    return trainer, trainer.train


def alone(base: Any, jobs: list[Job], folder: Path) -> tuple[list[Any], Callable[[], Any]]:
    """A trainer for each, with a model that has this adapter only, and a call that runs all."""
    trainers = []
    for job in jobs:
        model = adapterzoo.init(twin(base))
        job.add(model)
        model.train_adapter(job.name)
        trainers.append(AdapterTrainer(model, **job.arguments(folder)))

    def train() -> None:
        for trainer in trainers:
            # as if it had just been made
            set_seed(trainer.args.seed)
            trainer.train()

    return trainers, train


def differences() -> dict[str, Any]:
    """Train eight adapters both ways in float64; return the largest differences."""
    base = SHALLOW.model(torch.float64)
    schedules = ("linear", "cosine", "constant", "polynomial")
    jobs = [
        Job(
            SHALLOW, i, METHODS[i % len(METHODS)], 1 + i % 3, max_steps=4 + i,
            learning_rate=1e-2 / (1 + i), lr_scheduler_type=schedules[i % 3],
            gradient_accumulation_steps=1 + i % 2, logging_strategy="steps", logging_steps=1,
            save_strategy="steps", save_steps=2,
        )
        for i in range(8)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as where:
        folders = Path(where) / "one", Path(where) / "many"
        with contextlib.redirect_stdout(io.StringIO()):
            one, train = together(base, jobs, folders[0])
            train()
            many, train = alone(base, jobs, folders[1])
            train()
        weights = losses = 0.0
        for job, trainer in zip(jobs, many, strict=True):
            ours = one.runs[job.name].trainer.state.log_history
            for a, b in zip(ours, trainer.state.log_history, strict=True):
                apart = [abs(a[k] - b[k]) for k in ("loss", "grad_norm") if k in a]
                losses = max([losses, *apart])
            found = dict(one.model.named_parameters())
            own = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}
            for name, p in own.items():
                difference = (found[name] - p).abs().max() / p.abs().max().clamp(min=1e-6)
                weights = max(weights, float(difference.detach()))
        files, equal = _files(*folders)
    print(
        f"float64: weights apart by {weights:.1e}, losses and gradient norms by {losses:.1e}, "
        f"{equal} of {len(files)} files of checkpoints equal, tensors of the others apart by "
        f"{max(files.values()):.1e}",
        file=sys.stderr,
    )
    if not max(weights, losses, *files.values()) < GATE:
        sys.exit("one run and many runs differ")
    return {
        "weights": weights, "losses": losses, "files": len(files), "files equal": equal,
        "tensors in files": max(files.values()),
    }  # fmt: skip


def _files(one: Path, many: Path) -> tuple[dict[str, float], int]:
    """File of adapters in both folders → largest difference of its tensors; how many are equal."""
    names = [
        sorted(
            str(path.relative_to(root))
            for path in root.rglob("*")
            if path.is_file()
            and path.suffix in (".safetensors", ".json")
            # what is of the trainer alone: times, and when this was saved
            and path.name not in ("trainer_state.json", "run.json")
        )
        for root in (one, many)
    ]
    if names[0] != names[1]:
        sys.exit(f"one run and many runs write other files: {set(names[0]) ^ set(names[1])}")
    found, equal = {}, 0
    for name in names[0]:
        if (one / name).read_bytes() == (many / name).read_bytes():
            found[name] = 0.0
            equal += 1
        elif name.endswith(".json"):
            # a fingerprint follows from the tensors
            ours, theirs = (
                _without_digests(json.loads((r / name).read_text())) for r in (one, many)
            )
            found[name] = 0.0 if ours == theirs else float("inf")
        else:
            ours, theirs = (load_file(root / name) for root in (one, many))
            same = ours.keys() == theirs.keys()
            apart = [float((ours[k] - theirs[k]).abs().max()) for k in ours] if same else []
            found[name] = max(apart, default=float("inf"))
    return found, equal


def _without_digests(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: _without_digests(v)
            for k, v in value.items()
            if k not in ("fingerprint", "digest", "sha256")
        }
    return [_without_digests(v) for v in value] if isinstance(value, list) else value


def compared(base: Any, jobs: list[Job], rounds: int) -> Ratio:
    """CPU time of one run over that of as many runs one after the other."""
    found = []
    with tempfile.TemporaryDirectory() as where:
        for number in range(rounds):
            ways: Mapping[str, Any] = {"one": together, "many": alone}
            taken = {}
            for name in list(ways)[:: 1 if number % 2 else -1]:
                _, train = ways[name](base, jobs, Path(where) / f"{number}{name}")
                with settled(), contextlib.redirect_stdout(io.StringIO()):
                    taken[name] = seconds(train)
            found.append(taken["one"] / taken["many"])
    return ratio(found)


def jobs_of(count: int, rows: int, methods: tuple[str, ...] = METHODS[:1]) -> list[Job]:
    """As many jobs of a few steps."""
    return [Job(LLAMA, i, methods[i % len(methods)], rows, max_steps=STEPS) for i in range(count)]


def peak(count: int, rows: int) -> float:
    """MiB of a process that trains so many adapters in one run, beyond one that has no model."""
    command = [sys.executable, "-W", "ignore", __file__, "--peak", str(count), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def _own_peak(count: int, rows: int) -> float:
    before = _most()
    base = LLAMA.model()
    if count:
        with tempfile.TemporaryDirectory() as where:
            together(base, jobs_of(count, rows), Path(where))[1]()
    return (_most() - before) / 1024


def _most() -> int:
    """KiB that this process had in memory at most; `getrusage` starts with those of its parent."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of at most four adapters")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/many.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/_static/many.svg"))
    parser.add_argument("--only-plot", action="store_true", help="of the figures that are there")
    parser.add_argument("--peak", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    if options.peak:
        print(_own_peak(*options.peak))
        return
    if not options.only_plot:
        document = measured(options.rounds)
        options.output.write_text(
            json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    document = json.loads(options.output.read_text(encoding="utf-8"))
    options.plot.write_text(plot(document, "Many adapters in one run"), encoding="utf-8")


def measured(rounds: int) -> dict[str, Any]:
    """The report."""
    about = {**setting(), "rounds": rounds, "base": LLAMA.title, "tokens of a row": TOKENS,
             "steps of an adapter": STEPS}  # fmt: skip
    equal = differences()
    base = LLAMA.model()
    spread: dict[str, Ratio] = {}
    times: dict[str, list[list[float]]] = {}
    memory: dict[str, list[list[float]]] = {}
    sizes: dict[str, int] = {}
    for title, (rows, counts) in ROWS.items():
        name = f"8 adapters of four methods, {title}"
        spread[name] = compared(base, jobs_of(8, rows, METHODS), rounds)
        one = peak(1, rows)
        sizes[title] = round(one)
        for count in counts:
            value = compared(base, jobs_of(count, rows), FEW.get(count, rounds))
            part = peak(count, rows) / (count * one)
            spread[f"{count} adapters, {title}"] = value
            times.setdefault(title, []).append([count, round(value.median, 3)])
            memory.setdefault(title, []).append([count, round(part, 3)])
            print(title, count, value, f"{part:.3f}", file=sys.stderr, flush=True)
    return {
        "about": about,
        "equal": equal,
        "time": {name: asdict(value) for name, value in spread.items()},
        "MiB of the base model": round(peak(0, 1)),
        "MiB of one run": sizes,
        "panels": {
            "CPU time of n adapters in one run": {"unit": "n runs = 1", "curves": times},
            "peak memory of n adapters in one run": {"unit": "n processes = 1", "curves": memory},
        },
    }


if __name__ == "__main__":
    main()
