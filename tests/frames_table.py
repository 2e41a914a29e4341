"""The table of `docs/switching.md`: frames compiled over 50 switches, counted here.

`make frames` writes the table that `test_frames.py` compares with what it counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from families import tiny_config, tiny_inputs
from graphs import Counting
from snapshots import output, stir
from variants import VARIANTS

from adapterzoo import (
    AdapterSetup,
    AutoAdapterModel,
    Average,
    BatchSplit,
    Fuse,
    LoRAConfig,
    Parallel,
    Split,
    Stack,
)

PAGE = Path(__file__).parents[1] / "docs" / "switching.md"
SWITCHES = 50
_START, _END = "<!-- written by `make frames` -->\n", "<!-- end -->\n"
HEAD = ("what is switched", "one slot", "set_active_adapters")

Switches = Iterator[Callable[[Any], None]]


def made(configs: dict[str, Any]) -> Any:
    """A model of one block with random adapters."""
    torch.manual_seed(0)
    config = tiny_config("bert")
    config.num_hidden_layers = 1
    model = AutoAdapterModel.from_config(config).eval()
    for seed, (name, config) in enumerate(configs.items()):
        model.add_adapter(name, config)
        stir(model, name, seed=seed)
    return model


def frames(model: Any, names: list[Any], switch: Callable[[Any], None], fullgraph=True) -> int:
    """Count the frames that torch compiles while adapters of a model are switched.

    Args:
        model: with adapters.
        names: what is switched to.
        switch: does it.
        fullgraph: whether the whole model is one graph.
    """
    torch._dynamo.reset()
    backend, seen = Counting(), []
    compiled = torch.compile(model, fullgraph=fullgraph, backend=backend)
    with torch.no_grad():
        for name in names:
            switch(name)
            expected = output(model)
            found = compiled(**tiny_inputs("bert"))[0]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            # each adapter gives an output of its own
            assert not any(torch.equal(found, other) for other in seen)
            seen.append(found)
    torch._dynamo.reset()
    return backend.graphs


def methods(variant: str, switches: int = SWITCHES) -> tuple[int, int]:
    """Frames over switches among adapters of a method, through a slot and by activation."""
    names = [f"a{i}" for i in range(switches)]
    model = made(dict.fromkeys([*names, "slot"], VARIANTS[variant]))
    active = frames(model, names, model.set_active_adapters)
    model.set_active_adapters("slot")
    slot = frames(model, names, lambda name: model.hotswap_adapter(name, into="slot"))
    return slot, active


def _compositions(kind: type, switches: int, config: Any = "lora", **options: Any) -> int:
    """Frames over switches among compositions of two adapters."""
    names = [f"a{i}" for i in range(switches)]
    model = made(dict.fromkeys(names, config))
    setups = [kind(*pair, **options) for pair in zip(names, [*names[1:], names[0]], strict=True)]
    if kind is Fuse:
        for setup in setups:
            model.add_adapter_fusion(setup)
    return frames(model, setups, model.set_active_adapters)


def _blocks(switches: int) -> int:
    names = [f"a{i}" for i in range(switches)]
    model = made(dict.fromkeys(names, "lora"))
    backend = Counting()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for name in names:
            with AdapterSetup(name):
                found = compiled(**tiny_inputs("bert"))[0]
                torch.testing.assert_close(found, output(model), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    return backend.graphs


def _ranks(switches: int) -> tuple[int, int]:
    """Frames for LoRA of three ranks, of which the slot has the largest."""
    names = {f"a{i}": LoRAConfig(r=(2, 4, 8)[i % 3]) for i in range(switches)}
    model = made({**names, "slot": LoRAConfig(r=8)})
    active = frames(model, [*names], model.set_active_adapters)
    model.set_active_adapters("slot")
    slot = frames(model, [*names], lambda name: model.hotswap_adapter(name, into="slot"))
    return slot, active


def _widths() -> list[int]:
    tokens = tiny_inputs("bert")["input_ids"].shape[1]
    return [3, tokens - 3]


OTHERS: dict[str, Callable[[int], tuple[int | None, int]]] = {
    "LoRA of ranks 2, 4 and 8": _ranks,
    "LoRA, `with AdapterSetup(…)`": lambda n: (None, _blocks(n)),
    "`Stack` of two LoRA": lambda n: (None, _compositions(Stack, n)),
    "`Average` of two LoRA": lambda n: (None, _compositions(Average, n, weights=[0.3, 0.7])),
    "`Split` of two LoRA": lambda n: (None, _compositions(Split, n, splits=_widths())),
    "`BatchSplit` of two LoRA": lambda n: (None, _compositions(BatchSplit, n, batch_sizes=1)),
    "`Parallel` of two LoRA": lambda n: (None, _compositions(Parallel, n)),
    "`Fuse` of two `seq_bn`": lambda n: (None, _compositions(Fuse, n, "seq_bn")),
}
"""Switches other than those among adapters of one config."""


def render(cells: dict[str, tuple[int | None, int]]) -> str:
    """The table."""
    lines = [HEAD, ["---"] * len(HEAD)]
    for name, row in cells.items():
        lines.append([name.replace("|", r"\|"), *("" if n is None else str(n) for n in row)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rows() -> dict[str, Callable[[int], tuple[int | None, int]]]:
    """What the table counts, by the first cell."""
    found = {f"`{name}`": lambda n, name=name: methods(name, n) for name in VARIANTS}
    return {**found, **OTHERS}


def read(page: str) -> dict[str, tuple[int | None, int]]:
    """The counts of a page."""
    table = page.partition(_START)[2].partition(_END)[0].strip().splitlines()[2:]
    split = [line.removeprefix("| ").removesuffix(" |").rsplit(" | ", 2) for line in table]
    return {
        name.replace(r"\|", "|"): (int(slot) if slot.strip() else None, int(n))
        for name, slot, n in split
    }


def main() -> int:
    """Count all, and write the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(_START)
    after = rest.partition(_END)[2]
    table = render({name: count(SWITCHES) for name, count in rows().items()})
    PAGE.write_text(f"{before}{_START}{table}{_END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
