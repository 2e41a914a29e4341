"""The composition of a rescaled layer in the interpreter; `interpreted.py` runs it."""

import torch
from hostile import LAYOUTS, arranged, drawn, edged, far, near

from adapterzoo import kernels
from adapterzoo.kernels import compose, compose_triton

S = 0.7
ALONE = ("a tile and a bit", "no update")
NEEDS = (True, True, True, True, True)
SHAPES = {
    # rows, d_out, rank; 0: no update
    "one of each": (1, 1, 1),
    "no rows": (0, 33, 3),
    "one beside the tile": (17, 100, 3),
    "a tile and a bit": (70, 33, 24),
    "several parts": (5, 270, 8),
    "several blocks": (260, 20, 16),
    "rank over its tile": (70, 36, 100),
    "no update": (70, 130, 0),
    "no update, no rows": (0, 33, 0),
}
# of y and the bias, of t, of b, and how exact the result is
DTYPES = {
    "float32": (torch.float32, torch.float32, torch.float32, 1e-6),
    "float16": (torch.float16, torch.float16, torch.float16, 1.5e-3),
    "float32 factors": (torch.float16, torch.float32, torch.float32, 1.5e-3),
    "float16 factors": (torch.float32, torch.float16, torch.float16, 2e-3),
    "t of autocast": (torch.float16, torch.float16, torch.float32, 1.5e-3),
    "bfloat16": (torch.bfloat16, torch.bfloat16, torch.bfloat16, 1.6e-2),
    "two halves": (torch.bfloat16, torch.bfloat16, torch.float16, 1.6e-2),
}


def against_float64(y, dy, gain, bias, t, b, tolerance, alone=False):
    """Both kernels, and the backward from y and from the output; each gradient alone on demand."""
    given = {"y": y, "gain": gain, "bias": bias, "t": t, "b": b}
    wide = {k: None if v is None else v.double().requires_grad_() for k, v in given.items()}
    whole = wide["y"] if t is None else wide["y"] + S * wide["t"] @ wide["b"].T
    own = 0.0 if bias is None else wide["bias"]
    truth = (whole - own) * wide["gain"] + own
    out = compose_triton.compose(y, gain, bias, t, b, S)
    near("out", out, truth.detach(), tolerance, y.dtype)
    truth.backward(dy.double())
    grads = compose_triton.compose_backward(dy, y, gain, bias, t, b, S, False, *NEEDS)
    for (name, of), got in zip(given.items(), grads, strict=True):
        if of is None:
            assert got.numel() == 0
        else:
            near(f"of {name}", got, wide[name].grad, tolerance, of.dtype)
            assert got.is_contiguous()
    if bool((gain.abs() > 0.5).all()):
        told = compose_triton.compose_backward(dy, out, gain, bias, t, b, S, True, *NEEDS)
        near("of gain, told", told[1], wide["gain"].grad, 4 * tolerance, gain.dtype)
        assert all(
            torch.equal(p, q) for i, (p, q) in enumerate(zip(told, grads, strict=True)) if i - 1
        )
    for i in range(5) if alone else ():
        needs = [i == j for j in range(5)]
        # y is there only where it is looked at
        kept = y if i == 1 else y.new_empty(0)
        lone = compose_triton.compose_backward(dy, kept, gain, bias, t, b, S, False, *needs)
        for j, (p, q) in enumerate(zip(lone, grads, strict=True)):
            if i == j:
                near(f"only {i}", p, q.double(), tolerance, q.dtype)
            else:
                assert p.numel() == 0


def gains(width):
    """Around 1, of either sign, with one that is zero and one that is tiny."""
    gain = 1 + edged(1, width, torch.float32)[0] / 4
    gain[::3] *= -1
    gain[width // 2 :][:2] = torch.tensor([0.0, 1e-30])[: width - width // 2]
    return gain


def shaped(shape, dtypes):
    rows, width, rank = SHAPES[shape]
    outer, of_t, of_b, tolerance = DTYPES[dtypes]
    y, dy, bias = edged(rows, width, outer), edged(rows, width, outer), edged(1, width, outer)[0]
    t, b = (edged(rows, rank, of_t), edged(width, rank, of_b)) if rank else (None, None)
    large = 1 + drawn(width, dtype=torch.float32).abs()
    against_float64(y, dy, gains(width), bias, t, b, tolerance, shape in ALONE)
    against_float64(y, dy, large, None, t, b, tolerance)


def layout(name):
    y, dy = arranged(name, 18, 50), arranged(name, 18, 50)
    t, b = arranged(name, 18, 3), arranged(name, 50, 3).reshape(-1, 3)[:50]
    gain, bias = drawn(100, dtype=torch.float32)[::2], drawn(100, dtype=torch.float32)[::2]
    against_float64(y, dy, gain, bias, t, b, 1e-6)


def far_rows():
    rows, gain = far(10, 20), drawn(20, dtype=torch.float32)
    t, b = drawn(10, 3, dtype=torch.float16), drawn(20, 3, dtype=torch.float16)
    against_float64(rows, rows, gain, None, t, b, 1.5e-3)


def wide_rank():
    """Where the parts of the fused backward are too many bytes."""
    compose_triton._WIDEST_RANK = 4
    shaped("a tile and a bit", "float32")
    shaped("several blocks", "float16")
    compose_triton._WIDEST_RANK = 1 << 30


def module():
    """Through the operators, with a gain of zero: gradients are those of float64."""
    values = [drawn(*s, dtype=torch.float64) for s in ((4, 6, 9), (9,), (9,), (4, 6, 3), (9, 3))]
    values[1][4] = 0.0
    own = [v.float().requires_grad_() for v in values]
    with kernels.use("triton"):
        out = compose.compose(*own, S)
        out.square().sum().backward()
    y, gain, bias, t, b = (v.requires_grad_() for v in values)
    truth = (y + S * t @ b.T - bias) * gain + bias
    truth.square().sum().backward()
    near("out", out.detach(), truth.detach(), 1e-6, torch.float32)
    for got, wide in zip(own, values, strict=True):
        near("gradient", got.grad, wide.grad, 1e-6, torch.float32)


def kept_bits():
    """A gain of one and an update of zero give back y, bit by bit."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        y, bias = edged(70, 40, dtype), edged(1, 40, dtype)[0]
        t, b = edged(70, 3, dtype), torch.zeros(40, 3, dtype=dtype)
        for own in (bias, None):
            assert torch.equal(compose_triton.compose(y, torch.ones(40), own, t, b, S), y)


def cases():
    compose_triton._WIDEST_RANK = 1 << 30
    for dtypes in DTYPES:
        for shape in SHAPES if dtypes == "float32" else list(SHAPES)[2:4]:
            yield f"{shape}, {dtypes}", lambda s=shape, d=dtypes: shaped(s, d)
    for name in LAYOUTS:
        yield name, lambda n=name: layout(n)
    yield "rows far apart", far_rows
    yield "a wide rank", wide_rank
    yield "through the operators", module
    yield "bits are kept", kept_bits
