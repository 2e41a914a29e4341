"""The reports of users that adapterzoo was started for, each asked of this device.

Five of them: replicas on one device agree; BOFT computes, merges and trains in every dtype; DoRA
runs in float16 on a CPU; DoRA needs no more memory than PEFT's; loaded adapters have the bits of
the saved ones. Beside them: fresh adapters keep the bits of the base model, and the tests marked
`gpu`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import adapterzoo
from _gpu_bench import Bench, Body
from _gpu_layers import TARGET, model_of, steps_of, up_of
from _gpu_methods import low_rank, parameters_of, stirred
from _gpu_models import PROJECTIONS
from _gpu_report import Goal, Row
from adapterzoo import kernels

ROOT = Path(__file__).resolve().parents[1]
BODIES = {
    False: Body("4 layers", 2048, 5632, 4, 8, 2, 512),
    True: Body("a tiny Llama", 64, 96, 1, 4, 2, 64),
}
HALVES = (torch.bfloat16, torch.float16)
# rounding of a model's logits, by dtype
_CLOSE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def asked(bench: Bench, name: str) -> Iterator[Row]:
    """Ask one report.

    Yields:
        One row: what was found, and whether it is right.
    """
    good, found = REPORTS[name](bench)
    yield row_of(name, found, good)


def row_of(name: str, found: str, good: bool) -> Row:
    """The row of a report."""
    return Row(name, {"found": found}, {"found": Goal("right", good)})


def _model(bench: Bench, dtype: torch.dtype) -> Any:
    return adapterzoo.init(BODIES[bench.is_dry].model(bench.device, dtype).eval())


def _with(bench: Bench, config: Any, dtype: torch.dtype) -> Any:
    """A model with a trained adapter, in evaluation."""
    model = _model(bench, dtype)
    model.add_adapter("a", config)
    model.train_adapter("a")
    return stirred(model).eval()


def _ids(bench: Bench) -> Tensor:
    tokens = 8 if bench.is_dry else 64
    return torch.randint(BODIES[bench.is_dry].vocabulary, (2, tokens), device=bench.device)


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids).logits
    return found


def _off(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def _low_rank_configs() -> dict[str, Any]:
    fields: dict[str, Any] = {"r": 16, "alpha": 32, "target_modules": PROJECTIONS}
    return {"LoRA": adapterzoo.LoRAConfig(**fields), "DoRA": adapterzoo.DoRAConfig(**fields)}


def replicas(bench: Bench) -> tuple[bool, str]:
    """A replica on the device computes the bits of the model."""
    model = _with(bench, _low_rank_configs()["DoRA"], torch.float32)
    ids = _ids(bench)
    right = _logits(model, ids)
    if bench.device.type != "cuda":
        return True, "no device to replicate on"
    parallel = nn.DataParallel(model, device_ids=[bench.device.index])
    replica = nn.parallel.replicate(model, [bench.device.index], detach=True)[0]
    found = [_logits(each, ids) for each in (parallel, replica)]
    return all(torch.equal(each, right) for each in found), "the bits of DataParallel and a replica"


def boft(bench: Bench) -> tuple[bool, str]:
    """BOFT equals its definition, merges, and all its gradients are finite and not zero."""
    notes, good = [], True
    for dtype, close in _CLOSE.items():
        for b, m in ((4, 1), (8, 2)):
            config = adapterzoo.BOFTConfig(
                boft_block_size=b, boft_n_butterfly_factor=m, target_modules=PROJECTIONS
            )
            model, ids = _with(bench, config, dtype), _ids(bench)
            found = _logits(model, ids)
            with kernels.use("reference"):
                defined = _logits(model, ids)
            model.train()
            model(input_ids=ids, labels=ids).loss.backward()
            grads = [p.grad for p in parameters_of(model)]
            dead = sum(g is None or not g.isfinite().all() or not g.any() for g in grads)
            model.eval().zero_grad()
            model.merge_adapter("a")
            offs = _off(found, defined), _off(_logits(model, ids), found)
            good &= max(offs) < close and not dead
            name = f"{str(dtype).removeprefix('torch.')} b={b} m={m}"
            notes.append(f"{name}: kernels {offs[0]:.1e}, merged {offs[1]:.1e}, {dead} dead")
    return good, "; ".join(notes)


def dora_on_cpu(bench: Bench) -> tuple[bool, str]:
    """DoRA's forward and backward in float16 on a CPU are those of float32."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    body = BODIES[True].model(cpu, torch.float32)
    model = low_rank(4, 0.0, True).put(body, PROJECTIONS)
    ids = torch.randint(body.config.vocab_size, (2, 8))
    right = _logits(model, ids)
    half = model.half()
    loss = half(input_ids=ids, labels=ids).loss
    loss.backward()
    off = _off(_logits(half, ids), right)
    grads = [p.grad for p in parameters_of(half)]
    finite = all(g is not None and bool(g.isfinite().all()) for g in grads)
    return off < _CLOSE[torch.float16] and finite, f"off by {off:.1e} from float32"


def dora_memory(bench: Bench) -> tuple[bool, str]:
    """A step of a layer with DoRA adds no more memory than with PEFT's."""
    (d_in, d_out), rows = bench.plan.layers[0], bench.plan.layer_rows[0]
    base = model_of(bench, d_in, d_out)
    x = torch.randn(rows, d_in, device=bench.device).bfloat16().requires_grad_()
    dy = torch.randn(rows, d_out, device=bench.device).bfloat16()
    method = low_rank(16, 0.0, True)
    ours, theirs = method.put(base, TARGET), method.put_peft(base, TARGET, False)
    layers = {"the layer": (up_of(base), []), "adapterzoo": (up_of(ours), parameters_of(ours))}
    if theirs is not None:
        layers["PEFT"] = up_of(theirs.get_base_model()), parameters_of(theirs)
    peaks = {
        name: bench.clock.peak_bytes(steps_of(layer, trained, [x], dy)[0])
        for name, (layer, trained) in layers.items()
    }
    good = peaks["adapterzoo"] <= peaks.get("PEFT", float("inf"))
    return good, ", ".join(f"{name} {peak / 1e6:.0f} MB" for name, peak in peaks.items())


def loading(bench: Bench) -> tuple[bool, str]:
    """A loaded adapter has the fingerprint and the bits of the saved one."""
    wrong = []
    for name, config in _low_rank_configs().items():
        for dtype in HALVES:
            model, ids = _with(bench, config, dtype), _ids(bench)
            right = _logits(model, ids)
            with tempfile.TemporaryDirectory() as folder:
                model.save_adapter(folder, "a")
                other = _model(bench, dtype)
                other.load_adapter(folder, load_as="a", set_active=True)
            same = model.adapter_fingerprint("a") == other.adapter_fingerprint("a")
            if not same or not torch.equal(_logits(other.eval(), ids), right):
                wrong.append(f"{name} {dtype}")
    return not wrong, f"other bits: {', '.join(wrong)}" if wrong else "the same bits"


def fresh(bench: Bench) -> tuple[bool, str]:
    """A fresh adapter keeps the bits of the base model."""
    wrong = []
    for name, config in _low_rank_configs().items():
        model, ids = _model(bench, torch.bfloat16), _ids(bench)
        plain = _logits(model, ids)
        model.add_adapter("a", config)
        model.set_active_adapters("a")
        if not torch.equal(_logits(model, ids), plain):
            wrong.append(name)
    return not wrong, f"other bits: {', '.join(wrong)}" if wrong else "the same bits"


def marked_tests(bench: Bench) -> tuple[bool, str]:
    """The tests that need a device."""
    files = [f for f in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in f.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, *map(str, sorted(files))],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines() or ["pytest printed nothing"]
    # the time that it took would be the only figure of a dry run
    return done.returncode == 0, re.sub(r" in [0-9.]+s.*", "", lines[-1]).strip("= ")


REPORTS: dict[str, Callable[[Bench], tuple[bool, str]]] = {
    "BOFT in every dtype": boft,
    "loading": loading,
    "fresh adapters": fresh,
    "replicas": replicas,
    "DoRA's memory": dora_memory,
    "DoRA in float16 on a CPU": dora_on_cpu,
    "tests marked gpu": marked_tests,
}
