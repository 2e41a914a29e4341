"""DoRA's norms in the interpreter; `interpreted.py` runs it."""

import torch
from hostile import LAYOUTS, arranged, drawn, edged, far, near

from adapterzoo import kernels
from adapterzoo.kernels import dora, row_norm_triton

S = 0.7
SHAPES = {
    # d_out, d_in, rank
    "one of each": (1, 1, 1),
    "no rows": (0, 33, 3),
    "no features": (5, 0, 3),
    "one beside the tile": (17, 129, 3),
    "a tile and a bit": (70, 33, 24),
    "rank of a tile": (33, 100, 64),
    "rank over its tile": (20, 140, 100),
    "rank over the width": (20, 40, 70),
}
DTYPES = {
    "float32": (torch.float32,) * 3,
    "float16": (torch.float16,) * 3,
    "bfloat16": (torch.bfloat16,) * 3,
    "float32 factors": (torch.bfloat16, torch.float32, torch.float32),
    "float16 factors": (torch.float32, torch.float16, torch.float16),
    "two halves": (torch.bfloat16, torch.float16, torch.float16),
    "each its own": (torch.float16, torch.float32, torch.bfloat16),
}


def against_float64(w, a, b, s=S):
    whole = w.double() + s * b.double() @ a.double()
    truth = torch.linalg.vector_norm(whole, dim=-1)
    got = row_norm_triton.row_norm(w, a, b, s)
    near("norm", got, truth, 1e-6, torch.float32)
    # each row to its own size, but for what is lost where two elements cancel
    eps = torch.finfo(torch.float32).eps
    lost = 16 * eps * truth + 2 * eps * torch.linalg.vector_norm(w.double(), dim=-1)
    if not bool(((got - truth).abs() <= lost).all()):
        raise ValueError(f"a row is wrong by {((got - truth).abs() / lost).max():.1f} times")


def shaped(shape, dtypes):
    d_out, d_in, rank = SHAPES[shape]
    of_w, of_a, of_b = DTYPES[dtypes]
    against_float64(edged(d_out, d_in, of_w), edged(rank, d_in, of_a), edged(d_out, rank, of_b))


def layout(name):
    w, a, b = (arranged(name, *shape) for shape in ((18, 40), (3, 40), (18, 3)))
    against_float64(w, a, b)


def cancelling():
    """Rows of w ≈ −s · b a beside ordinary ones, at ranks inside and over the tile."""
    for rank in (3, 70):
        for left in (0.3, 1e-2, 0.0) if rank == 3 else (1e-4,):
            a, b = edged(rank, 90, torch.float32), edged(40, rank, torch.float32)
            w = edged(40, 90, torch.float32)
            some = torch.arange(40) % 3 == 0
            w[some] = (-S * (b.double() @ a.double()) + left * w.double()).float()[some]
            against_float64(w, a, b)


def rows_of_zeros():
    w, a, b = edged(20, 33, torch.float16), edged(3, 33, torch.float16), edged(20, 3, torch.float16)
    w[4] = 0.0
    b[4:6] = 0.0
    against_float64(w, a, b)
    assert row_norm_triton.row_norm(w, a, b, S)[4] == 0.0


def kept_bits():
    """A b of zeros gives the norm of w, whatever a and s are: a fresh gain is exactly one."""
    for rank in (3, 70):
        w, a = edged(33, 70, torch.bfloat16), edged(rank, 70, torch.bfloat16)
        b = torch.zeros(33, rank, dtype=torch.bfloat16)
        once = row_norm_triton.row_norm(w, a, b, 3.0)
        assert torch.equal(once, row_norm_triton.row_norm(w, 9 * a, b, 0.0))


def not_a_number():
    w, a, b = (edged(*s, torch.float32) for s in ((20, 33), (3, 33), (20, 3)))
    w[7, 5] = float("nan")
    bad = row_norm_triton.row_norm(w, a, b, S).isnan()
    assert bad.nonzero().tolist() == [[7]]


def far_rows():
    against_float64(far(10, 20), drawn(3, 20, dtype=torch.float16), far(10, 3))


def module():
    """Through the operator, with experts."""
    w, a, b = (drawn(*s, dtype=torch.float32) for s in ((3, 9, 40), (3, 4, 40), (3, 9, 4)))
    torch.set_float32_matmul_precision("medium")
    with kernels.use("triton"), torch.autocast("cpu", torch.bfloat16):
        got = dora.row_norm(w, a, b, S)
    truth = torch.linalg.vector_norm(w.double() + S * b.double() @ a.double(), dim=-1)
    near("norm", got, truth, 1e-6, torch.float32)
    with kernels.use("triton"):
        asked = dora.row_norm(w, a.requires_grad_(), b, S)
    assert asked.requires_grad


def gains():
    """The magnitudes divided by the norms, and the norm's inverse; a fresh gain is exactly one."""
    for rank in (3, 70):
        w, a, b = (edged(*shape, torch.float16) for shape in ((70, 33), (rank, 33), (70, rank)))
        w[4], b[4] = 0.0, 0.0
        m = edged(70, 1, torch.float32)[:, 0]
        gain, inverse = row_norm_triton.row_gain(w, a, b, m, S)
        norm = torch.linalg.vector_norm(w.double() + S * b.double() @ a.double(), dim=-1)
        zero = norm == 0
        near("gain", gain, torch.where(zero, 1.0, m.double() / norm), 1e-6, torch.float32)
        near("inverse", inverse, torch.where(zero, 0.0, 1 / norm), 1e-6, torch.float32)
        again = row_norm_triton.row_norm(w, a, b, S)
        assert torch.equal(row_norm_triton.row_gain(w, a, b, again, S)[0], torch.ones(70))


def gain_through_the_operator():
    w, a, b = (drawn(*s, dtype=torch.float32) for s in ((3, 9, 40), (3, 4, 40), (3, 9, 4)))
    m, a = drawn(3, 9, dtype=torch.float32).requires_grad_(), a.requires_grad_()
    with kernels.use("triton"), torch.autocast("cpu", torch.bfloat16):
        got = dora.row_gain(w, a, b, m, S)
    wide = m.detach().double().requires_grad_()
    truth = wide / torch.linalg.vector_norm(w.double() + S * b.double() @ a.double(), dim=-1)
    near("gain", got.detach(), truth.detach(), 1e-6, torch.float32)
    of_m, of_a = torch.autograd.grad(got.square().sum(), (m, a), allow_unused=True)
    near("of m", of_m, torch.autograd.grad(truth.square().sum(), wide)[0], 1e-6, torch.float32)
    # the norm is a constant (§4.3)
    assert of_a is None or not of_a.any()
    for s in range(2):
        d_in = 0 if s else 5
        w, a, b = (drawn(*s, dtype=torch.float32) for s in ((4, d_in), (3, d_in), (4, 3)))
        gain = row_norm_triton.row_gain(w, a, b, torch.zeros(4), S)[0]
        assert torch.equal(gain, torch.ones(4) if s else torch.zeros(4))


def cases():
    for dtypes in DTYPES:
        for shape in SHAPES if dtypes == "float32" else list(SHAPES)[3:7:3]:
            yield f"{shape}, {dtypes}", lambda s=shape, d=dtypes: shaped(s, d)
    for name in LAYOUTS:
        yield name, lambda n=name: layout(n)
    yield "cancelling rows", cancelling
    yield "rows of zeros", rows_of_zeros
    yield "bits are kept", kept_bits
    yield "not a number", not_a_number
    yield "rows far apart", far_rows
    yield "through the operator", module
    yield "gains", gains
    yield "gain through the operator", gain_through_the_operator
