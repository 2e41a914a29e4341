"""Every operator under torch's `opcheck`: fake outputs have the shapes and strides of real ones.

`interpreted.py` runs it in Triton, and `test_ops.py` in torch operations.
"""

import torch

from adapterzoo import kernels
from adapterzoo.kernels import (
    bottleneck,
    butterfly,
    cayley,
    compose,
    dora,
    grouped,
    low_rank,
    ops,
)
from adapterzoo.kernels.grouped import Groups

__all__ = ["cases"]

_MODULES = (bottleneck, butterfly, cayley, compose, dora, grouped, low_rank)
S, P = 0.7, 0.3
IN, OUT, BATCH = 24, 20, 4
MODE = "triton" if ops.INTERPRETED else "auto"
# 80 is over every limit of a fused backward, 160 over that of rotations
RANKS = (3, 16, 80, 160)
# of activations of a width
LAYOUTS = {
    "rows": lambda width: torch.randn(BATCH, width),
    "one token": lambda width: torch.randn(BATCH, 1, width),
    "sequence first": lambda width: torch.randn(3, BATCH, width).transpose(0, 1),
    "columns": lambda width: torch.randn(width, 3, BATCH).permute(2, 1, 0),
}


def noise(x):
    """What the forward would draw."""
    return low_rank.dropout_seed(x) if MODE == "triton" else low_rank.dropout_bits(x, P)


def low_rank_update(rank, of):
    x, y, t, a, b = of(IN), of(OUT), of(rank), torch.randn(rank, IN), torch.randn(OUT, rank)
    for drawn in (None, noise(x)):
        yield "low_rank_shrink", (x, a, P, drawn)
        yield "low_rank_shrink_backward", (t, x, a, P, drawn, True, True)
        yield "low_rank_shrink_backward", (t, x, a, P, drawn, False, True)
    yield "low_rank_expand", (y, t, b, S)
    yield "low_rank_expand_backward", (y, t, b, S, True, True)
    yield "low_rank_expand_backward", (y, t, b, S, True, False)


def composed(rank, of):
    y, t, b = of(OUT), of(rank), torch.randn(OUT, rank)
    gain, bias = torch.rand(OUT) + 1, torch.randn(OUT)
    for own, update in ((bias, (t, b)), (None, (t, b)), (bias, (None, None))):
        yield "compose", (y, gain, own, *update, S, False, None, None)
        needs = (True, True, own is not None, *[update[0] is not None] * 2)
        yield "compose_backward", (of(OUT), y, gain, own, *update, S, False, *needs)


def norms(rank, of):
    yield "row_norm", (torch.randn(IN, OUT).T, torch.randn(rank, IN), torch.randn(OUT, rank), S)
    yield (
        "row_norm",
        (torch.randn(2, OUT, IN), torch.randn(2, rank, IN), torch.randn(2, OUT, rank), S),
    )

    yield "row_gain", (torch.randn(OUT, IN), *of_rank(rank), torch.randn(OUT), S)
    yield (
        "row_gain",
        (torch.randn(2, OUT, IN), *of_rank(rank, 2), torch.randn(OUT, 2).T, S),
    )


def of_rank(rank, *experts):
    """Factors."""
    return torch.randn(*experts, rank, IN), torch.randn(*experts, OUT, rank)


def rotations(width, of):
    x, blocks = of(2 * width), torch.randn(2, width, width)
    for own in (blocks, blocks.mT):
        yield "rotate", (x, own)
        yield "rotate_backward", (of(2 * width), x, own, True, True)
    yield "cayley", (blocks.mT,)
    for m in (1, 2, 3):
        R = torch.randn(2, m, 8, width, width) if width == 3 and m == 1 else torch.randn(m, 8, 6, 6)
        dropped = torch.rand(*R.shape[:-2]) < 0.4
        for mask in (None, dropped):
            yield "cayley_fold", (R.mT, mask)
            chunk = R.shape[-1] << (m - 1)
            whole = torch.randn(*R.shape[:-4], 8 >> (m - 1), chunk, chunk)
            yield "cayley_fold_backward", (whole.mT, whole, R, mask)


def bottlenecks(width, of):
    to, x, dy, h = of(IN), of(IN), of(IN), of(width)
    down, up = torch.randn(width, IN), torch.randn(IN, width)
    for phi in ("relu", "silu"):
        for read in (None, x):
            given = (read, down, torch.randn(width), up, torch.randn(IN))
            yield "bottleneck", (to, *given, S, phi, True)
            adds = read is None
            yield "bottleneck_backward", (dy, x, h, down, up, S, phi, adds, *[True] * 5)


def mixed_batches(rank, of):
    x, y, t = of(IN), of(OUT), of(rank)
    a, b = torch.randn(3, rank, IN), torch.randn(3, OUT, rank)
    index, scales = Groups.of([2, None, 0, 2]).host, torch.tensor([0.5, 1.0, 2.0]).double()
    for drawn in (None, noise(x)):
        yield "grouped_shrink", (x, a, P, drawn, index)
        yield "grouped_shrink_backward", (t, x, a, P, drawn, index, True, True)
    yield "grouped_expand", (y, t, b, scales, index)
    yield "grouped_expand_backward", (y, t, b, scales, index, True, True)


CHECKED = (low_rank_update, composed, norms, rotations, bottlenecks, mixed_batches)
CHECKS = ("test_schema", "test_faketensor")


def checked(made, rank, of):
    with kernels.use(MODE), torch.no_grad():
        for name, args in made(rank, of):
            op = getattr(torch.ops.adapterzoo, name).default
            try:
                torch.library.opcheck(op, args, test_utils=CHECKS)
            except torch.testing._internal.optests.OpCheckError as error:
                raise ValueError(f"{name}: {error.__cause__ or error}") from error


def all_of_them():
    """No operator is left out."""
    names = {name for made in CHECKED for name, _ in made(3, LAYOUTS["rows"])}
    defined = torch._C._dispatch_get_all_op_names()
    assert {n.partition("::")[2] for n in defined if n.startswith("adapterzoo::")} == names


def cases(only=None):
    """Name and check of each case, or of those of one function."""
    for made in CHECKED:
        if only not in (None, made.__name__):
            continue
        for rank in RANKS:
            for layout, of in LAYOUTS.items():
                name = f"{made.__name__}, {rank}, {layout}"
                yield name, lambda m=made, r=rank, o=of: checked(m, r, o)
    yield "all of them", all_of_them
