"""Every kernel of adapterzoo, with random operands and the same function in float64.

One entry of `KERNELS` is all that a new kernel needs: the gate checks it at each of its tile
configurations, and the section on kernels times it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from adapterzoo.kernels import (
    bottleneck,
    bottleneck_triton,
    butterfly,
    butterfly_triton,
    cayley,
    cayley_fold_triton,
    compose,
    compose_triton,
    dora,
    grouped,
    low_rank,
    low_rank_triton,
    row_norm_triton,
    tiles_triton,
)
from adapterzoo.kernels.grouped import Groups, chunk_rows

S = 0.7
P = 0.1

Operands = Mapping[str, Tensor]
# rows, rank and dtype of the products to a configuration
TileOf = Callable[[int, int, torch.dtype], Any]
# the operands and the gradient of the result, which a forward does not read
Rival = Callable[[Operands, Tensor], object]


@dataclass(frozen=True)
class Shape:
    """Sizes of the operands.

    Attributes:
        rows: of the activations.
        d_in: features that go in.
        d_out: features that come out.
        rank: of the factors; of a rotation the width of its chunks.
    """

    rows: int
    d_in: int
    d_out: int
    rank: int

    def __str__(self) -> str:
        """For tables."""
        return f"{self.rows} × {self.d_in} → {self.d_out}, {self.rank}"


@dataclass(frozen=True)
class Kind:
    """Dtypes of the operands, and how far from float64 the result may be.

    Attributes:
        outer: of activations and weights.
        factor: of the factors.
        limit: for ‖out − truth‖ / ‖truth‖.
    """

    outer: torch.dtype
    factor: torch.dtype
    limit: float


KINDS = {
    "bfloat16": Kind(torch.bfloat16, torch.bfloat16, 1e-2),
    "float16": Kind(torch.float16, torch.float16, 2e-3),
    "bfloat16, float32 factors": Kind(torch.bfloat16, torch.float32, 1e-2),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel, or the pair of its forward and its backward.

    Attributes:
        name: for tables.
        sizes: names of the operands to their sizes, from a shape.
        fixed: operands of a dtype that does not follow the kind.
        factors: operands that are factors.
        run: the public function, on the operands.
        truth: the definition, written anew for operands in float64.
        grads: operands whose gradients are computed, and written by a backward pass.
        kept: operands that the backward reads.
        flops: of the forward.
        tiles: its configurations.
        ranks: at which it is checked.
        aligned: ranks at which it is checked at sizes like those of models.
        timed: ranks at which it is timed.
        few: rows up to which there is another configuration.
        roundings: how often what is in between is rounded to the kind's dtype: times its limit.
        limit: instead of the kind's, where sums and results are float32 whatever goes in.
        rivals: forward and backward in the fastest operations of torch, products by cuBLAS, in the
            dtype of the activations; None: only the definition is there.
    """

    name: str
    sizes: Callable[[Shape], dict[str, tuple[int, ...]]]
    run: Callable[[Operands], Tensor]
    truth: Callable[[Operands], Tensor]
    grads: tuple[str, ...]
    kept: tuple[str, ...]
    flops: Callable[[Shape], int]
    tiles: tuple[TileOf, ...]
    factors: tuple[str, ...] = ("a", "b", "t")
    fixed: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (3, 24, 100)
    aligned: tuple[int, ...] = (16, 32, 48, 64, 128)
    timed: tuple[int, ...] = (16, 64, 384)
    few: int = 64
    limit: float | None = None
    roundings: float = 1.0
    rivals: tuple[Rival | None, Rival | None] = (None, None)

    def draw(self, shape: Shape, kind: Kind, device: torch.device) -> dict[str, Tensor]:
        """Fresh random operands, those of `grads` with gradients."""
        made = {}
        for name, size in self.sizes(shape).items():
            dtype = kind.factor if name in self.factors else kind.outer
            dtype = torch.float32 if name in self.fixed else dtype
            made[name] = torch.randn(size, device=device, dtype=torch.float32).to(dtype)
            made[name].requires_grad_(name in self.grads)
        return made

    def moved(self, operands: Operands, out: Tensor, backward: bool) -> int:
        """The fewest bytes that the kernel can move: inputs read once, outputs written once."""
        if not backward:
            return sum(t.nbytes for t in operands.values()) + out.nbytes
        # the gradient of what is only added to is the incoming one itself
        written = [name for name in self.grads if name in self.kept]
        return out.nbytes + sum(operands[name].nbytes for name in (*self.kept, *written))


def _mask(x: Tensor) -> Tensor:
    """What dropout multiplies `x` by, from torch's seed of this moment: Philox 4x32-7."""
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    seed = low_rank.dropout_seed(x)
    low = 0xFFFFFFFF
    keys = [seed & low, seed >> 32]
    # eight draws of 16 bits come from one counter
    counters = -(-width // 8)
    row = torch.arange(rows, device=x.device)[:, None]  # [rows, 1]
    column = torch.arange(counters, device=x.device)[None, :]  # [1, counters]
    zeros = torch.zeros(rows, counters, device=x.device, dtype=torch.int64)
    words = [row + zeros, column + zeros, zeros, zeros]
    for _ in range(7):
        # products of 32 bits wrap into the sign, which the masks take away
        left, right = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            (right >> 32) & low ^ words[1] ^ keys[0],
            right & low,
            (left >> 32) & low ^ words[3] ^ keys[1],
            left & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    halves = [words[i] >> shift & 0xFFFF for i in (0, 2, 1, 3) for shift in (0, 16)]
    drawn = torch.stack(halves, -1).flatten(1)[:, :width]  # [rows, width]
    kept = (drawn >= low_rank.dropout_threshold(P)).double().view(x.shape)  # [*rows, width]
    return kept * low_rank.dropout_scale(P)


def _compose_sizes(s: Shape) -> dict[str, tuple[int, ...]]:
    sizes = {"y": (s.rows, s.d_out), "gain": (s.d_out,), "bias": (s.d_out,)}
    return {**sizes, "t": (s.rows, s.rank), "b": (s.d_out, s.rank)}


def _compose(v: Operands) -> Tensor:
    return compose.compose(v["y"], v["gain"], v["bias"], v["t"], v["b"], S)


def _composed(v: Operands) -> Tensor:
    return (v["y"] + S * v["t"] @ v["b"].T - v["bias"]) * v["gain"] + v["bias"]


def _rotated(v: Operands) -> Tensor:
    x, blocks = v["x"], v["blocks"]
    parts = x.view(-1, *blocks.shape[:2])  # [rows, chunks, width]
    return torch.einsum("rci,cij->rcj", parts, blocks).reshape(x.shape)  # [*rows, d_in]


def _rotate(v: Operands) -> Tensor:
    return butterfly.rotated(v["x"], v["blocks"].unsqueeze(0))


def _bottleneck(v: Operands) -> Tensor:
    x, down, down_bias, up, up_bias = v.values()
    return bottleneck.bottleneck(x, x, down, down_bias, up, up_bias, S, "swish")


def _bottlenecked(v: Operands) -> Tensor:
    x, down, down_bias, up, up_bias = v.values()
    return x + S * linear(silu(linear(x, down, down_bias)), up, up_bias)


def _grouped_sizes(s: Shape) -> dict[str, tuple[int, ...]]:
    batch, count = len(_ADAPTERS), max(i or 0 for i in _ADAPTERS) + 1
    tokens = _tokens(s.rows)
    return {
        "y": (batch, tokens, s.d_out),
        "x": (batch, tokens, s.d_in),
        "a": (count, s.rank, s.d_in),
        "b": (count, s.d_out, s.rank),
    }


def _grouped(v: Operands) -> Tensor:
    a, b = v["a"].unbind(), v["b"].unbind()
    return grouped.grouped_low_rank(v["y"], v["x"], a, b, (S,) * len(a), _GROUPS)


def _grouped_truth(v: Operands) -> Tensor:
    rows = [
        y if i is None else y + S * x @ v["a"][i].T @ v["b"][i].T
        for y, x, i in zip(v["y"], v["x"], _ADAPTERS, strict=True)
    ]
    return torch.stack(rows)  # [batch, tokens, d_out]


def _tokens(rows: int) -> int:
    return -(-rows // len(_ADAPTERS))


def _blocks(s: Shape) -> dict[str, tuple[int, ...]]:
    chunks = -(-s.d_in // s.rank)
    return {"x": (s.rows, chunks * s.rank), "blocks": (chunks, s.rank, s.rank)}


def _composed_by_torch(v: Operands, dy: Tensor) -> Tensor:
    gain, bias = v["gain"].to(dy.dtype), v["bias"]
    y = torch.addmm(v["y"], v["t"], v["b"].T, alpha=S) if "t" in v else v["y"]
    return torch.addcmul((1 - gain) * bias, y, gain)


def _compose_gradients(v: Operands, dy: Tensor) -> tuple[Tensor, ...]:
    of_y = dy * v["gain"].to(dy.dtype)
    of_gain = (dy * v["y"]).sum(0)
    if "t" not in v:
        return of_y, of_gain, dy.sum(0)
    return of_y, of_gain, of_y @ v["b"], of_y.T @ v["t"]


def _row_norms(v: Operands, dy: Tensor) -> Tensor:
    whole = torch.addmm(v["w"], v["b"], v["a"], alpha=S)
    norms: Tensor = torch.linalg.vector_norm(whole, dim=-1, dtype=torch.float32)
    return norms


def _parts(x: Tensor, v: Operands) -> Tensor:
    chunks: Tensor = x.unflatten(-1, v["blocks"].shape[:2])  # [rows, chunks, width]
    return chunks.transpose(0, 1)  # [chunks, rows, width]


def _rotated_by_torch(v: Operands, dy: Tensor) -> Tensor:
    whole = torch.bmm(_parts(v["x"], v), v["blocks"].to(dy.dtype))  # [chunks, rows, width]
    return whole.transpose(0, 1).flatten(1)  # [rows, d_in]


def _rotate_gradients(v: Operands, dy: Tensor) -> tuple[Tensor, ...]:
    grad = _parts(dy, v)
    dx = torch.bmm(grad, v["blocks"].to(dy.dtype).mT)  # [chunks, rows, width]
    return dx.transpose(0, 1).flatten(1), torch.bmm(_parts(v["x"], v).mT, grad)


def _bottleneck_by_torch(v: Operands, dy: Tensor) -> Tensor:
    h = silu(torch.addmm(v["down_bias"], v["x"], v["down"].T))
    return v["x"] + S * torch.addmm(v["up_bias"], h, v["up"].T)


def _turns(s: Shape) -> dict[str, tuple[int, ...]]:
    # wider chunks have one factor
    m = 2 if 2 <= s.rank <= 32 else 1
    return {"r": (m, m * -(-s.d_in // s.rank), s.rank // m, s.rank // m)}


# of each row of a mixed batch; one is far from its neighbour, one has none, none is sorted
_ADAPTERS = (2, 0, None, 4, 0, 2, 1, 3)
_GROUPS = Groups.of(_ADAPTERS)

_SHRINK = (low_rank_triton.shrink_tile,)
_EXPAND = (
    compose_triton.compose_tile,
    lambda rows, rank, dtype: compose_triton.compose_backward_tile(rows, rank, dtype, True),
)
_COMPOSE = (compose_triton.compose_tile, compose_triton.compose_backward_tile)
_ROTATE = (
    lambda rows, rank, dtype: butterfly_triton.rotate_tile(rows, rank),
    lambda rows, rank, dtype: butterfly_triton.rotate_tile(rows, rank, True),
)

KERNELS = [
    Kernel(
        "shrink",
        lambda s: {"x": (s.rows, s.d_in), "a": (s.rank, s.d_in)},
        lambda v: low_rank.shrink(v["x"], v["a"]),
        lambda v: v["x"] @ v["a"].T,
        ("x", "a"),
        ("x", "a"),
        lambda s: 2 * s.rows * s.d_in * s.rank,
        _SHRINK,
        rivals=(
            lambda v, dy: torch.mm(v["x"], v["a"].T),
            lambda v, dy: (torch.mm(dy, v["a"]), torch.mm(dy.T, v["x"])),
        ),
    ),
    Kernel(
        "shrink, dropout",
        lambda s: {"x": (s.rows, s.d_in), "a": (s.rank, s.d_in)},
        lambda v: low_rank.shrink(v["x"], v["a"], P, training=True),
        lambda v: (v["x"] * _mask(v["x"])) @ v["a"].T,
        ("x", "a"),
        ("x", "a"),
        lambda s: 2 * s.rows * s.d_in * s.rank,
        _SHRINK,
    ),
    Kernel(
        "expand",
        lambda s: {"y": (s.rows, s.d_out), "t": (s.rows, s.rank), "b": (s.d_out, s.rank)},
        lambda v: low_rank.expand(v["y"], v["t"], v["b"], S),
        lambda v: v["y"] + S * v["t"] @ v["b"].T,
        ("y", "t", "b"),
        ("t", "b"),
        lambda s: 2 * s.rows * s.d_out * s.rank,
        _EXPAND,
        rivals=(
            # in place: y grows from call to call, which no time shows
            lambda v, dy: v["y"].addmm_(v["t"], v["b"].T, alpha=S),
            lambda v, dy: (torch.mm(dy, S * v["b"]), torch.mm(dy.T, S * v["t"])),
        ),
    ),
    Kernel(
        "compose",
        _compose_sizes,
        _compose,
        _composed,
        ("y", "gain", "t", "b"),
        ("y", "gain", "t", "b"),
        lambda s: 2 * s.rows * s.d_out * s.rank,
        _COMPOSE,
        fixed=("gain",),
        rivals=(_composed_by_torch, _compose_gradients),
    ),
    Kernel(
        "compose, frozen b",
        _compose_sizes,
        _compose,
        _composed,
        ("y", "gain", "t"),
        ("y", "gain", "t", "b"),
        lambda s: 2 * s.rows * s.d_out * s.rank,
        (
            compose_triton.compose_tile,
            lambda rows, rank, dtype: compose_triton.compose_backward_tile(
                rows, rank, dtype, needs_b=False
            ),
        ),
        fixed=("gain",),
        timed=(16,),
    ),
    Kernel(
        "compose, no update",
        lambda s: {"y": (s.rows, s.d_out), "gain": (s.d_out,), "bias": (s.d_out,)},
        lambda v: compose.compose(v["y"], v["gain"], v["bias"]),
        lambda v: (v["y"] - v["bias"]) * v["gain"] + v["bias"],
        ("y", "gain", "bias"),
        ("y", "gain", "bias"),
        lambda s: 2 * s.rows * s.d_out,
        (
            lambda rows, rank, dtype: compose_triton.compose_tile(rows, 0, dtype),
            lambda rows, rank, dtype: compose_triton.compose_backward_tile(rows, 0, dtype),
        ),
        fixed=("gain",),
        ranks=(1,),
        aligned=(1,),
        timed=(1,),
        rivals=(_composed_by_torch, _compose_gradients),
    ),
    Kernel(
        "row_norm",
        lambda s: {"w": (s.rows, s.d_in), "a": (s.rank, s.d_in), "b": (s.rows, s.rank)},
        lambda v: dora.row_norm(v["w"], v["a"], v["b"], S),
        lambda v: torch.linalg.vector_norm(v["w"] + S * v["b"] @ v["a"], dim=-1),
        (),
        (),
        lambda s: 2 * s.rows * s.d_in * s.rank,
        (row_norm_triton.row_norm_tile,),
        few=4096,
        limit=1e-5,
        rivals=(_row_norms, None),
    ),
    Kernel(
        "row_norm, gain",
        lambda s: {
            "w": (s.rows, s.d_in),
            "a": (s.rank, s.d_in),
            "b": (s.rows, s.rank),
            "m": (s.rows,),
        },
        lambda v: dora.row_gain(v["w"], v["a"], v["b"], v["m"], S),
        lambda v: v["m"] / torch.linalg.vector_norm(v["w"] + S * v["b"] @ v["a"], dim=-1),
        ("m",),
        ("m",),
        lambda s: 2 * s.rows * s.d_in * s.rank,
        (row_norm_triton.row_norm_tile,),
        fixed=("m",),
        timed=(16,),
        few=4096,
        limit=1e-5,
    ),
    Kernel(
        "rotate",
        _blocks,
        _rotate,
        _rotated,
        ("x", "blocks"),
        ("x", "blocks"),
        lambda s: 2 * s.rows * s.d_in * s.rank,
        _ROTATE,
        fixed=("blocks",),
        ranks=(16, 32, 64, 128),
        aligned=(16, 32, 48, 64, 128),
        timed=(16, 32, 64),
        rivals=(_rotated_by_torch, _rotate_gradients),
    ),
    Kernel(
        "cayley_fold",
        _turns,
        lambda v: cayley.cayley_fold(v["r"]).squeeze(-4),
        lambda v: butterfly.fold(cayley.cayley_reference(v["r"]), 1),
        ("r",),
        ("r",),
        lambda s: 2 * s.d_in * s.rank**2,
        (lambda rows, rank, dtype: cayley_fold_triton.cayley_fold_tile(rank),),
        fixed=("r",),
        ranks=(16, 32, 64),
        aligned=(16, 32, 64),
        timed=(16, 32, 64),
        limit=1e-5,
    ),
    Kernel(
        "bottleneck",
        lambda s: {
            "x": (s.rows, s.d_in),
            "down": (s.rank, s.d_in),
            "down_bias": (s.rank,),
            "up": (s.d_in, s.rank),
            "up_bias": (s.d_in,),
        },
        _bottleneck,
        _bottlenecked,
        ("x", "down", "down_bias", "up", "up_bias"),
        ("x", "down", "down_bias", "up", "up_bias"),
        lambda s: 4 * s.rows * s.d_in * s.rank,
        (bottleneck_triton.bottleneck_tile, _EXPAND[1]),
        factors=("down", "down_bias", "up", "up_bias"),
        ranks=(3, 24, 64, 128, 256),
        aligned=(16, 32, 48, 64, 128, 256),
        timed=(64, 128, 256),
        roundings=2.0,
        rivals=(_bottleneck_by_torch, None),
    ),
    Kernel(
        "grouped low rank",
        _grouped_sizes,
        _grouped,
        _grouped_truth,
        ("y", "x", "a", "b"),
        ("x", "a", "b"),
        lambda s: 2 * s.rows * (s.d_in + s.d_out) * s.rank,
        (
            lambda rows, rank, dtype: low_rank_triton.chunk_tile(
                chunk_rows(_tokens(rows)), rank, dtype
            ),
            lambda rows, rank, dtype: tiles_triton.update_tile(
                chunk_rows(_tokens(rows)), rank, dtype
            ),
            lambda rows, rank, dtype: low_rank_triton.outer_tile(rank, dtype, True),
        ),
        timed=(16, 64),
        roundings=2.0,
    ),
]
