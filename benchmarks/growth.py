"""How costs grow: with adapters installed, ranks, tokens, adapters in a batch, compositions.

    make growth

Curves of adapterzoo, and of PEFT where it has the same. Each part is written when it is measured,
and `--only loading` measures that part alone and keeps the others, so a run that is stopped goes
on. One thread, CPU time; all parts take four minutes on a processor that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch

import adapterzoo
from _growth_plot import plot
from _measure import ratios, seconds, setting, settled
from _models import SHALLOW, TINY, Shape, twin
from adapterzoo import Average, BatchSplit, Parallel, Stack

INSTALLED = (1, 10, 100, 500)
# PEFT takes half a second for its thirtieth load, and more for each after it
PEFT_INSTALLED = (1, 10, 30)
RANKS = (4, 16, 64, 256, 512)
TOKENS = (128, 512, 1024, 4096)
MIXED = (1, 4, 16, 64)
COMPOSED = (2, 4, 8, 16, 32, 64)

Curve = dict[str, list[list[float]]]


def _config(shape: Shape, rank: int = 8) -> Any:
    return adapterzoo.LoRAConfig(r=rank, target_modules=shape.targets)


def _peft_config(shape: Shape, rank: int = 8) -> Any:
    return peft.LoraConfig(r=rank, target_modules=shape.targets)


def _milliseconds(run: Callable[[], object], times: int = 5) -> float:
    """The median of a call's CPU time."""
    run()
    return 1e3 * statistics.median(seconds(run) for _ in range(times))


class Library:
    """A tiny BERT with one adapter on disk, and calls under the same names for both libraries."""

    def __init__(self, folder: Path, base: Any, is_peft: bool) -> None:
        """Save an adapter.

        Args:
            folder: for its files.
            base: the frozen model.
            is_peft: whether it is PEFT's.
        """
        self.is_peft, self.folder = is_peft, folder
        self.model: Any
        if is_peft:
            self.model = peft.get_peft_model(twin(base), _peft_config(TINY), adapter_name="a0")
            self.model.save_pretrained(folder, selected_adapters=["a0"])
            self.folder = folder / "a0"
        else:
            self.model = adapterzoo.init(twin(base))
            self.model.add_adapter("a0", _config(TINY))
            self.model.save_adapter(folder, "a0")
        self.model.eval()
        self.activate("a0")

    def load(self, name: str) -> None:
        """Load the adapter once more."""
        if self.is_peft:
            self.model.load_adapter(self.folder, adapter_name=name)
        else:
            self.model.load_adapter(self.folder, load_as=name)

    def activate(self, name: str) -> None:
        """Let one act."""
        if self.is_peft:
            self.model.set_adapter(name)
        else:
            self.model.set_active_adapters(name)

    def delete(self, name: str) -> None:
        """Remove one."""
        self.model.delete_adapter(name)


def installed() -> dict[str, Curve]:
    """With n adapters: a forward with one active, loading, switching and deleting one more."""
    base = TINY.model().eval()
    ids = torch.arange(TINY.tokens)[None]
    names = ("forward, n adapters installed", "loading the n-th", "switching", "deleting the n-th")
    found: dict[str, Curve] = {name: {} for name in names}

    @torch.no_grad()
    def forwards(model: Any) -> float:
        run = {"adapted": lambda: model(input_ids=ids)}
        run["adapted"]()
        return ratios(lambda: base(input_ids=ids), run, 9, repeat=3)["adapted"].median

    for title, sizes in (("adapterzoo", INSTALLED), ("PEFT", PEFT_INSTALLED)):
        with tempfile.TemporaryDirectory() as folder:
            library = Library(Path(folder), base, title == "PEFT")
            count = 1
            for size in sizes:
                while count < size:
                    library.load(f"a{count}")
                    count += 1
                values: list[list[float]] = [[], [], []]
                calls = [partial(call, "more") for call in
                         (library.load, library.activate, library.delete)]  # fmt: skip
                for _ in range(5):
                    for taken, call in zip(values, calls, strict=True):
                        taken.append(1e3 * seconds(call))
                    library.activate("a0")
                points = (forwards(library.model), *map(statistics.median, values))
                for name, value in zip(names, points, strict=True):
                    found[name].setdefault(title, []).append([size, value])
    return found


def _steps(shapes: list[tuple[int, Shape, int]], rounds: int) -> Curve:
    """Steps over the floor: x, the shape and the rank of each point."""
    found: Curve = {"adapterzoo": [], "PEFT": []}
    for x, shape, rank in shapes:
        base = shape.model()
        model = adapterzoo.init(twin(base))
        model.add_adapter("a", _config(shape, rank))
        model.train_adapter("a")
        models: dict[str, Any] = {
            "adapterzoo": model.train(),
            "PEFT": peft.get_peft_model(twin(base), _peft_config(shape, rank)).train(),
        }
        runs = {name: partial(shape.step, m) for name, m in models.items()}
        floor = partial(shape.step, base)
        for run in (floor, *runs.values()):
            run()
        times = ratios(floor, runs, rounds)
        for name, ratio in times.items():
            found[name].append([x, ratio.median])
    return found


def ranks() -> dict[str, Curve]:
    """A step by rank."""
    shape = replace(SHALLOW, rows=4)
    return {"step, LoRA of rank n": _steps([(r, shape, r) for r in RANKS], 5)}


def tokens() -> dict[str, Curve]:
    """A step by the tokens of the batch, in sequences of 128."""
    shapes = [(n, replace(SHALLOW, rows=n // 128), 8) for n in TOKENS]
    return {"step, n tokens": _steps(shapes, 5)}


@torch.no_grad()
def mixed() -> dict[str, Curve]:
    """64 rows of 16 tokens over n adapters, over one adapter for all."""
    shape = replace(SHALLOW, rows=64, tokens=16)
    base, found = shape.model().eval(), Curve()
    ids = torch.arange(shape.rows * shape.tokens).view(shape.rows, -1) % base.config.vocab_size
    mine: Any = adapterzoo.init(twin(base))
    other: Any = peft.get_peft_model(twin(base), _peft_config(shape), adapter_name="a0").eval()
    for i in range(max(MIXED)):
        mine.add_adapter(f"a{i}", _config(shape))
        if i:
            other.add_adapter(f"a{i}", _peft_config(shape))
    mine.set_active_adapters("a0")
    for title, model in (("adapterzoo", mine), ("PEFT", other)):
        for n in MIXED:
            rows = [f"a{i % n}" for i in range(shape.rows)]
            run = {"mixed": partial(model, input_ids=ids, adapter_names=rows)}
            run["mixed"]()
            times = ratios(partial(model, input_ids=ids), run, 5)
            found.setdefault(title, []).append([n, times["mixed"].median])
    return {"mixed batch of n adapters / one": found}


def compositions() -> dict[str, Curve]:
    """Activating compositions of n adapters, at 72 layers."""
    model = adapterzoo.init(TINY.model().eval())
    names = [f"a{i}" for i in range(max(COMPOSED))]
    for name in names:
        model.add_adapter(name, _config(TINY))
    found = Curve()
    options: dict[Any, dict[str, Any]] = {
        Stack: {}, Average: {}, Parallel: {}, BatchSplit: {"batch_sizes": 1}
    }  # fmt: skip
    for kind, more in options.items():
        for n in COMPOSED:
            setup = kind(*names[:n], **more)
            taken = _milliseconds(partial(model.set_active_adapters, setup), 7)
            found.setdefault(kind.__name__, []).append([n, taken])
    return {"activating a composition of n": found}


PARTS: dict[str, Callable[[], dict[str, Curve]]] = {
    "installed": installed,
    "ranks": ranks,
    "tokens": tokens,
    "mixed": mixed,
    "compositions": compositions,
}
UNITS = {
    "forward, n adapters installed": "× the plain model",
    "loading the n-th": "ms",
    "switching": "ms",
    "deleting the n-th": "ms",
    "step, LoRA of rank n": "× the frozen model",
    "step, n tokens": "× the frozen model",
    "mixed batch of n adapters / one": "× one adapter",
    "activating a composition of n": "ms",
}


# what the first page shows
FIRST = ("loading the n-th", "switching", "step, n tokens", "mixed batch of n adapters / one")


def main() -> None:
    """Measure, and write after each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="PART", choices=list(PARTS))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--plot", type=Path, default=Path("docs/_static/growth.svg"))
    parser.add_argument("--only-plot", action="store_true", help="draw what is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", module="peft")
    path = options.output / "growth.json"
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in _wanted(options):
        start = time.perf_counter()
        with settled():
            curves = PARTS[name]()
        document["about"] = setting()
        panels = document.setdefault("panels", {})
        for title, curve in curves.items():
            panels[title] = {"unit": UNITS[title], "curves": curve}
        document["panels"] = {title: panels[title] for title in UNITS if title in panels}
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    options.plot.write_text(plot(document), encoding="utf-8")
    first = {"panels": {title: document["panels"][title] for title in FIRST}}
    options.plot.with_stem(options.plot.stem + "-first").write_text(plot(first), encoding="utf-8")


def _wanted(options: argparse.Namespace) -> Iterator[str]:
    return (n for n in PARTS if not options.only_plot and (not options.only or n in options.only))


if __name__ == "__main__":
    main()
