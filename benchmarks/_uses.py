"""What is done once and not in each step: injecting, merging, loading, switching, importing."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch

import adapterzoo
from _measure import Ratio, ratio, ratios, seconds
from _methods import Method
from _models import Shape, twin
from _report import Figure

COUNT = 50


def injecting(shape: Shape, methods: list[Method], rounds: int) -> list[Figure]:
    """Adding one adapter at all sites."""
    base = shape.model()
    theirs = {
        m.title: _rounds(lambda m=m: m.put_peft(shape, base), rounds)  # type: ignore[misc]
        for m in (methods[0], methods[2], methods[4])
    }
    return [
        Figure(
            f"injection: {m.title}",
            _rounds(lambda m=m: m.put(shape, base), rounds),  # type: ignore[misc]
            theirs[m.title],
            0.03,
            "s",
        )
        for m in (methods[0], methods[2], methods[4])
    ]


def merging(shape: Shape, methods: list[Method], rounds: int) -> list[Figure]:
    """Merging a BOFT adapter; each merge starts from weights of its own."""
    found = []
    for method in methods[4:6]:
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(min(rounds, 3)):
            mine, other = method.put(shape, shape.model()), method.put_peft(shape, shape.model())
            ours.append(seconds(lambda m=mine: m.merge_adapter("a")))  # type: ignore[misc]
            theirs.append(seconds(lambda m=other: m.merge_adapter()))  # type: ignore[misc]
        peer = ratio(theirs)
        goal = round(peer.median / 10, 3)
        found.append(Figure(f"merge: {method.title}", ratio(ours), peer, goal, "s"))
    return found


def loading(shape: Shape, rounds: int) -> list[Figure]:
    """Loading many LoRA adapters, the first against the last, and switching between them."""
    base = shape.model()
    config = adapterzoo.LoRAConfig(r=8, target_modules=shape.targets)
    mine: Any = adapterzoo.init(twin(base))
    peer_config = peft.LoraConfig(r=8, target_modules=shape.targets)
    other: Any = peft.get_peft_model(twin(base), peer_config, adapter_name="0")
    with tempfile.TemporaryDirectory() as folder:
        mine.add_adapter("0", config)
        mine.save_adapter(Path(folder, "ours"), "0")
        mine.delete_adapter("0")
        other.save_pretrained(folder, selected_adapters=["0"])
        ours = [
            seconds(lambda i=i: mine.load_adapter(Path(folder, "ours"), load_as=f"a{i}"))  # type: ignore[misc]
            for i in range(4 * COUNT)
        ]
        theirs = [
            seconds(lambda i=i: other.load_adapter(Path(folder, "0"), adapter_name=f"a{i}"))  # type: ignore[misc]
            for i in range(COUNT)
        ]
    last, first = (statistics.median(times) for times in (ours[-10:], ours[:10]))
    names = [f"a{i % COUNT}" for i in range(4 * rounds)]
    switches = ratio([1e3 * seconds(lambda n=n: mine.set_active_adapters(n)) for n in names])  # type: ignore[misc]
    peer_switches = ratio([1e3 * seconds(lambda n=n: other.set_adapter(n)) for n in names[:rounds]])  # type: ignore[misc]
    first_fifty, peer_fifty = sum(ours[:COUNT]), sum(theirs)
    return [
        Figure("loading 50 LoRA adapters", _plain(first_fifty), _plain(peer_fifty), 0.4, "s"),
        Figure("the last 10 of 200 loads / the first 10", _plain(last / first), None, 1.1),
        Figure("the last 10 of 50 loads / the first 10", _plain(_growth(ours)),
               _plain(_growth(theirs)), 1.1),
        Figure("switching the adapter", switches, peer_switches, 2.0, "ms"),
    ]  # fmt: skip


def _growth(times: list[float]) -> float:
    """The last ten of the first fifty over the first ten."""
    return statistics.median(times[COUNT - 10 : COUNT]) / statistics.median(times[:10])


@torch.no_grad()
def mixing(shape: Shape, rounds: int) -> list[Figure]:
    """A batch in which each row has a LoRA adapter of its own, over the batch with one for all."""
    base = shape.model().eval()
    names = [f"a{i}" for i in range(shape.rows)]
    mine: Any = adapterzoo.init(twin(base))
    peer_config = peft.LoraConfig(r=8, target_modules=shape.targets, init_lora_weights=False)
    other: Any = peft.get_peft_model(twin(base), peer_config, adapter_name="a0").eval()
    for name in names:
        mine.add_adapter(
            name, adapterzoo.LoRAConfig(r=8, target_modules=shape.targets, init_weights="bert")
        )
        if name != "a0":
            other.add_adapter(name, peer_config)
    mine.set_active_adapters("a0")
    ids = torch.arange(shape.rows * shape.tokens).view(shape.rows, -1) % base.config.vocab_size

    def mixed(model: Any) -> Ratio:
        runs = {"mixed": lambda: model(input_ids=ids, adapter_names=names)}
        model(input_ids=ids)
        runs["mixed"]()
        found = ratios(
            lambda: model(input_ids=ids), runs, rounds, rivals=["mixed"][model is mine :]
        )
        return found["mixed"]

    goal = 1.10 if shape.tokens > 1 else 1.4
    title = f"mixed batch of {shape.rows} adapters / one, {shape.rows} × {shape.tokens}"
    return [Figure(title, mixed(mine), mixed(other), goal)]


# prints a line of seconds for each import; forks share what torch and transformers have loaded
_IMPORTS = """
import gc, os, sys, time, torch
from transformers import AutoModel, PreTrainedModel
gc.collect()
gc.freeze()
for what in sys.argv[2:]:
    for _ in range(int(sys.argv[1])):
        if not os.fork():
            start = time.process_time()
            exec(what)
            print(time.process_time() - start, end=" ", flush=True)
            os._exit(0)
        os.wait()
    print(flush=True)
"""


def importing() -> list[Figure]:
    """CPU time of an import from bytecode, on top of torch and the models of transformers."""
    runs = ["import adapterzoo; adapterzoo.AutoAdapterModel", "import peft"]
    with tempfile.TemporaryDirectory() as bytecode:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = bytecode
        command = [sys.executable, "-W", "ignore", "-c", _IMPORTS, "6", *runs]
        done = subprocess.run(command, capture_output=True, check=True, text=True, env=env)
    # the first of each compiles
    ours, theirs = (
        ratio([float(taken) for taken in line.split()[1:]]) for line in done.stdout.splitlines()
    )
    return [Figure("import after torch and transformers' models", ours, theirs, 0.25, "s")]


def _rounds(run: Callable[[], object], rounds: int) -> Ratio:
    run()
    return ratio([seconds(run) for _ in range(rounds)])


def _plain(value: float) -> Ratio:
    return Ratio(value, value, value)
