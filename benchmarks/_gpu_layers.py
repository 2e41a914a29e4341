"""Kernels alone, and single layers with an adapter: forward and backward over the layer's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, LlamaConfig

import adapterzoo
from _gpu_bench import SETS, Bench, Runs, timed_shapes
from _gpu_kernels import KERNELS, KINDS, Kernel, Rival, Shape
from _gpu_methods import (
    PEERS,
    Method,
    boft_methods,
    layer_methods,
    low_rank,
    parameters_of,
    stirred,
    twin,
)
from _gpu_report import Cell, Goal, Row, at_least, at_most
from _measure import Ratio
from adapterzoo import kernels

# of the layer in a model that has nothing else
TARGET = r".*up_proj"


def ceilings(bench: Bench) -> Iterator[Row]:
    """What the device can do: a large copy, bytes read and written; a large matrix product."""
    clock, plan, device = bench.clock, bench.plan, bench.device
    source = torch.randn(plan.copy_bytes // 2, device=device, dtype=torch.bfloat16)
    copying: Runs = [partial(torch.empty_like(source).copy_, source)]
    times = clock.interleaved({"copy": copying}, bench.until)
    bandwidth = 2 * source.nbytes / times.median("copy")
    yield Row("copy, read and written", {"GB/s": bandwidth / 1e6}, facts={"rate": bandwidth})
    n = plan.gemm
    left, right = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = clock.interleaved({"product": [partial(torch.mm, left, right)]}, bench.until)
    rate = 2.0 * n**3 / times.median("product")
    yield Row(f"bfloat16 product of {n}³", {"TFLOP/s": rate / 1e9}, facts={"rate": rate})


def alone(bench: Bench) -> Iterator[Row]:
    """Each kernel against what the device can do, and against its definition in torch."""
    for kernel in KERNELS:
        for shape in timed_shapes(kernel, bench.plan):
            for passes in (1, 2) if kernel.grads else (1,):
                figure = title_of(kernel, shape, passes)
                if bench.wants(figure, (kernel.name,)):
                    yield _alone(bench, kernel, shape, passes, figure)


def title_of(kernel: Kernel, shape: Shape, passes: int) -> str:
    """The name of a kernel's row; two passes are a backward."""
    return f"{kernel.name}, {'backward' if passes == 2 else 'forward'}, {shape}"


def runs_alone(
    bench: Bench, kernel: Kernel, shape: Shape, passes: int, mode: str = "auto"
) -> tuple[dict[str, Runs], int]:
    """The kernel, its rival in cuBLAS and its definition, and the fewest bytes they can move.

    Args:
        bench: gives the device.
        kernel: what is timed.
        shape: of its operands.
        passes: 1 for the forward, 2 for the backward.
        mode: of `kernels.use`, for the kernel.
    """
    sets = [kernel.draw(shape, KINDS["bfloat16"], bench.device) for _ in range(SETS)]
    with torch.no_grad(), kernels.use("reference"):
        out = kernel.run(sets[0])
    make = _backward if passes == 2 else _forward
    runs: dict[str, Runs] = {"kernel": [make(kernel, v, mode) for v in sets]}
    rival = kernel.rivals[passes - 1]
    if rival is not None:
        runs["cuBLAS"] = [_rival(rival, v, torch.randn_like(out)) for v in sets]
    runs["reference"] = [make(kernel, v, "reference") for v in sets]
    return runs, kernel.moved(sets[0], out, passes == 2)


def _rival(run: Rival, operands: dict[str, Tensor], dy: Tensor) -> Callable[[], object]:
    def again() -> None:
        with torch.no_grad():
            run(operands, dy)

    return again


def _alone(bench: Bench, kernel: Kernel, shape: Shape, passes: int, figure: str) -> Row:
    runs, moved = runs_alone(bench, kernel, shape, passes)
    failing = ("cuBLAS", "reference")
    times = bench.clock.interleaved(
        runs, bench.until, failing=failing, together=bench.plan.together
    )
    taken = times.median("kernel")
    flops = passes * kernel.flops(shape)
    bandwidth = moved / taken / bench.bandwidth
    rate = flops / taken / bench.rate
    # what is bound by the matrix unit cannot fill the memory's bandwidth
    by_memory = moved / bench.bandwidth > flops / bench.rate
    return Row(
        figure,
        {
            "µs": 1e3 * taken,
            "of the copy": bandwidth,
            "of the product": rate,
            "times faster than cuBLAS": times.over("cuBLAS", "kernel"),
            "times faster than the reference": times.over("reference", "kernel"),
        },
        {"of the copy": at_least(bandwidth, 0.8)} if by_memory else {},
        {
            "kernel": kernel.name,
            "passes": passes,
            "rank": shape.rank,
            "bytes": moved,
            "flops": flops,
            "milliseconds": times.milliseconds,
        },
    )


def _forward(kernel: Kernel, operands: dict[str, Tensor], mode: str) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad(), kernels.use(mode):
            kernel.run(operands)

    return run


def _backward(kernel: Kernel, operands: dict[str, Tensor], mode: str) -> Callable[[], object]:
    with kernels.use(mode):
        out = kernel.run(operands)
    dy = torch.randn_like(out)
    # those that are only added to get the incoming gradient itself
    inputs = [operands[name] for name in kernel.grads if name in kernel.kept]

    def run() -> None:
        with kernels.use(mode):
            torch.autograd.grad(out, inputs, dy, retain_graph=True)

    return run


def layers(bench: Bench) -> Iterator[Row]:
    """Forward and backward of a linear layer with an adapter, over those of the layer alone."""
    rows, ranks = bench.plan.layer_rows, bench.plan.ranks
    # the headline first, with PEFT's two dtypes: what there is no time for is at the end
    wide = sorted(bench.plan.layers, key=lambda size: -size[1])
    for d_in, d_out in wide[:1]:
        yield from _layers(bench, d_in, d_out, rows[0], [layer_methods(ranks[-1])[2]])
    for rank in ranks:
        for d_in, d_out in bench.plan.layers:
            for many in rows:
                methods = layer_methods(rank)
                if rank == ranks[0]:
                    methods += boft_methods(35 if d_in > 8192 else 5 if many > 4096 else 12)
                yield from _layers(bench, d_in, d_out, many, methods)


def _layers(bench: Bench, d_in: int, d_out: int, rows: int, methods: list[Method]) -> Iterator[Row]:
    base = None
    for method in methods:
        title = f"{method.title}, {rows} × {d_in} → {d_out}"
        if bench.wants(title, method.kernels):
            base = model_of(bench, d_in, d_out) if base is None else base
            yield _layer(bench, base, method, rows, title)


def _layer(bench: Bench, base: Any, method: Method, rows: int, title: str) -> Row:
    plain = up_of(base)
    inputs = [
        torch.randn(rows, plain.in_features, device=bench.device).bfloat16().requires_grad_()
        for _ in range(SETS)
    ]
    dy = torch.randn(rows, plain.out_features, device=bench.device).bfloat16()
    ours = method.put(base, TARGET)
    runs = {
        "floor": steps_of(plain, [], inputs, dy),
        "adapterzoo": steps_of(up_of(ours), parameters_of(ours), inputs, dy),
    }
    for name, cast in PEERS.items():
        theirs = method.put_peft(base, TARGET, cast)
        if theirs is not None:
            runs[name] = steps_of(up_of(theirs.get_base_model()), parameters_of(theirs), inputs, dy)
    # the same again: differences below its spread are noise
    runs["floor again"] = steps_of(plain, [], inputs, dy)
    with kernels.use("auto"):
        times = bench.clock.interleaved(runs, bench.until, failing=tuple(PEERS))
    found = {name: times.over_floor(name) for name in ("adapterzoo", *PEERS, "floor again")}
    faster = {name: times.over(name, "adapterzoo") for name in method.over_peft}
    cells: dict[str, Cell] = dict(found)
    goals: dict[str, Goal] = {}
    if method.layer is not None:
        goals["adapterzoo"] = at_most(found["adapterzoo"], method.layer)
    for name, factor in method.over_peft.items():
        cells[f"times faster than {name}"] = faster[name]
        goals[f"times faster than {name}"] = at_least(faster[name], factor)
    return Row(title, cells, goals, {"milliseconds": times.milliseconds})


def bottlenecks(bench: Bench) -> Iterator[Row]:
    """A bottleneck behind a feed-forward part, against the same operations one by one."""
    width = bench.plan.layers[0][0]
    base = model_of(bench, width, width)
    for rows in bench.plan.layer_rows:
        for d in bench.plan.bottlenecks:
            title = f"bottleneck d={d}, {rows} × {width}"
            if bench.wants(title, ("bottleneck", "expand")):
                yield _bottleneck(bench, base, rows, d, title)


def _bottleneck(bench: Bench, base: Any, rows: int, d: int, title: str) -> Row:
    plain = base.model.layers[0].mlp
    width = base.config.hidden_size
    model = adapterzoo.init(twin(base))
    config = adapterzoo.DoubleSeqBnConfig(
        reduction_factor=width / d, mh_adapter=False, non_linearity="relu"
    )
    model.add_adapter("a", config)
    model.train_adapter("a")
    ours = stirred(model.train()).model.layers[0].mlp
    inputs = [
        torch.randn(rows, width, device=bench.device).bfloat16().requires_grad_()
        for _ in range(SETS)
    ]
    dy = torch.randn(rows, width, device=bench.device).bfloat16()
    steps = steps_of(ours, parameters_of(model), inputs, dy)
    runs = {
        "floor": steps_of(plain, [], inputs, dy),
        "adapterzoo": [_under(step, "auto") for step in steps],
        "one by one": [_under(step, "reference") for step in steps],
    }
    times = bench.clock.interleaved(runs, bench.until)
    floor, fused, single = (times.median(name) for name in runs)
    # on a dry run a difference of two times may be anything
    faster = max(single - floor, 1e-6) / max(fused - floor, 1e-6)
    cells: dict[str, Cell] = {
        "adapterzoo": times.over_floor("adapterzoo"),
        "one by one": times.over_floor("one by one"),
        "times cheaper than one by one": Ratio(faster, faster, faster),
    }
    goals = {"times cheaper than one by one": at_least(faster, 3.0)}
    return Row(title, cells, goals, {"milliseconds": times.milliseconds})


def _under(run: Callable[[], object], mode: str) -> Callable[[], object]:
    def again() -> None:
        with kernels.use(mode):
            run()

    return again


def steps_of(module: Any, trained: list[Tensor], inputs: list[Tensor], dy: Tensor) -> Runs:
    """Forward and backward, one for each input."""

    def step(x: Tensor) -> None:
        torch.autograd.grad(module(x), [x, *trained], dy)

    return [lambda x=x: step(x) for x in inputs]  # type: ignore[misc]


def model_of(bench: Bench, d_in: int, d_out: int) -> Any:
    """A model whose `up_proj` is the layer, everything else as small as it can be."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=d_in,
        intermediate_size=d_out,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
    )
    with torch.device(bench.device):
        made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made.requires_grad_(False).train()


def up_of(model: Any) -> Any:
    return model.model.layers[0].mlp.up_proj


# --- a linear layer with LoRA or DoRA beside the fastest that torch alone offers ---


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
                yield _torch_rival(bench, base, method, formula, rows, title)


def _torch_rival(
    bench: Bench, base: Any, method: Method, formula: Formula, rows: int, title: str
) -> Row:
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
