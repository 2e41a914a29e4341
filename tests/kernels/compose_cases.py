"""The composition of a rescaled layer in the interpreter; `interpreted.py` runs it."""

import torch
from hostile import LAYOUTS, arranged, drawn, edged, far
from low_rank_cases import rows_of
from rounded import Rounded, chained, right

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
# of y and the bias, of t, and of b
DTYPES = {
    "float32": (torch.float32, torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16, torch.float16),
    "float32 factors": (torch.float16, torch.float32, torch.float32),
    "float16 factors": (torch.float32, torch.float16, torch.float16),
    "t of autocast": (torch.float16, torch.float16, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "two halves": (torch.bfloat16, torch.bfloat16, torch.float16),
}


def truth(y, dy, gain, bias, t, b, between):
    """Return the output, all gradients, and the gain's where the output is kept instead of y.

    `between`: the dtype of products before they are scaled.
    """
    flat_dy, of_gain, none = Rounded(rows_of(dy)), Rounded(gain), Rounded(y.new_zeros(()))
    own, minus = (none, none) if bias is None else (Rounded(bias), Rounded(-bias))
    whole, of_y, of_t, of_b = Rounded(y), Rounded(dy) * of_gain, None, None
    # torch subtracts the bias in the dtype of y
    slope = (flat_dy * (whole.arranged(rows_of) + minus).to(y.dtype)).sum(0)
    if t is not None:
        factor, wide = Rounded(b), torch.promote_types(t.dtype, b.dtype)
        whole = whole + Rounded(t) @ factor.mT * S
        of_t = (of_y.to(y.dtype).to(wide) @ factor).to(between) * S
        product = (Rounded(rows_of(dy).to(wide)).mT @ Rounded(rows_of(t))).to(between)
        slope = slope + (product * factor).sum(-1) * S
        of_b = product * of_gain.arranged(lambda v: v.unsqueeze(-1)) * S
    rest = Rounded(1.0 - gain.double())
    out = whole * of_gain + rest * own
    kept = out.to(y.dtype).arranged(rows_of)
    told = (flat_dy * (kept + minus)).sum(0) * Rounded(1.0 / gain.double())
    of_bias = None if bias is None else flat_dy.sum(0) * rest
    return out, (of_y, slope, of_bias, of_t, of_b), told


def against_float64(y, dy, gain, bias, t, b, alone=False, between=torch.float32):
    """Both kernels, and the backward from y and from the output; each gradient alone on demand."""
    given = {"y": y, "gain": gain, "bias": bias, "t": t, "b": b}
    expected, wanted, by_output = truth(y, dy, gain, bias, t, b, between)
    out = compose_triton.compose(y, gain, bias, t, b, S)
    right("out", out, expected, y.dtype)
    grads = compose_triton.compose_backward(dy, y, gain, bias, t, b, S, False, *NEEDS)
    for (name, of), got, want in zip(given.items(), grads, wanted, strict=True):
        if of is None:
            assert got.numel() == 0
        else:
            right(f"of {name}", got, want, of.dtype)
            assert got.is_contiguous()
    if bool((gain.abs() > 0.5).all()):
        told = compose_triton.compose_backward(dy, out, gain, bias, t, b, S, True, *NEEDS)
        right("of gain, told", told[1], by_output, gain.dtype)
        assert all(
            torch.equal(p, q) for i, (p, q) in enumerate(zip(told, grads, strict=True)) if i - 1
        )
    for i in range(5) if alone else ():
        needs = [i == j for j in range(5)]
        # y is there only where it is looked at
        kept = y if i == 1 else y.new_empty(0)
        lone = compose_triton.compose_backward(dy, kept, gain, bias, t, b, S, False, *needs)
        for j, (p, q) in enumerate(zip(lone, grads, strict=True)):
            if i == j and q.numel():
                right(f"only {i}", p, wanted[i], q.dtype)
            else:
                assert p.numel() == 0


def gains(width):
    """Around 1, of either sign, with one that is zero and one that is tiny."""
    gain = 1 + edged(1, width, torch.float32)[0] / 4
    gain[::3] *= -1
    gain[width // 2 :][:2] = torch.tensor([0.0, 1e-30])[: width - width // 2]
    return gain


def shaped(shape, dtypes, between=torch.float32):
    rows, width, rank = SHAPES[shape]
    outer, of_t, of_b = DTYPES[dtypes]
    y, dy, bias = edged(rows, width, outer), edged(rows, width, outer), edged(1, width, outer)[0]
    t, b = (edged(rows, rank, of_t), edged(width, rank, of_b)) if rank else (None, None)
    large = 1 + drawn(width, dtype=torch.float32).abs()
    against_float64(y, dy, gains(width), bias, t, b, shape in ALONE, between)
    against_float64(y, dy, large, None, t, b, False, between)


def layout(name):
    y, dy = arranged(name, 18, 50), arranged(name, 18, 50)
    t, b = arranged(name, 18, 3), arranged(name, 50, 3).reshape(-1, 3)[:50]
    gain, bias = drawn(100, dtype=torch.float32)[::2], drawn(100, dtype=torch.float32)[::2]
    against_float64(y, dy, gain, bias, t, b)


def far_rows():
    rows, gain = far(10, 20), drawn(20, dtype=torch.float32)
    t, b = drawn(10, 3, dtype=torch.float16), drawn(20, 3, dtype=torch.float16)
    against_float64(rows, rows, gain, None, t, b)


def wide_rank():
    """Where the parts of the fused backward are too many bytes."""
    compose_triton._WIDEST_RANK = 4
    shaped("a tile and a bit", "float32")
    shaped("several blocks", "float16", torch.float16)
    compose_triton._WIDEST_RANK = 1 << 30


def module():
    """Through the operators, with a gain of zero: gradients are those of float64."""
    shapes = ((4, 6, 9), (9,), (9,), (4, 6, 3), (9, 3))
    own = [drawn(*s, dtype=torch.float32) for s in shapes]
    own[1][4] = 0.0
    with kernels.use("triton"):
        out = compose.compose(*(v.requires_grad_() for v in own), S)
        found = [out, *torch.autograd.grad(out.square().sum(), own)]

    def formula(y, gain, bias, t, b, minus):
        out = (y + S * t @ b.T + minus * bias) * gain + bias
        return [out, *torch.autograd.grad(out.square().sum(), (y, gain, bias, t, b))]

    # a number whose absolute value is that of a sum
    truth = chained(formula, [*own, torch.tensor(-1.0)], 24 + 9 + 3, torch.float32)
    for got, of in zip(found, truth, strict=True):
        right("result", got, of, torch.float32)


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
