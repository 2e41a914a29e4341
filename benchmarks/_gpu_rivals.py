"""A linear layer with LoRA or DoRA beside the fastest that torch alone offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from _gpu_bench import Bench
from _gpu_clock import SETS, Runs
from _gpu_layers import TARGET, model_of, steps_of, up_of
from _gpu_methods import PEERS, Method, low_rank, parameters_of
from _gpu_report import Cell, Row
from adapterzoo import kernels

_RANK = 16
_SCALING = 2.0
# forward of a layer from its input, weight and the adapter's parameters
Formula = Callable[..., Tensor]


class LargeProductLast(torch.autograd.Function):
    """LoRA whose large products come last and read the update in their epilogue (beta = 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return `x Wᵀ + s x Aᵀ Bᵀ`. `x` `[rows, d_in]`, result `[rows, d_out]`."""
        t = x @ a.T  # [rows, rank]
        ctx.save_for_backward(x, w, a, b, t)
        y = torch.mm(_SCALING * t, b.T)  # [rows, d_out]
        return y.addmm_(x, w.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, A and B."""
        (dy,), (x, w, a, b, t) = grads, ctx.saved_tensors
        dt = _SCALING * (dy @ b)  # [rows, rank]
        dx = torch.mm(dt, a)  # [rows, d_in]
        return dx.addmm_(dy, w), None, dt.T @ x, _SCALING * (dy.T @ t)


def large_product_last(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return `LargeProductLast` of the operands."""
    found: Tensor = LargeProductLast.apply(x, w, a, b)  # type: ignore[no-untyped-call]
    return found


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Hu et al. 2021, eq. 3: `x Wᵀ + s x Aᵀ Bᵀ`."""
    return linear(x, w) + _SCALING * linear(linear(x, a), b)


def dora(x: Tensor, w: Tensor, a: Tensor, b: Tensor, m: Tensor) -> Tensor:
    """Liu et al. 2024, eq. 5: the same, times m over the norm of each row of `W + s B A`."""
    norm = torch.linalg.vector_norm(w + _SCALING * (b @ a), dim=1, dtype=torch.float32)
    gain = (m / norm.detach()).to(x.dtype)  # [d_out]
    return lora(x, w, a, b).mul(gain)


def rivals(bench: Bench) -> Iterator[Row]:
    """Forward and backward over those of the layer alone."""
    rows = bench.plan.layer_rows[0]
    # the widest first
    for d_in, d_out in sorted(bench.plan.layers, key=lambda size: -size[1])[:2]:
        base = None
        for method, formula in (
            (low_rank(_RANK, 0.0, False), lora),
            (low_rank(_RANK, 0.0, True), dora),
        ):
            title = f"{method.title}, {rows} × {d_in} → {d_out}"
            if bench.wants(title, method.kernels):
                base = model_of(bench, d_in, d_out) if base is None else base
                yield _rival(bench, base, method, formula, rows, title)


def _rival(bench: Bench, base: Any, method: Method, formula: Formula, rows: int, title: str) -> Row:
    plain = up_of(base)
    w = plain.weight
    inputs = [
        torch.randn(rows, plain.in_features, device=bench.device).bfloat16().requires_grad_()
        for _ in range(SETS)
    ]
    dy = torch.randn(rows, plain.out_features, device=bench.device).bfloat16()
    ours, theirs = method.put(base, TARGET), method.put_peft(base, TARGET, False)
    a, b = (
        torch.randn(n, device=bench.device).bfloat16()
        for n in ((_RANK, w.shape[1]), (w.shape[0], _RANK))
    )
    own = [a, b] if formula is lora else [a, b, w.float().norm(dim=1)]
    trained = [each.requires_grad_() for each in own]
    # the compiler of a CPU says nothing about that of a GPU
    compiled = torch.compile(formula, backend="eager" if bench.is_dry else "inductor")
    runs: dict[str, Runs] = {
        "floor": steps_of(plain, [], inputs, dy),
        "adapterzoo": steps_of(up_of(ours), parameters_of(ours), inputs, dy),
        "the formula": steps_of(lambda x: formula(x, w, *trained), trained, inputs, dy),
        "torch.compile": steps_of(lambda x: compiled(x, w, *trained), trained, inputs, dy),
    }
    if formula is lora:
        runs["beta = 1"] = steps_of(
            lambda x: large_product_last(x, w, *trained), trained, inputs, dy
        )
    if theirs is not None:
        layer = up_of(theirs.get_base_model())
        runs["PEFT bf16"] = steps_of(layer, parameters_of(theirs), inputs, dy)
    with kernels.use("auto"):
        times = bench.clock.interleaved(
            runs, bench.until, failing=(*PEERS, "torch.compile", "beta = 1")
        )
    cells: dict[str, Cell] = {name: times.over_floor(name) for name in list(runs)[1:]}
    if formula is lora:
        cells["beta = 1 of a fresh adapter"] = _fresh_bits(plain, inputs[0], a)
    return Row(title, cells, {}, {"milliseconds": times.milliseconds})


@torch.no_grad()
def _fresh_bits(plain: Any, x: Tensor, a: Tensor) -> str:
    """Whether an update of zero keeps the bits of the layer, though the product adds to it."""
    zeros = a.new_zeros(plain.out_features, _RANK)
    same = torch.equal(large_product_last(x, plain.weight, a, zeros), plain(x))
    return "the same bits" if same else "other bits"
