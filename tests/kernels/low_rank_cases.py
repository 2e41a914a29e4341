"""The low-rank update in the interpreter; `interpreted.py` runs it."""

import torch
from hostile import LAYOUTS, arranged, drawn, edged, far, near, second_gradients

from adapterzoo import kernels
from adapterzoo.kernels import _dropout, compose_triton, low_rank, low_rank_triton

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
# of x and y, of the factors, and how exact the result is
DTYPES = {
    "float32": (torch.float32, torch.float32, 1e-6),
    "float16": (torch.float16, torch.float16, 1.5e-3),
    "float32 factors": (torch.float16, torch.float32, 1e-3),
    "float16 factors": (torch.float32, torch.float16, 2e-3),
    "bfloat16": (torch.bfloat16, torch.bfloat16, 1.6e-2),
    "bfloat16, float32 factors": (torch.bfloat16, torch.float32, 1.6e-2),
}


def against_float64(x, dy, y, a, b, tolerance, p=0.0, seed=None):
    """All four kernels, each on the operands that it would have in a training step."""
    scale, wide = _dropout.kept_scale(p), a.dtype
    mask = torch.ones(x.shape, dtype=torch.float64) if seed is None else kept(x.shape, p, seed)
    dropped = x.double() * mask * scale
    t = low_rank_triton.shrink(x, a, p, seed)
    near("t", t, dropped @ a.double().T, tolerance, wide)
    out = low_rank_triton.expand(y, t, b, S)
    near("out", out, y.double() + S * t.double() @ b.double().T, tolerance, y.dtype)
    dt, db = low_rank_triton.expand_backward(dy, t, b, S)
    near("dt", dt, S * dy.double() @ b.double(), tolerance, wide)
    flat = dy.double().reshape(-1, dy.shape[-1])
    near("db", db, S * flat.T @ t.double().reshape(-1, t.shape[-1]), tolerance, b.dtype)
    dx, da = low_rank_triton.shrink_backward(dt, x, a, p, seed)
    near("dx", dx, dt.double() @ a.double() * mask * scale, tolerance, x.dtype)
    rows = dropped.reshape(-1, x.shape[-1])
    near("da", da, dt.double().reshape(-1, dt.shape[-1]).T @ rows, tolerance, wide)
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
                    mask[row, group * 8 + i] = float(half >= _dropout.threshold(p))
    return mask.reshape(shape)


def shaped(shape, dtypes):
    rows, d_in, d_out, rank = SHAPES[shape]
    outer, factor, tolerance = DTYPES[dtypes]
    x, dy = edged(rows, d_in, outer), edged(rows, d_out, outer)
    y = edged(rows, d_out, outer)
    a, b = edged(rank, d_in, factor), edged(d_out, rank, factor)
    against_float64(x, dy, y, a, b, tolerance)


def layout(name):
    x, dy, y = arranged(name, 18, 40), arranged(name, 18, 50), arranged(name, 18, 50)
    a, b = arranged(name, 3, 40), arranged(name, 50, 3)
    against_float64(x, dy, y, a.reshape(-1, 40)[:3], b.reshape(-1, 3)[:50], 1e-6)


def far_rows():
    rows = far(10, 20)
    a, b = drawn(3, 20, dtype=torch.float16), drawn(20, 3, dtype=torch.float16)
    against_float64(rows, rows, rows, a, b, 1.5e-3)


def dropout():
    seed = torch.tensor([(123 << 32) + 77])
    x, dy, y = (drawn(3, 7, d, dtype=torch.float32) for d in (45, 20, 20))
    a, b = drawn(3, 45, dtype=torch.float32), drawn(20, 3, dtype=torch.float32)
    against_float64(x, dy, y, a, b, 1e-6, 0.3, seed)


def wide_rank():
    """Where the parts of the fused backward are too many bytes, and torch computes the products."""
    compose_triton._WIDEST_RANK = low_rank_triton._WIDEST_RANK = 4
    seed = torch.tensor([(123 << 32) + 77])
    for outer, factor, tolerance in DTYPES.values():
        # not with NaN around: products of bfloat16 on the CPU spread it from beyond the edges
        x, dy, y = (drawn(35, d, dtype=outer) for d in (145, 20, 20))
        a, b = drawn(9, 145, dtype=factor), drawn(20, 9, dtype=factor)
        for p, noise in ((0.0, None), (0.3, seed)):
            # its products with torch round to a half dtype once more than the kernels
            against_float64(x, dy, y, a, b, 2 * tolerance, p, noise)
    compose_triton._WIDEST_RANK = low_rank_triton._WIDEST_RANK = 1 << 30


def module():
    """Through the operators: gradients in float32 equal those of the torch path in float64."""
    for p in (0.0, 0.25):
        values = [drawn(*s, dtype=torch.float64) for s in ((4, 6, 5), (4, 6, 33), (3, 33), (5, 3))]
        torch.manual_seed(3)
        own = [v.float().requires_grad_() for v in values]
        with kernels.use("triton"):
            out = low_rank.low_rank(*own, S, p, training=True)
        torch.manual_seed(3)
        seed = torch.randint(2**63 - 1, (1,))
        y, x, a, b = (v.requires_grad_() for v in values)
        mask = kept(x.shape, p, seed) * _dropout.kept_scale(p) if p else 1.0
        truth = y + S * (x * mask) @ a.T @ b.T
        with kernels.use("triton"):
            again = second_gradients(out, own)
            out.square().sum().backward()
        expected = second_gradients(truth, values)
        truth.square().sum().backward()
        near("out", out.detach(), truth.detach(), 1e-6, torch.float32)
        for name, got, wide in zip("yxab", own, values, strict=True):
            near(f"d{name}", got.grad, wide.grad, 1e-6, torch.float32)
        for name, got, wide in zip("yxab", again, expected, strict=True):
            near(f"the second gradient of {name}", got, wide, 2e-6, torch.float32)


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
