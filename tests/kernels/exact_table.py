"""The exact costs of `tests/data/exact.json`: counts and bytes, equal on every machine.

`make exact` writes the table that `test_exact.py` computes again. A change of a figure is part of
the change that causes it.

- saved bytes: what a training step keeps for the backward, beyond the frozen base.
- saved bytes beside formulas: the same for methods and for their plain formula of `_formulas`.
- operators: beyond the frozen base, of a training step and of a forward in evaluation.
- launches: of the kernels of one Llama layer, forward and backward, counted without a GPU.
- frames: that `torch.compile` compiles while adapters of one config are switched.
- checkpoint bytes: of the file that holds an adapter's tensors.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from families import tiny_config
from frames_table import frames, made
from test_costs import BASES, METHODS, adapted, counted, kept_bytes
from test_launch import MODULES, kernels_of
from test_launch_counts import METHODS as LAUNCHED
from test_launch_counts import Counted
from transformers import AutoModel

from _formulas import FORMULAS, base_model, kept
from adapterzoo import init, kernels
from adapterzoo.config import AdapterConfig
from adapterzoo.kernels import ops

TABLE = Path(__file__).parents[1] / "data" / "exact.json"
TOKENS = 160

Rows = dict[str, Callable[[], Any]]


def saved() -> Rows:
    """Bytes by base and method."""
    return {
        f"{base}: {method}": lambda b=base, m=method: kept_bytes(b, adapted(b, m), TOKENS)
        for base in BASES
        for method in METHODS
    }


def beside_formulas() -> Rows:
    """Bytes of adapterzoo and of the formula, for each method that has one."""
    base = base_model(width=256)
    return {
        method.title: lambda m=method: list(kept(m, base, rows=2, tokens=TOKENS))
        for method in FORMULAS
    }


def operators() -> Rows:
    """Operators of a step and of an evaluation; dropout of the base adds none."""
    return {
        f"{base}: {method}": lambda b=base, m=method: list(counted(b, m))
        for base in BASES
        if "dropout" not in base
        for method in METHODS
    }


def launches() -> Rows:
    """Launches of each kernel, forward and backward."""
    return {method: lambda m=method: _launches(m) for method in LAUNCHED}


def _launches(method: str) -> dict[str, dict[str, int]]:
    log: Counter[str] = Counter()
    found = {}
    with contextlib.ExitStack() as stack:
        for module, name in kernels_of(*MODULES):
            kernel = Counted(getattr(module, name), log)
            stack.enter_context(mock.patch.object(module, name, kernel))
        stack.enter_context(mock.patch.object(ops, "INTERPRETED", True))
        stack.enter_context(kernels.use("triton"))
        config = tiny_config("llama")
        config.num_hidden_layers = 1
        model: Any = init(AutoModel.from_config(config))
        adapter: Any = AdapterConfig.load(LAUNCHED[method])
        model.add_adapter("a", replace(adapter, target_modules=r".*_proj"))
        model.train_adapter("a")
        model.train()
        log.clear()
        out = model(inputs_embeds=torch.randn(2, 7, 32, requires_grad=True), use_cache=False)[0]
        found["forward"] = dict(sorted(log.items()))
        log.clear()
        out.sum().backward()
        found["backward"] = dict(sorted(log.items()))
    return found


def compiled() -> Rows:
    """Frames over three adapters of a config."""

    def count(config: str) -> int:
        model = made(dict.fromkeys("abc", config))
        return frames(model, list("abc"), model.set_active_adapters)

    return {config: lambda c=config: count(c) for config in ("lora", "dora", "boft", "seq_bn")}


def files() -> Rows:
    """Bytes of a file."""

    def size(method: str) -> int:
        with tempfile.TemporaryDirectory() as folder:
            adapted("llama", method).save_adapter(folder, "a")
            (file,) = Path(folder).glob("*.safetensors")
            return file.stat().st_size

    return {method: lambda m=method: size(m) for method in METHODS}


PARTS: dict[str, Callable[[], Rows]] = {
    "saved bytes": saved,
    "saved bytes beside formulas": beside_formulas,
    "operators": operators,
    "launches": launches,
    "frames": compiled,
    "checkpoint bytes": files,
}


def compute(part: str) -> dict[str, Any]:
    """Return the figures of a part, as JSON has them."""
    return {name: figure() for name, figure in PARTS[part]().items()}


def read() -> dict[str, Any]:
    """Return the committed table."""
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Compute all, and write the table."""
    table = {"torch": torch.__version__.partition("+")[0]}
    table |= {part: compute(part) for part in PARTS}
    text = json.dumps(table, indent=1, ensure_ascii=False)
    TABLE.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
