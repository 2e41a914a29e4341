"""The low-rank update of a mixed batch in the interpreter; `interpreted.py` runs it."""

import math

import torch
from hostile import (
    LAYOUTS,
    arranged,
    both_gradients,
    drawn,
    edged,
    far,
    grouped_low_rank_reference,
)
from low_rank_cases import DTYPES, kept, rows_of
from rounded import Rounded, chained, right

from adapterzoo import kernels
from adapterzoo.kernels import grouped, grouped_triton, low_rank
from adapterzoo.kernels.grouped import Groups

SCALING = (0.7, 1.5, -0.25)
SHAPES = {
    # the adapter of each row, tokens, d_in, d_out, rank
    "one of each": ([0], 1, 1, 1, 1),
    "no rows": ([], 5, 33, 5, 3),
    "no tokens": ([0, 2], 0, 33, 5, 3),
    "no adapter": ([None, None], 3, 20, 36, 3),
    "one beside the chunk": ([1] * 17, 1, 33, 100, 3),
    "rows of all in turn": ([2, None, 0, 1, 1, None, 0], 3, 100, 33, 24),
    "an adapter without rows": ([2, 0, 2], 5, 40, 36, 8),
    "chunks that end inside a row": ([1, 0, 1, None], 70, 33, 20, 16),
    "several parts": ([1, 0], 2, 300, 270, 8),
    "rank over its tile": ([2, None, 1], 2, 40, 36, 100),
}


def against_float64(groups, x, dy, y, a, b, p=0.0, seed=None):
    """All products, each on the operands that it would have in a training step."""
    n, wide = a.shape[0], a.dtype
    plan = groups.plan(math.prod(x.shape[1:-1]), n, x.device)
    scales = groups.scales(SCALING[:n], x.device, torch.float32)
    mask = torch.ones(x.shape, dtype=torch.float64) if seed is None else kept(x.shape, p, seed)
    scaled = Rounded(mask * low_rank.dropout_scale(p))
    # each row's own factors, and zeros for a row without adapter
    index = groups.numbers("index", x.device)  # [batch]
    none = index < 0
    lead = (-1, *[1] * (x.dim() - 2))
    of_a, of_b = (v[index.clamp(min=0)].masked_fill(none.view(-1, 1, 1), 0.0) for v in (a, b))
    own_a, own_b = (Rounded(v.view(*lead, *v.shape[1:])) for v in (of_a, of_b))
    s = Rounded(torch.tensor(SCALING, dtype=torch.float64)[index].view(*lead, 1))
    # [n, rows, 1]: which rows are those of an adapter
    hot = (
        (torch.arange(n).view(-1, 1) == index)
        .repeat_interleave(math.prod(x.shape[1:-1]), 1)
        .unsqueeze(-1)
    )

    def times(u, factor):
        return (u.arranged(lambda v: v.unsqueeze(-2)) @ factor).arranged(lambda v: v.squeeze(-2))

    def outer(u, v):
        """The sum of uᵀ v over the rows of each adapter."""
        return u.arranged(lambda w: rows_of(w) * hot).mT @ v.arranged(rows_of)

    dropped, own_dy = Rounded(x.to(wide)) * scaled, Rounded(dy.to(wide))
    t = grouped_triton.shrink(x, a, p, seed, plan)
    right("t", t, times(dropped, own_a.mT), wide)
    own_t = Rounded(t)
    out = grouped_triton.expand(y, t, b, scales, plan)
    right("out", out, Rounded(y) + times(own_t, own_b.mT) * s, y.dtype)
    for row in torch.nonzero(none).flatten().tolist():
        same = out[row].contiguous().view(torch.uint8) == y[row].contiguous().view(torch.uint8)
        if not bool(same.all()):
            raise ValueError(f"row {row} without adapter has changed")
    dt, db = grouped_triton.expand_backward(dy, t, b, scales, plan)
    right("dt", dt, times(own_dy, own_b) * s, wide)
    right("db", db, outer(own_dy, own_t * s), b.dtype)
    dx, da = grouped_triton.shrink_backward(dt, x, a, p, seed, plan)
    own_dt = Rounded(dt)
    right("dx", dx, times(own_dt, own_a) * scaled, x.dtype)
    right("da", da, outer(own_dt, dropped), wide)
    # only what is needed
    assert torch.equal(grouped_triton.expand_backward(dy, t, b, scales, plan, False, True)[1], db)
    nothing = x.new_empty(0)
    lone, empty = grouped_triton.shrink_backward(dt, nothing, a, p, seed, plan, True, False)
    assert torch.equal(lone, dx)
    assert empty.numel() == 0


def cut_out(n, rows, width, dtype):
    """`[n, rows, width]`, each matrix with NaN all around."""
    return edged(n * (rows + 2), width, dtype).unflatten(0, (n, rows + 2))[:, 1:-1]


def shaped(shape, dtypes):
    index, tokens, d_in, d_out, rank = SHAPES[shape]
    outer, factor = DTYPES[dtypes]
    rows = len(index)
    x, dy, y = (
        edged(rows * tokens, d, outer).unflatten(0, (rows, tokens)) for d in (d_in, d_out, d_out)
    )
    if rows > 1 and tokens:
        y[1, 0, 0] = -0.0
    a, b = cut_out(3, rank, d_in, factor), cut_out(3, d_out, rank, factor)
    against_float64(Groups.of(index), x, dy, y, a, b)


def layout(name):
    x, dy, y = arranged(name, 18, 40), arranged(name, 18, 50), arranged(name, 18, 50)
    a, b = (arranged(name, 9, 40), arranged(name, 50, 9)) if x.dim() == 2 else (x, y)
    a, b = a.reshape(-1, 40)[:9].unflatten(0, (3, 3)), b.reshape(-1)[:450].view(3, 50, 3)
    index = [0, None, 2] * 6 if x.dim() == 2 else [2, 0]
    against_float64(Groups.of(index), x, dy, y, a, b)


def far_rows():
    rows = far(10, 20)
    a, b = drawn(2, 3, 20, dtype=torch.float16), drawn(2, 20, 3, dtype=torch.float16)
    against_float64(Groups.of([1, 0] * 5), rows, rows, rows, a, b)


def far_factors():
    a = far(10, 60).unflatten(-1, (3, 20))
    b = far(10, 60).unflatten(-1, (20, 3))
    x = drawn(2, 20, dtype=torch.float16)
    groups = Groups.of([9, 8])
    plan, scales = groups.plan(1, 10, x.device), torch.ones(10)
    t = grouped_triton.shrink(x, a, 0.0, None, plan)
    out = grouped_triton.expand(x, t, b, scales, plan)
    for row, i in enumerate((9, 8)):
        right("t", t[row], Rounded(x[row]) @ Rounded(a[i]).mT, t.dtype)
        truth = Rounded(x[row]) + Rounded(t[row]) @ Rounded(b[i]).mT
        right("out", out[row], truth, x.dtype)


def dropout():
    seed = torch.tensor([(123 << 32) + 77])
    x, dy, y = (drawn(3, 7, d, dtype=torch.float32) for d in (45, 20, 20))
    a, b = drawn(3, 3, 45, dtype=torch.float32), drawn(3, 20, 3, dtype=torch.float32)
    against_float64(Groups.of([2, None, 0]), x, dy, y, a, b, 0.3, seed)


def three_ways():
    """Triton, torch and the definition in float16: no further from float64 than twice the last."""
    index, dtype = [2, 0, None, 2, 1], torch.float16
    y, x = drawn(5, 6, 50, dtype=dtype), drawn(5, 6, 40, dtype=dtype)
    ranks = (1, 8, 5)
    a = [drawn(r, 40, dtype=dtype) for r in ranks]
    b = [drawn(50, r, dtype=dtype) for r in ranks]
    groups = Groups.of(index)
    wide = [[v.double() for v in values] for values in (a, b)]
    args = (y.double(), x.double(), *wide, SCALING, groups)
    truth = grouped_low_rank_reference(*args)
    plain = grouped_low_rank_reference(y, x, a, b, SCALING, groups)
    allowed = 2 * (plain.double() - truth).abs().max() + 1e-3
    for name in ("auto", "triton"):
        with kernels.use(name):
            out = grouped.grouped_low_rank(y, x, a, b, SCALING, groups)
        assert out.dtype is dtype
        assert (out.double() - truth).abs().max() <= allowed, name


def module():
    """Through the operators: gradients in float32 equal those of the definition in float64."""
    index, ranks, scaling = [2, 0, None, 2], (1, 4, 3), (0.7, 1.5, 0.25)
    shapes = [(4, 6, 5), (4, 6, 33), *[(r, 33) for r in ranks], *[(5, r) for r in ranks]]
    for p in (0.0, 0.25):
        own = [drawn(*s, dtype=torch.float32).requires_grad_() for s in shapes]
        groups = Groups.of(index)
        torch.manual_seed(3)
        with kernels.use("triton"):
            y, x, *factors = own
            args = (y, x, factors[:3], factors[3:], scaling, groups)
            out = grouped.grouped_low_rank(*args, p, training=True)
            found = [out, *both_gradients(out, own)]
        torch.manual_seed(3)
        seed = torch.randint(2**63 - 1, (1,))
        mask = kept((4, 6, 33), p, seed) * low_rank.dropout_scale(p) if p else 1.0

        def formula(y, x, *factors, mask=mask):
            args = (y, x * mask, factors[:3], factors[3:], scaling, Groups.of(index))
            out = grouped_low_rank_reference(*args)
            return [out, *both_gradients(out, (y, x, *factors))]

        # a second gradient goes through all sums three times
        truth = chained(formula, own, 3 * (24 + 33 + 4 + 5), torch.float32)
        for i, (got, of) in enumerate(zip(found, truth, strict=True)):
            right(f"result {i}", got, of, torch.float32)


def cases():
    for dtypes in DTYPES:
        for shape in SHAPES if dtypes in ("float32", "float16") else list(SHAPES)[5:6]:
            yield f"{shape}, {dtypes}", lambda s=shape, d=dtypes: shaped(s, d)
    for name in LAYOUTS:
        yield name, lambda n=name: layout(n)
    yield "rows far apart", far_rows
    yield "factors far apart", far_factors
    yield "dropout", dropout
    yield "three ways", three_ways
    yield "through the operators", module
