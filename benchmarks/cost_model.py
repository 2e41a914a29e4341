"""MODEL, not a measurement: what adapters cost on a GPU, from the bytes that each plan moves.

    python benchmarks/cost_model.py              prints the tables
    python benchmarks/cost_model.py --write      writes them to docs/benchmarks.md

The floor is the forward and backward of a frozen linear layer: two products of 2 · M · K · N FLOP,
at the rate of the device. Each kernel of an adapter adds the bytes that it moves over the bandwidth
that it reaches, or its FLOP over the rate that it reaches, whichever takes longer, and a fixed time
for each launch. All rates are assumptions, which options change. A plan is a table of passes:
update the table when the code changes. x and dx are `[M, K]`, y and dy `[M, N]`, W `[N, K]`, all in
bfloat16; *parts* are float32 partial sums, written and read once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
START, END = "<!-- cost model: start -->\n", "<!-- cost model: end -->\n"
HALF, FLOAT = 2, 4


@dataclass(frozen=True)
class Device:
    """Assumptions about a GPU like the H200; none of them was measured here.

    Attributes:
        beta: FLOP of a large bfloat16 product in the time of one byte of a large copy.
        bandwidth: of the copy, bytes per second.
        launch: seconds that a launch takes on the device beyond its work.
        multiprocessors: programs of a large product that run at one time.
        reached: share of the copy's bandwidth, by kind of pass.
        matrix: share of the product's rate that a narrow product reaches.
    """

    beta: float = 184.0
    bandwidth: float = 4.29e12
    launch: float = 1.5e-6
    multiprocessors: int = 132
    reached: Mapping[str, float] = field(
        default_factory=lambda: {
            "forward": 0.85,  # kernels whose loads are pipelined
            "serial": 0.55,  # backward kernels that wait for each load
            "waits less": 0.60,  # expand_backward, which loads one tensor ahead
            "pipelined": 0.80,  # backward kernels with 3 stages and more programs
            "cuBLAS": 0.85,  # narrow products
            "torch": 0.90,  # elementwise operations
            "row_norm": 0.70,
        }
    )
    matrix: float = 0.6

    def perfect(self) -> Device:
        """The same with all of the bandwidth, and launches that take no time."""
        every = dict.fromkeys(self.reached, 1.0)
        return Device(self.beta, self.bandwidth, 0.0, self.multiprocessors, every, 1.0)


@dataclass(frozen=True)
class Layer:
    """A linear layer and its tokens.

    Attributes:
        rows: tokens.
        d_in: features that go in.
        d_out: features that come out.
        sharing: how many layers read the same x, whose adapters share their passes over x and dx.
    """

    rows: int
    d_in: int
    d_out: int
    sharing: int = 1

    def __str__(self) -> str:
        """For tables."""
        return f"{self.rows} × {self.d_in} → {self.d_out}"

    def floor(self, device: Device) -> float:
        """Seconds of the forward and the backward of the frozen layer."""
        flops = 4.0 * self.rows * self.d_in * self.d_out
        return flops / device.beta / device.bandwidth


@dataclass(frozen=True)
class Pass:
    """One kernel, or one product of cuBLAS with the launches around it.

    Attributes:
        name: of the kernel.
        reaches: key of `Device.reached`.
        x: how many times it moves x or dx.
        y: how many times it moves y or dy.
        w: how many times it reads or writes W.
        x_parts: rows of a block with partial sums `[K, rank]`; 0: there are none.
        y_parts: the same for `[N, rank]`.
        products: narrow products of x or y with a factor.
        launches: of it and of the reductions that it needs.
        wait: seconds that no bandwidth explains.
    """

    name: str
    reaches: str
    x: float = 0.0
    y: float = 0.0
    w: float = 0.0
    x_parts: int = 0
    y_parts: int = 0
    products: int = 0
    launches: int = 1
    wait: float = 0.0

    def seconds(self, layer: Layer, rank: int, device: Device) -> float:
        """Return what it adds to the floor."""
        x, y = layer.rows * layer.d_in / layer.sharing, layer.rows * layer.d_out
        moved = HALF * (self.x * x + self.y * y + self.w * layer.d_in * layer.d_out)
        for block, width in ((self.x_parts, layer.d_in), (self.y_parts, layer.d_out)):
            moved += 2 * FLOAT * rank * width * ceil(layer.rows / block) if block else 0
        wide = layer.rows * (layer.d_in if self.x else layer.d_out)
        rate = device.beta * device.bandwidth * device.matrix
        by_flops = 2.0 * self.products * wide * rank / rate
        by_bytes = moved / (device.reached[self.reaches] * device.bandwidth)
        ideal = device.launch == 0.0
        return max(by_bytes, by_flops) + device.launch * self.launches + (not ideal) * self.wait


Plan = Callable[[int], Sequence[Pass]]
"""From a rank to the passes of one layer, forward and backward."""

_SHRINK = Pass("shrink", "forward", x=1, products=1)
_NORM = Pass("row_norm, with the Gram matrix", "row_norm", w=1, launches=2, wait=8e-6)
_ROTATE = Pass("rotate", "forward", x=2)


# what the code did at commit 08e5e5a, which the review of the kernels describes


def _lora_before(rank: int) -> Sequence[Pass]:
    narrow = rank <= 64
    return (
        _SHRINK,
        Pass("expand", "forward", y=2, products=1),
        Pass("expand_backward", "waits less", y=1, y_parts=_block(rank), products=2, launches=4)
        if narrow
        else Pass("expand_backward in torch", "cuBLAS", y=2, products=2, launches=5),
        _shrink_backward_before(rank),
        Pass("autograd adds dx", "torch", x=3),
    )


def _dora_before(rank: int) -> Sequence[Pass]:
    narrow = rank <= 64
    return (
        _SHRINK,
        _NORM,
        Pass("compose", "forward", y=2, products=1),
        Pass("compose_backward", "serial", y=3, y_parts=128 if narrow else 0, launches=5),
        *(() if narrow else [Pass("dt, db in torch", "cuBLAS", y=2, products=2, launches=2)]),
        Pass("gain, gradients of gain and B", "torch", launches=20),
        _shrink_backward_before(rank),
        Pass("autograd adds dx", "torch", x=3),
    )


def _shrink_backward_before(rank: int) -> Pass:
    if rank > 64:
        return Pass("shrink_backward in torch", "cuBLAS", x=2, products=2, launches=3)
    return Pass("shrink_backward", "serial", x=2, x_parts=_block(rank), products=2, launches=4)


def _block(rank: int) -> int:
    """Return the rows of a block of the backward kernels, each of which has its partial sums."""
    return 256 if rank <= 16 else 128


def _boft_before(rank: int) -> Sequence[Pass]:
    return (
        Pass("Cayley and fold, forward and backward", "torch", launches=40, wait=125e-6),
        _ROTATE,
        Pass("compose", "forward", y=2),
        Pass("compose_backward", "serial", y=3, launches=4),
        Pass("rotate_backward", "serial", x=3, launches=2),
    )


BEFORE: dict[str, Plan] = {"LoRA": _lora_before, "DoRA": _dora_before, "BOFT 8,2": _boft_before}


# what the code does now


_OF_A = Pass("dA = dtᵀ x", "cuBLAS", x=1, products=1, launches=2)
# a layer and its update are one node, which adds to the gradient of x in place
_FORK = (Pass("dx += dt A", "cuBLAS", x=2, products=1), _OF_A)
# they are two
_TWO_NODES = (
    Pass("dx = dt A", "cuBLAS", x=1, products=1),
    Pass("autograd adds dx", "torch", x=3),
    _OF_A,
)
_WIDEST = 32


def _lora_now(rank: int) -> Sequence[Pass]:
    return (
        _SHRINK,
        Pass("expand", "forward", y=2, products=1),
        Pass("expand_backward", "pipelined", y=1, y_parts=128, products=2, launches=2)
        if rank <= _WIDEST
        else Pass("dt, dB in torch", "cuBLAS", y=2, products=2, launches=4),
        *_FORK,
    )


def _dora_now(rank: int, of_x: Sequence[Pass] = _TWO_NODES) -> Sequence[Pass]:
    narrow = rank <= _WIDEST
    return (
        _SHRINK,
        _NORM,
        Pass("compose", "forward", y=2, products=1),
        Pass("compose_backward", "pipelined", y=3, y_parts=128 if narrow else 0),
        *(() if narrow else [Pass("dt, dB in torch", "cuBLAS", y=2, products=2, launches=3)]),
        Pass("finishing kernel", "torch"),
        *of_x,
    )


def _boft_now(rank: int) -> Sequence[Pass]:
    return (
        Pass("Cayley and fold, forward and backward", "torch", launches=2, wait=12e-6),
        _ROTATE,
        Pass("compose", "forward", y=2),
        Pass("compose_backward", "pipelined", y=3, launches=2),
        Pass("rotate, with sums", "pipelined", x=3, launches=2),
    )


NOW: dict[str, Plan] = {"LoRA": _lora_now, "DoRA": _dora_now, "BOFT 8,2": _boft_now}
# with all of the bandwidth, and DoRA's layer and update in one node
IDEAL: dict[str, Plan] = {**NOW, "DoRA": lambda rank: _dora_now(rank, _FORK)}


def ratio(plan: Plan, layer: Layer, rank: int, device: Device) -> float:
    """Return the forward and backward of the layer with an adapter over those of the floor."""
    added = sum(each.seconds(layer, rank, device) for each in plan(rank))
    return 1.0 + added / layer.floor(device)


# plans that read x or dy less often in a LoRA layer; each is compared with `_lora_now`


@dataclass(frozen=True)
class Alternative:
    """One way to move fewer bytes.

    Attributes:
        title: for the table.
        passes: of the plan.
        forward: whether the forward's product has `N + rank` columns.
        backward: whether the backward's product has the depth `N + rank`.
        slower: how much longer its own products take than those of cuBLAS.
        memory: what it keeps.
        obstacle: why it is not free, in a few words.
    """

    title: str
    passes: Plan
    forward: bool = False
    backward: bool = False
    slower: float = 0.0
    memory: str = "nothing"
    obstacle: str = ""


def _replaced(rank: int, gone: Sequence[str], *new: Pass) -> Sequence[Pass]:
    return (*(each for each in _lora_now(rank) if each.name not in gone), *new)


_DY = ("expand_backward", "dt, dB in torch")
# of the added tile, two widths that cuBLAS uses for a large product
_TILES = ((128, 128), (128, 256))
# the product's depth goes in steps
_DEPTH = 64

ALTERNATIVES: tuple[Alternative, ...] = (
    Alternative(
        "x [W; A]ᵀ, one product",
        lambda rank: _replaced(rank, ("shrink",)),
        forward=True,
        memory="W and A in one allocation",
        obstacle="the added columns take a whole tile of the product",
    ),
    Alternative(
        "[dy, dt] [W; A], one product",
        # the pass that computes dt copies dy beside it
        lambda rank: _replaced(
            rank,
            (*_DY, "dx += dt A"),
            Pass("dt, dB, copies dy", "pipelined", y=2, y_parts=_block(rank), products=2)
            if rank <= _WIDEST
            else Pass("dt, dB in torch, copies dy", "cuBLAS", y=4, products=2, launches=3),
        ),
        backward=True,
        memory="W and A in one allocation; a copy of dy",
        obstacle="dy is copied",
    ),
    Alternative(
        "both",
        lambda rank: tuple(each for each in ALTERNATIVES[1].passes(rank) if each.name != "shrink"),
        forward=True,
        backward=True,
        memory="W and A in one allocation; a copy of dy",
        obstacle="as above",
    ),
    Alternative(
        "update written first, products add to it",
        # y = t Bᵀ + x Wᵀ and dx = dt A + dy W with beta = 1; that the products read what they add
        # to is taken to cost nothing
        lambda rank: _replaced(
            rank,
            ("expand", "dx += dt A"),
            Pass("u = s t Bᵀ", "cuBLAS", y=1, products=1),
            Pass("dx = dt A", "cuBLAS", x=1, products=1),
        ),
        obstacle="an upper bound; replaces the forward of the layer",
    ),
    *(
        Alternative(
            f"own product that adds the update, {slower:.0%} slower than cuBLAS",
            lambda rank: tuple(
                each
                for each in _lora_now(rank)
                if each.name not in ("shrink", "expand", "dx += dt A")
            ),
            slower=slower,
            obstacle="a product of our own at every layer",
        )
        for slower in (0.0, 0.05, 0.1)
    ),
    Alternative(
        "W' = W + s B A in each forward and backward",
        lambda rank: (
            Pass("W', twice", "forward", w=4, launches=2),
            Pass("dt", "cuBLAS", y=1, products=1),
            Pass("t and dA", "pipelined", x=1, x_parts=_block(rank), products=2, launches=2),
            Pass("dB", "cuBLAS", y=1, products=1, launches=2),
        ),
        memory="one W' at a time",
        obstacle="no dropout, no mixed batch",
    ),
    Alternative(
        "W' = W + s B A, kept for the backward",
        lambda rank: (
            Pass("W'", "forward", w=2),
            Pass("dt", "cuBLAS", y=1, products=1),
            Pass("t and dA", "pipelined", x=1, x_parts=_block(rank), products=2, launches=2),
            Pass("dB", "cuBLAS", y=1, products=1, launches=2),
        ),
        memory="W again for each layer",
        obstacle="as above, and the memory",
    ),
)


def waves(rows: int, columns: int, tile: tuple[int, int], device: Device) -> int:
    """Return how many times all multiprocessors compute a tile of the product."""
    return ceil(ceil(rows / tile[0]) * ceil(columns / tile[1]) / device.multiprocessors)


def gain(
    alternative: Alternative,
    layers: Sequence[Layer],
    rank: int,
    device: Device,
    tile: tuple[int, int],
) -> float:
    """Return the share of the step of LoRA layers that the plan saves; negative: it costs more."""
    now = then = 0.0
    for layer in layers:
        floor = layer.floor(device)
        now += floor * ratio(_lora_now, layer, rank, device)
        after = ratio(alternative.passes, layer, rank, device) + alternative.slower
        # each of the two products is half of the floor
        if alternative.forward:
            # the part of a tile beyond rank is computed too; whole waves can lose more
            tiles = [ceil(n / tile[1]) for n in (layer.d_out, layer.d_out + rank)]
            after += 0.5 * (tiles[1] / tiles[0] - 1.0) / layer.sharing
        if alternative.backward:
            after += 0.5 * ceil(rank / _DEPTH) * _DEPTH / layer.d_out
        then += floor * after
    return (now - then) / now


# the linear layers of one block of Llama 8B
BLOCK = (
    Layer(8192, 4096, 4096, 3),
    Layer(8192, 4096, 1024, 3),
    Layer(8192, 4096, 1024, 3),
    Layer(8192, 4096, 4096),
    Layer(8192, 4096, 14336, 2),
    Layer(8192, 4096, 14336, 2),
    Layer(8192, 14336, 4096),
)
LAYERS = (
    Layer(8192, 4096, 4096),
    Layer(2048, 4096, 4096),
    Layer(8192, 4096, 14336),
    Layer(8192, 14336, 4096),
)


def table_of_ratios(rank: int, device: Device) -> list[str]:
    """Return the layer ratios of each method: ideal / before / now."""
    lines = [_line(["MODEL", *(f"{name}: ideal / before / now" for name in NOW)])]
    lines.append(_line(["---"] * (len(NOW) + 1)))
    for layer in LAYERS:
        cells = [
            " / ".join(
                f"{ratio(plan, layer, rank, of):.2f}"
                for plan, of in (
                    (IDEAL[name], device.perfect()),
                    (BEFORE[name], device),
                    (NOW[name], device),
                )
            )
            for name in NOW
        ]
        lines.append(_line([str(layer), *cells]))
    return lines


def table_of_alternatives(device: Device) -> list[str]:
    """Return what each plan saves of a LoRA layer's step, in percent, at ranks 16 and 64."""
    shown: dict[str, Sequence[Layer]]
    shown = {f"{layer.d_in} → {layer.d_out}": (layer,) for layer in LAYERS if layer.rows == 8192}
    shown["block of Llama 8B"] = BLOCK
    lines = [_line(["MODEL: % of a step saved, r = 16 · r = 64", *shown, "memory", "obstacle"])]
    lines.append(_line(["---"] * (len(shown) + 3)))
    for each in ALTERNATIVES:
        cells = []
        for layers in shown.values():
            found = []
            for rank in (16, 64):
                # the same number where no tile is added
                both = [f"{100 * gain(each, layers, rank, device, tile):+.1f}" for tile in _TILES]
                found.append(" / ".join(dict.fromkeys(both)))
            cells.append(" · ".join(found))
        lines.append(_line([each.title, *cells, each.memory, each.obstacle]))
    return lines


def table_of_waves(device: Device) -> list[str]:
    """Return how many waves of tiles the forward's product takes without and with A's rows."""
    tiles = [f"{rows} × {columns}" for rows, columns in _TILES]
    lines = [_line(["waves of tiles: N, N + 16, N + 64", *tiles])]
    lines.append(_line(["---"] * (len(tiles) + 1)))
    for layer in LAYERS:
        counts = [
            ", ".join(str(waves(layer.rows, layer.d_out + r, tile, device)) for r in (0, 16, 64))
            for tile in _TILES
        ]
        lines.append(_line([str(layer), *counts]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def text(rank: int, device: Device) -> str:
    """Return the three tables."""
    tables = table_of_ratios(rank, device), table_of_alternatives(device), table_of_waves(device)
    return "\n\n".join("\n".join(lines) for lines in tables) + "\n"


def main() -> None:
    """Read the assumptions from the command line; print the tables, or write them."""
    default = Device()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--beta", type=float, default=default.beta, help="FLOP per byte")
    parser.add_argument("--bandwidth", type=float, default=default.bandwidth, help="bytes / s")
    parser.add_argument("--launch", type=float, default=default.launch, help="seconds")
    parser.add_argument("--multiprocessors", type=int, default=default.multiprocessors)
    parser.add_argument("--write", action="store_true", help="with the defaults, to docs/")
    options = parser.parse_args()
    if options.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(START)
        after = rest.split(END)[1]
        tables = text(16, default)
        PAGE.write_text(f"{before}{START}\n{tables}\n{END}{after}", encoding="utf-8")
        return
    device = Device(
        options.beta, options.bandwidth, options.launch, options.multiprocessors, default.reached
    )
    print(text(options.rank, device), end="")


if __name__ == "__main__":
    main()
