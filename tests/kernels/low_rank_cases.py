"""The low-rank update in the interpreter; `interpreted.py` runs it."""

import torch
from hostile import LAYOUTS, arranged, both_gradients, drawn, edged, far
from rounded import Rounded, chained, right

from adapterzoo import kernels
from adapterzoo.kernels import compose_triton, low_rank, low_rank_triton

S = 0.7
SHAPES = {
    # rows, d_in, d_out, rank
    "one of each": (1, 1, 1, 1),
    "no rows": (0, 33, 5, 3),
    "one beside the tile": (17, 33, 100, 3),
    "a tile and a bit": (70, 100, 33, 24),
    "several parts": (5, 300, 270, 8),
    "several blocks": (260, 33, 20, 16),
    "rank over its tile": (3, 40, 36, 100),
}
# of x and y, and of the factors
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "float32 factors": (torch.float16, torch.float32),
    "float16 factors": (torch.float32, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16, float32 factors": (torch.bfloat16, torch.float32),
}


def rows_of(v):
    return v.reshape(-1, v.shape[-1])


def against_float64(x, dy, y, a, b, p=0.0, seed=None, between=torch.float32):
    """All four kernels, each on the operands that it would have in a training step.

    `between`: the dtype of products before they are scaled.
    """
    wide = a.dtype
    mask = torch.ones(x.shape, dtype=torch.float64) if seed is None else kept(x.shape, p, seed)
    scaled = Rounded(mask * low_rank.dropout_scale(p))
    dropped = Rounded(x.to(wide)) * scaled
    own_dy, own_a, own_b = Rounded(dy.to(wide)), Rounded(a), Rounded(b)
    t = low_rank_triton.shrink(x, a, p, seed)
    right("t", t, dropped @ own_a.mT, wide)
    own_t = Rounded(t)
    out = low_rank_triton.expand(y, t, b, S)
    right("out", out, Rounded(y) + own_t @ own_b.mT * S, y.dtype)
    dt, db = low_rank_triton.expand_backward(dy, t, b, S)
    right("dt", dt, (own_dy @ own_b).to(between) * S, wide)
    product = own_dy.arranged(rows_of).mT @ own_t.arranged(rows_of)
    right("db", db, product.to(between) * S, b.dtype)
    dx, da = low_rank_triton.shrink_backward(dt, x, a, p, seed)
    own_dt = Rounded(dt)
    # without dropout the product is torch's, in the dtype of the factors
    right("dx", dx, (own_dt @ own_a * scaled).to(wide if seed is None else between), x.dtype)
    right("da", da, own_dt.arranged(rows_of).mT @ dropped.arranged(rows_of), wide)
    # only what is needed
    assert torch.equal(low_rank_triton.expand_backward(dy, t, b, S, False, True)[1], db)
    lone, none = low_rank_triton.shrink_backward(dt, x.new_empty(0), a, p, seed, True, False)
    assert torch.equal(lone, dx)
    assert none.numel() == 0


def kept(shape, p, seed):
    """The mask of a seed: Philox 4x32-7 written out in integers of any size."""
    mask = torch.empty(shape, dtype=torch.float64).reshape(-1, shape[-1])
    key0, key1 = seed.item() & 0xFFFFFFFF, seed.item() >> 32
    for row in range(mask.shape[0]):
        for group in range(-(-shape[-1] // 8)):
            c, k = [row, group, 0, 0], [key0, key1]
            for _ in range(7):
                left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
                c = [
                    (right >> 32) ^ c[1] ^ k[0],
                    right & 0xFFFFFFFF,
                    (left >> 32) ^ c[3] ^ k[1],
                    left & 0xFFFFFFFF,
                ]
                k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
            # pairs of words are joined, then the pairs; of each word the low half comes first
            halves = [c[word] >> 16 * high & 0xFFFF for word in (0, 2, 1, 3) for high in (0, 1)]
            for i, half in enumerate(halves):
                if group * 8 + i < shape[-1]:
                    mask[row, group * 8 + i] = float(half >= low_rank.dropout_threshold(p))
    return mask.reshape(shape)


def shaped(shape, dtypes):
    rows, d_in, d_out, rank = SHAPES[shape]
    outer, factor = DTYPES[dtypes]
    x, dy = edged(rows, d_in, outer), edged(rows, d_out, outer)
    y = edged(rows, d_out, outer)
    a, b = edged(rank, d_in, factor), edged(d_out, rank, factor)
    against_float64(x, dy, y, a, b)


def layout(name):
    x, dy, y = arranged(name, 18, 40), arranged(name, 18, 50), arranged(name, 18, 50)
    a, b = arranged(name, 3, 40), arranged(name, 50, 3)
    against_float64(x, dy, y, a.reshape(-1, 40)[:3], b.reshape(-1, 3)[:50])


def far_rows():
    rows = far(10, 20)
    a, b = drawn(3, 20, dtype=torch.float16), drawn(20, 3, dtype=torch.float16)
    against_float64(rows, rows, rows, a, b)


def dropout():
    seed = torch.tensor([(123 << 32) + 77])
    x, dy, y = (drawn(3, 7, d, dtype=torch.float32) for d in (45, 20, 20))
    a, b = drawn(3, 45, dtype=torch.float32), drawn(20, 3, dtype=torch.float32)
    against_float64(x, dy, y, a, b, 0.3, seed)


def wide_rank():
    """Where the parts of the fused backward are too many bytes, and torch computes the products."""
    compose_triton._WIDEST_RANK = low_rank_triton._WIDEST_RANK = 4
    seed = torch.tensor([(123 << 32) + 77])
    for outer, factor in DTYPES.values():
        # not with NaN around: products of bfloat16 on the CPU spread it from beyond the edges
        x, dy, y = (drawn(35, d, dtype=outer) for d in (145, 20, 20))
        a, b = drawn(9, 145, dtype=factor), drawn(20, 9, dtype=factor)
        for p, noise in ((0.0, None), (0.3, seed)):
            against_float64(x, dy, y, a, b, p, noise, factor)
    compose_triton._WIDEST_RANK = low_rank_triton._WIDEST_RANK = 1 << 30


def module():
    """Through the operators: gradients in float32 equal those of the torch path in float64."""
    for p in (0.0, 0.25):
        shapes = ((4, 6, 5), (4, 6, 33), (3, 33), (5, 3))
        own = [drawn(*s, dtype=torch.float32).requires_grad_() for s in shapes]
        torch.manual_seed(3)
        with kernels.use("triton"):
            out = low_rank.low_rank(*own, S, p, training=True)
            found = [out, *both_gradients(out, own)]
        torch.manual_seed(3)
        seed = torch.randint(2**63 - 1, (1,))
        mask = kept((4, 6, 33), p, seed) * low_rank.dropout_scale(p) if p else 1.0

        def formula(y, x, a, b, mask=mask):
            out = y + S * (x * mask) @ a.T @ b.T
            return [out, *both_gradients(out, (y, x, a, b))]

        # a second gradient goes through all sums three times
        truth = chained(formula, own, 3 * (24 + 33 + 3 + 5), torch.float32)
        for i, (got, of) in enumerate(zip(found, truth, strict=True)):
            right(f"result {i}", got, of, torch.float32)


def cases():
    # the fused kernels are what is tested here, at every rank
    compose_triton._WIDEST_RANK = low_rank_triton._WIDEST_RANK = 1 << 30
    for dtypes in DTYPES:
        for shape in SHAPES if dtypes in ("float32", "float16") else list(SHAPES)[2:4]:
            yield f"{shape}, {dtypes}", lambda s=shape, d=dtypes: shaped(s, d)
    for name in LAYOUTS:
        yield name, lambda n=name: layout(n)
    yield "rows far apart", far_rows
    yield "dropout", dropout
    yield "a wide rank", wide_rank
    yield "through the operators", module
