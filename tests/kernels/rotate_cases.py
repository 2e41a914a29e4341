"""BOFT's rotations in the interpreter; `interpreted.py` runs it."""

import torch
from hostile import LAYOUTS, arranged, drawn, edged, far
from rounded import Rounded, chained, right

from adapterzoo import kernels
from adapterzoo.kernels import butterfly, butterfly_triton

SHAPES = {
    # rows, chunks, width
    "one of each": (1, 1, 1),
    "no rows": (0, 3, 16),
    "the narrowest": (70, 3, 16),
    "narrow ones that share a tile": (70, 21, 4),
    "odd ones that share a tile": (17, 23, 3),
    "padded": (17, 5, 15),
    "a prime above the narrowest": (130, 3, 17),
    "wide": (65, 2, 64),
    "the widest": (70, 1, 128),
    "padded to the widest": (20, 2, 100),
    "several parts": (300, 2, 16),
    "over the widest": (5, 2, 160),
}
# of x and of the rotations
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float32),
    "bfloat16": (torch.bfloat16, torch.float32),
    "half rotations": (torch.float32, torch.float16),
}


def against_float64(x, dy, blocks):
    """Both kernels; the product is with what the rotations are in the dtype of x."""
    *experts, chunks, width, _ = blocks.shape
    own = Rounded(blocks).to(x.dtype)

    def parts(v):
        return Rounded(v.reshape(*experts, -1, chunks, width).transpose(-3, -2))

    def whole(v):
        return v.arranged(lambda w: w.transpose(-3, -2).reshape(x.shape))

    right("y", butterfly_triton.rotate(x, blocks), whole(parts(x) @ own), x.dtype)
    dx, dblocks = butterfly_triton.rotate_backward(dy, x, blocks)
    of_x = whole(parts(dy) @ own.mT)
    right("dx", dx, of_x, x.dtype)
    right("dblocks", dblocks, parts(x).mT @ parts(dy), blocks.dtype)
    lone, none = butterfly_triton.rotate_backward(dy, x.new_empty(0), blocks, True, False)
    # in other tiles
    right("dx alone", lone, of_x, x.dtype)
    assert none.numel() == 0
    none, lone = butterfly_triton.rotate_backward(dy, x, blocks, False, True)
    assert torch.equal(lone, dblocks)
    assert none.numel() == 0


def rotations(chunks, width, dtype):
    """Between NaN: what is read of a neighbour spoils the result."""
    whole = torch.full((2 * chunks, width + 2, width + 2), float("nan"), dtype=dtype)
    return whole[::2, 1:-1, 1:-1].copy_(drawn(chunks, width, width, dtype=dtype))


def shaped(shape, dtypes):
    rows, chunks, width = SHAPES[shape]
    of_x, of_blocks = DTYPES[dtypes]
    x, dy = edged(rows, chunks * width, of_x), edged(rows, chunks * width, of_x)
    blocks = rotations(chunks, width, of_blocks)
    against_float64(x, dy, blocks)
    against_float64(x, dy, blocks.mT)


def layout(name):
    x, dy = arranged(name, 18, 48), arranged(name, 18, 48)
    against_float64(x, dy, rotations(3, 16, torch.float32))


def experts():
    """Each has its own rotation, and a batch of its own."""
    for lead, batch in (((3,), (5, 2)), ((2, 3), (7,))):
        x, dy = (drawn(*lead, *batch, 32, dtype=torch.float32) for _ in range(2))
        against_float64(x, dy, drawn(*lead, 2, 16, 16, dtype=torch.float32))


def far_rows():
    rows = far(10, 32)
    against_float64(rows, rows, rotations(2, 16, torch.float32))


def module():
    """Through the operator, from several factors and with experts."""
    own = [
        drawn(*s, dtype=torch.float32).requires_grad_() for s in ((2, 5, 3, 32), (2, 2, 8, 4, 4))
    ]
    for transposed in (False, True):
        with kernels.use("triton"):
            y = butterfly.butterfly(*own, transposed)
            found = [y, *torch.autograd.grad(y.square().sum(), own)]

        def formula(x, Q, transposed=transposed):
            y = butterfly.butterfly_reference(x, Q, transposed)
            return [y, *torch.autograd.grad(y.square().sum(), (x, Q))]

        # the factors and their fold, forwards and backwards, and the rows
        truth = chained(formula, own, 2 * (8 + 8) + 15, torch.float32)
        for got, of in zip(found, truth, strict=True):
            right("result", got, of, torch.float32)


def kept_bits():
    """Identities change no bit."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = edged(70, 48, dtype)
        assert torch.equal(butterfly_triton.rotate(x, torch.eye(16).expand(3, 16, 16)), x)


def parts():
    """All rows have a part, no part is empty."""
    for rows in (0, 1, 64, 65, 1000, 8192):
        for tall in (16, 64):
            for programs in (1, 7, 256, 5000):
                number, part = butterfly_triton._parts(rows, tall, programs)
                assert number * part >= rows
                assert (number - 1) * part < max(rows, 1)
                assert part % tall == 0


def cases():
    for dtypes in DTYPES:
        for shape in SHAPES if dtypes == "float32" else list(SHAPES)[3:9:3]:
            yield f"{shape}, {dtypes}", lambda s=shape, d=dtypes: shaped(s, d)
    for name in LAYOUTS:
        yield name, lambda n=name: layout(n)
    yield "experts", experts
    yield "rows far apart", far_rows
    yield "through the operator", module
    yield "bits are kept", kept_bits
    yield "parts", parts
